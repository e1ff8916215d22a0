"""lm-eval's `gsm8k`: the filters and the metric that the YAML file of the installed version names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.registry import get_metric
from lm_eval.filters import build_filter_ensemble

from trl_ext.io import read_yaml

_TASK: dict[str, Any] = read_yaml(Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml")
(_SETTINGS,) = _TASK["metric_list"]
_NAME: str = _SETTINGS["metric"]
_OPTIONS = {k: v for k, v in _SETTINGS.items() if k not in ("metric", "aggregation", "higher_is_better")}
_METRIC = get_metric(_NAME)
_FILTERS = {
    entry["name"]: build_filter_ensemble(entry["name"], [(s.pop("function"), s) for s in entry["filter"]]).filters
    for entry in _TASK["filter_list"]
}


def strict(response: str, reference: str) -> tuple[bool, str]:
    """`strict-match`: the number behind `####`."""
    return _grade("strict-match", response, reference)


def flexible(response: str, reference: str) -> tuple[bool, str]:
    """`flexible-extract`: the last number."""
    return _grade("flexible-extract", response, reference)


def _grade(name: str, response: str, reference: str) -> tuple[bool, str]:
    responses: Any = [[response]]
    for step in _FILTERS[name]:
        responses = step().apply(responses, [{}])
    (answer,) = responses
    score = _METRIC(references=[reference], predictions=[answer], **_OPTIONS)
    return bool(score[_NAME]), str(answer)


strict("#### 1", "1")  # what its functions import when they are called is imported before the worker has its limits
