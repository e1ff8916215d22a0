"""What is patched when: nothing by an import, and what `install` has by a parser or a trainer, without a recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ext.compat import install

ROOT = Path(__file__).parents[2]
EVERYTHING = """
import importlib, json, logging, os, pkgutil
import trl_ext
def of_the_process():
    quiet = logging.getLogger("vllm.triton_utils.importing").level
    return sorted(name for name in os.environ if name.startswith("DS_")), quiet
before = of_the_process()
for module in pkgutil.walk_packages(trl_ext.__path__, "trl_ext."):
    if not module.name.endswith("__main__") and ".their_graders." not in module.name:  # run by the harnesses
        importlib.import_module(module.name)
from tests.support.patched import patched
print(json.dumps([patched(), of_the_process() == before]))
"""
PARSER = """
import json
from trl import TrlParser
from tests.support.patched import patched
from trl_ext import ExtGRPOConfig
before = patched()
TrlParser(ExtGRPOConfig)
print(json.dumps([before, patched()]))
"""
TRAINER = """
import json, sys
from pathlib import Path
from tests.support.patched import patched
from tests.support.tiny import make_trainer, tiny_sft
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
before = patched()
if sys.argv[2] == "grpo":
    make_trainer(ExtGRPOTrainer, ExtGRPOConfig, Path(sys.argv[1]), lambda completions, **_: [0.0] * len(completions))
else:
    rows = [{"input_ids": [3, 4, 5], "completion_mask": [0, 1, 1]}]
    tiny_sft(ExtSFTTrainer, ExtSFTConfig, Path(sys.argv[1]), rows, completion_only_loss=True)
print(json.dumps([before, patched()]))
"""
# TRL's check for vLLM, of TRL's modules that were imported without it; tests/test_package.py holds what that comes to.
LAZY = {"trl.generation.vllm_client.is_vllm_available", "trl.generation.vllm_generation.is_vllm_available"}
INSTALLED = {
    "transformers.integrations.integration_utils.TrackioCallback.on_log",
    "transformers.integrations.integration_utils.rewrite_logs",
    "trl.scripts.utils.TrlParser.parse_args_into_dataclasses",
    "trl.scripts.utils.TrlParser.set_defaults_with_config",
}


def told_by(code: str, *arguments: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_importing_every_module_patches_nothing() -> None:
    functions, is_as_before = told_by(EVERYTHING)
    assert set(functions) <= LAZY
    assert is_as_before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_trainer_without_a_recipe_installs_what_it_needs(tmp_path: Path, kind: str) -> None:
    before, after = map(set, told_by(TRAINER, str(tmp_path), kind))
    assert before <= LAZY
    assert after - LAZY == INSTALLED


@pytest.mark.slow
def test_a_parser_of_our_settings_records_what_is_given() -> None:
    before, after = map(set, told_by(PARSER))
    assert before <= LAZY
    assert after - LAZY == INSTALLED


def test_installing_twice_is_installing_once() -> None:
    from transformers.integrations import integration_utils

    install()
    rewrite, send = integration_utils.rewrite_logs, integration_utils.TrackioCallback.on_log
    install()
    assert (integration_utils.rewrite_logs, integration_utils.TrackioCallback.on_log) == (rewrite, send)
