"""Preregistered questions: what a YAML may say, and the verdict of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from scripts.lab_page import effects_table, hypotheses_of, write_effects_plot
from trl_ext.errors import InputError
from trl_ext.io import read_json
from trl_ext.tools.experiments.lab.answer import PARTS, write_report
from trl_ext.tools.experiments.lab.preregistration import (
    BEFORE,
    HOLDS,
    INCOMPLETE,
    NOT_SEEN,
    OPPOSITE,
    Effect,
    Hypothesis,
    effect_of,
    sentence,
)
from trl_ext.tools.experiments.lab.questions import (
    SEEDS,
    Question,
    check,
    question_names,
    read_lab,
    read_question,
)
from trl_ext.tools.experiments.metrics import value_of
from trl_ext.tools.experiments.runspec import RunSpec

EFFECTS = Path(__file__).parents[3] / "recipes" / "lab" / "effects"
GIVEN: dict[str, Any] = {
    "hypothesis": "It grows.", "cell": "long", "against": "short", "direction": "higher",
    "metric": "mean_tokens_incorrect", "seeds": [0, 1, 2], "published": "20 against 10", "source": "arXiv:1",
}  # fmt: skip


def asked(**changes: Any) -> dict[str, Any]:
    return {"question": "Which?", "reference": "short", "cells": {"long": {}, "short": {}},
            "preregistered": GIVEN | changes}  # fmt: skip


def run(tokens: float, accuracy: float = 0.5, **more: Any) -> dict[str, Any]:
    entry = {"accuracy": accuracy, "mean_tokens_incorrect": tokens, "problems": 100, "by_level": {"5": 0.25}}
    return {"validations": [entry | {"accuracy": 0.1, "pass@4": 0.9}, entry, entry | {"accuracy": 0.7, **more}]}


def verdict(long: dict[int, Any], short: dict[int, Any], **changes: Any) -> Effect:
    return effect_of(Hypothesis(**(GIVEN | changes)), {"long": long, "short": short})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "lnog"}, r"preregistered: cell: unknown cell 'lnog'\. Did you mean 'long'\? Known: long, short"),
        ({"against": "x"}, r"preregistered: against: unknown cell 'x'\. Known: before training, long, short"),
        ({"cell": "short"}, r"cell and against are both 'short': compare two"),
        ({"direction": "up"}, r"unknown direction 'up'\. Known: higher, lower"),
        ({"metric": "accurcy"}, r"unknown metric 'accurcy'\. Did you mean 'accuracy'\? Known: .*, pass@N, "),
        ({"metric": "pass@3"}, r"unknown metric 'pass@3'"),
        ({"metric": "pass@1"}, r"unknown metric 'pass@1'"),
        ({"seeds": [0]}, r"seeds must be a list of two or more different numbers, got \[0\]"),
        ({"seeds": [0, 0]}, r"two or more different numbers, got \[0, 0\]"),
        ({"seeds": 5}, r"seeds must be a list, got 5"),
        ({"metrik": "x"}, r"unknown field 'metrik'\. Did you mean 'metric'"),
    ],
)
def test_a_wrong_hypothesis_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "which.yaml").write_text(yaml.safe_dump(asked(**changes)))
    with pytest.raises(InputError, match=message) as refused:
        read_question(tmp_path, "which")
    assert str(refused.value).startswith(f"{tmp_path / 'which.yaml'}: preregistered: ")


def test_a_hypothesis_needs_all_its_fields(tmp_path: Path) -> None:
    given = asked()
    del given["preregistered"]["source"]
    (tmp_path / "which.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(InputError, match=r"which\.yaml: preregistered: .*missing.*'source'"):
        read_question(tmp_path, "which")
    (tmp_path / "which.yaml").write_text(yaml.safe_dump(given | {"preregistered": ["a"]}))
    with pytest.raises(InputError, match=r"preregistered must be a mapping, got \['a'\]"):
        read_question(tmp_path, "which")


def test_a_question_has_the_seeds_of_its_hypothesis() -> None:
    assert Question("q", **asked()).seeds == [0, 1, 2]
    assert Question("q", "?", {"a": {}, "b": {}}, "a").seeds == SEEDS


def test_pass_at_k_needs_its_samples_before_any_run() -> None:
    question = Question("q", **asked(metric="pass@8"))
    cells = {name: RunSpec("grpo", "none.yaml", {"validation_samples": n}) for name, n in (("long", 8), ("short", 4))}
    with pytest.raises(InputError, match=r"'q', cell 'short': .*pass@8 needs validation_samples of at least 8, got 4"):
        check([(question, cells)])


def test_the_verdict_follows_the_interval_and_the_direction() -> None:
    short = {seed: run(10.0) for seed in range(3)}
    longer = {0: run(10.9), 1: run(11.0), 2: run(11.1)}
    # differences 0.9, 1.0, 1.1: mean 1, deviation 0.1, t 4.303: 1 +- 4.303 * 0.1 / sqrt(3)
    found = verdict(longer, short)
    assert found.differences == pytest.approx({0: 0.9, 1: 1.0, 2: 1.1})
    assert found.interval == pytest.approx((1 - 0.2484, 1 + 0.2484), abs=1e-3)
    assert found.verdict == HOLDS
    assert verdict(longer, short, direction="lower").verdict == OPPOSITE
    assert verdict({0: run(9.0), 1: run(10.0), 2: run(12.0)}, short).verdict == NOT_SEEN
    line = sentence(Hypothesis(**GIVEN), found)
    assert line == (
        "Preregistered: It grows. Expected of tokens per incorrect response: higher in long than in short. "
        "Found: +1.000 (+0.752 to +1.248; seeds 0, 1, 2): **holds**."
    )


def test_a_missing_or_failed_seed_leaves_no_verdict() -> None:
    short = {seed: run(10.0) for seed in range(5)}
    two = {0: run(10.9), 1: run(11.1)}
    assert verdict(two, short).verdict == INCOMPLETE
    assert verdict(two | {2: {"failed": "no memory"}}, short).verdict == INCOMPLETE
    found = verdict(two | {2: run(11.0), 3: run(99.0), 4: run(99.0)}, short)  # only the preregistered ones count
    assert (list(found.differences), found.verdict) == ([0, 1, 2], HOLDS)
    assert verdict({}, short) == Effect({}, None, INCOMPLETE)


def test_equal_differences_of_a_fraction_are_no_proof() -> None:
    same = {seed: run(10.0, accuracy=0.7) for seed in range(3)}
    found = verdict(same, same, metric="accuracy")
    assert found.interval == pytest.approx((-4.303 * 0.01 / 3**0.5, 4.303 * 0.01 / 3**0.5), abs=1e-4)
    assert found.verdict == NOT_SEEN


def test_metrics_are_of_the_last_validation_or_of_the_first() -> None:
    validations = run(10.0, **{"pass@4": 0.8})["validations"]
    assert value_of("accuracy", validations) == 0.7
    assert value_of("accuracy_over_the_run", validations) == pytest.approx(0.6)
    assert value_of("accuracy_over_the_run", validations, first=True) == 0.1
    assert value_of("by_level.5", validations) == 0.25
    assert value_of("by_level.6", validations) is None
    assert value_of("truncated", validations) is None
    of_pass = {seed: run(10.0, **{"pass@4": 0.8 - seed / 1000}) for seed in range(3)}
    found = verdict(of_pass, {}, metric="pass@4", against=BEFORE, direction="lower")
    assert found.differences == pytest.approx({0: -0.1, 1: -0.101, 2: -0.102})
    assert found.verdict == HOLDS


@pytest.mark.moderate
def test_the_report_begins_with_the_verdict_and_keeps_it_as_data(tmp_path: Path) -> None:
    more = {"wall_clock_s": 60.0, "final_validation_problems": 100, "commit": "abc", "versions": {},
            "hardware": {"gpus": [], "cpu": "a CPU", "cpu_threads": 1}}  # fmt: skip
    runs = {"long": {0: run(10.9), 1: run(11.0), 2: run(11.1)}, "short": {seed: run(10.0) for seed in range(3)}}
    for cell in runs.values():
        for of in cell.values():
            of |= more | {"validation_accuracy_after": 0.7}
            of["validations"] = [{**entry, "step": i, "wall_clock_s": i} for i, entry in enumerate(of["validations"])]
    page = write_report(tmp_path / "q", Question("q", **asked()), runs, {}, {}, ("long", {}))
    assert page.read_text().startswith(
        "# Which?\n\nPreregistered: It grows. Expected of tokens per incorrect response: "
    )
    effect = read_json(tmp_path / "q" / PARTS)["effect"]
    assert effect["verdict"] == HOLDS
    assert effect["shown"] == "+1.000 (+0.752 to +1.248; seeds 0, 1, 2)"
    assert effect["minutes"] == 6


# The effects that are known, and their page.


def test_twelve_known_effects_are_preregistered() -> None:
    names = question_names(EFFECTS)
    questions = [read_question(EFFECTS, name) for name in names]
    repeated = [name for name in names if any(name.startswith(f"{first}_") for first in names)]
    assert len(names) - len(repeated) == 12
    assert all(question.hypothesis is not None and question.hypothesis.source for question in questions)
    assert all(len(question.seeds) >= 5 for question in questions)
    assert read_lab(EFFECTS).config


def test_the_table_lists_every_hypothesis_run_or_not(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(asked(direction="lower")))
    (tmp_path / "plain.yaml").write_text(
        yaml.safe_dump({key: value for key, value in asked().items() if key[0] != "p"})
    )
    known = {"second": {"shown": "-1.000 (-2 to 0)", "verdict": "holds", "minutes": 12.5, "interval": [-1.5, -0.5]}}
    hypotheses = hypotheses_of(tmp_path)
    rows = effects_table(hypotheses, known)
    expected = "tokens per incorrect response: lower in long than in short"
    assert rows[2:] == [
        f"| first | It grows. | 20 against 10 (arXiv:1) | {expected} | – | not run yet | – |",
        f"| second | It grows. | 20 against 10 (arXiv:1) | {expected} | -1.000 (-2 to 0) | holds | 12.5 |",
    ]
    write_effects_plot(tmp_path / "effects.png", hypotheses, known)
    with Image.open(tmp_path / "effects.png") as image:
        assert image.width > 500


def test_the_page_of_effects_says_what_the_lab_preregistered() -> None:
    page = EFFECTS.parents[2] / "docs" / "results" / "effects.md"
    table = effects_table(hypotheses_of(EFFECTS), read_json(page.with_suffix(".json")))
    assert "\n".join(table) in page.read_text(encoding="utf-8"), "run scripts/lab_page.py"
