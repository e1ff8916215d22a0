"""What can be known to fail before a model loads: dashboards, the model's folder, the vLLM server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from transformers.trainer import get_reporting_integration_callbacks

from trl_ext.registry import unknown


def check_dashboards(report_to: list[str]) -> None:
    """Refuse a dashboard that is not installed.

    Raises:
        ValueError: with the package to install, or the dashboards that there are.
    """
    for name, callback in zip(report_to, get_reporting_integration_callbacks(report_to), strict=True):
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"--report_to {name}: {error} Or leave it out: --report_to none") from error


def check_model_folder(name: str) -> None:
    """Refuse a local path at which there is no model, which would be looked for on the Hub for a minute.

    Raises:
        ValueError: with the folders that are there.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return
    if path.is_dir():
        raise ValueError(f"model {name!r}: the folder has no config.json, so it holds no model")
    models = sorted(str(config.parent) for config in path.parent.glob("*/*config.json"))
    looks_like_a_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    if looks_like_a_hub_id and not (path.parent != Path() and (models or path.parent.name == "runs")):
        return
    raise unknown("model folder", name, set(models))


def check_server(config: Any) -> None:
    """Wait for the vLLM server as long as TRL does, before anything is loaded.

    Raises:
        ValueError: with the address that was tried and how long.
    """
    from trl.generation.vllm_client import VLLMClient

    address = config.vllm_server_base_url or f"http://{config.vllm_server_host}:{config.vllm_server_port}"
    try:
        VLLMClient(base_url=address, connection_timeout=config.vllm_server_timeout)
    except OSError as error:  # requests' ConnectionError is not Python's
        shown = urlsplit(address).netloc.rpartition("@")[2]  # without a password
        raise ValueError(
            f"no vLLM server answers at {shown} (waited {config.vllm_server_timeout:g} s, --vllm_server_timeout). "
            "Start one there, or set --vllm_server_host, --vllm_server_port or --vllm_server_base_url; "
            "--vllm_mode colocate needs none"
        ) from error
