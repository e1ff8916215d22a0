"""A recipe with a teacher, from its settings to what the run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import grpo_math
from tests.recipes.test_grpo import DEFAULT, ON_A_CPU, SMALL, TINY_RUN, write_splits
from tests.support.tiny import save_tiny, tiny_tokenizer
from trl_ext.errors import InputError
from trl_ext.generation.completion import Completion, Sampling
from trl_ext.grpo.teacher_validation import TeacherValidation
from trl_ext.io import read_json, read_jsonl
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.rewards.graders import GRADERS


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_base_policy(cache_dir=tmp_path_factory.mktemp("policy"), config=SMALL, progress=False))


def run(folder: Path, policy: str, **settings: Any) -> Any:
    given = {**TINY_RUN, "preset": "opd", "model_name_or_path": policy, "output_dir": folder, **settings}
    flags = [
        word
        for name, value in given.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
    return grpo_math.main(*parse(GRPO_SETTINGS, None, DEFAULT, [*ON_A_CPU, *flags]))


@pytest.mark.slow
def test_card_log_and_record_say_who_taught(policy: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, policy, teacher=policy, save_strategy="steps", save_steps=2)
    assert "Taught by" in (folder / "README.md").read_text()
    assert str(tmp_path) not in (folder / "README.md").read_text()
    assert "teachers_are" in read_json(folder / "resolved.json") or "teacher" in (folder / "config.yaml").read_text()
    steps = [row for row in read_jsonl(folder / "metrics.jsonl") if "distillation/reverse_kl" in row]
    assert [abs(row["distillation/reverse_kl"]) < 1e-6 for row in steps[:1]] == [True]  # it is the policy itself
    logged = [row for row in read_jsonl(folder / "generations.jsonl") if row.get("per_token")]
    tokens = logged[0]["per_token"]
    assert tokens["teacher_logp"] == pytest.approx(tokens["logp"], abs=2e-4)
    other = save_tiny(tmp_path / "other")
    with pytest.raises(InputError, match="has another tokenizer than the policy"):
        run(tmp_path / "second", policy, teacher=other)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in Path(policy).iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    settings = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    with pytest.raises(InputError, match="teacher"):
        run(folder, policy, teacher=changed, save_strategy="steps", save_steps=2, resume="auto", max_steps=6)


@pytest.mark.slow
def test_a_column_names_the_teacher_of_each_problem(policy: str, tmp_path: Path) -> None:
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1), "subject": "ab"[i % 2]} for i in range(32)]
    write_splits(tmp_path, rows, rows[:16])
    own = {"dataset": str(tmp_path / "{split}.jsonl"), "teacher_column": "subject"}
    run(tmp_path / "run", policy, teacher=f"a={policy},b={policy}", **own)
    (first, *_) = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "distillation/reverse_kl" in row]
    assert {"distillation/reverse_kl_a", "distillation/reverse_kl_b"} <= first.keys()
    with pytest.raises(InputError, match="teacher_column 'subject': problems have b; teachers: a, c"):
        run(tmp_path / "two", policy, teacher=f"a={policy},c={policy}", **own)
    with pytest.raises(InputError, match=r"teacher_column .kind.: the problems have .*subject"):
        run(tmp_path / "three", policy, teacher=f"a={policy},b={policy}", **own | {"teacher_column": "kind"})


def test_a_teacher_that_is_not_there_is_refused_before_the_data(policy: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        run(tmp_path / "run", policy, teacher=tmp_path / "nowhere", dataset="no_such_dataset_either")


@pytest.mark.slow
def test_a_ceiling_is_the_evaluation_of_the_teacher(policy: str, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "run"
    summary = run(folder, policy, teacher=f"own={policy}", validate_teachers=True, validation_temperature=0)
    found = read_json(folder / "teachers.json")["found"]["own"]
    assert summary["teachers"] == {"own": found}
    first = summary["validations"][0]  # of the policy, which the teacher is
    assert [found[name] for name in ("accuracy", "outcomes", "mean_tokens", "problems")] == [
        first[name] for name in ("accuracy", "outcomes", "mean_tokens", "problems")
    ]
    assert f"teacher own: {found['accuracy']:.3f}" in capsys.readouterr().out
    assert (
        f"Teacher `own` solves {found['accuracy']:.3f} of the validation problems" in (folder / "README.md").read_text()
    )


def test_each_problem_gets_its_teacher_s_answer() -> None:
    problems = [{"prompt": f"{i} + 0 =", "answer": str(i)} for i in range(7)]

    def sample(prompts: list[str], numbers: list[int]) -> list[Completion]:
        assert [prompt.split()[0] for prompt in prompts] == list(map(str, numbers))
        return [Completion(f" so </think> <answer> {number} </answer>", 5, finished=True) for number in numbers]

    grader = GRADERS.build("compatible", answer_format="r1_zero")
    how = TeacherValidation(problems, grader, Sampling(), tiny_tokenizer(), batch_size=4)
    found = how._measured("t", sample)
    assert (found["accuracy"], found["problems"], found["accuracy_interval"][1]) == (1.0, 7, 1.0)
