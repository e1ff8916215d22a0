"""Settings as a command line writes them, and their limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def _number(value: Any) -> Any:
    """`value`, or the number it writes as `1e-6`, which YAML 1.1 reads as a text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def check_at_least_1(settings: object, *names: str) -> None:
    """Refuse a setting below 1; None means that it is not set."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def parse_options(name: str, options: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Options given as a mapping, as JSON, or as `a=1,b=2`; another text is a ValueError that shows both forms."""
    if options is None or isinstance(options, Mapping):
        return None if options is None else {key: _number(value) for key, value in options.items()}
    try:
        if options.lstrip().startswith("{"):
            parsed = json.loads(options)
            assert isinstance(parsed, dict)
            return parsed
        pairs = [item.split("=", 1) for item in options.split(",")]
        return {key.strip(): _number(yaml.safe_load(value)) for key, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f'{name} {options!r} is neither `eps_low=0.1,eps_high=0.3` nor JSON `{{"eps_low": 0.1}}`'
        ) from error
