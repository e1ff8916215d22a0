"""The evaluation recipes: every sample in a file, the same after an interruption, and figures that a recount confirms."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.grpo.test_distributed import by_accelerate, environment_of_ranks
from tests.recipes.test_grpo import ROOT, SMALL
from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import Report
from trl_ext.evaluation.vllm import evaluate_vllm
from trl_ext.functional import log_generations
from trl_ext.generation.completion import Sampling
from trl_ext.generation.engine_choice import dtype_to_sample_in
from trl_ext.generation.samplers import HFSampler, VLLMSampler, vllm_params
from trl_ext.io import read_jsonl
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.best_of_n import BestOfN, curves, run_best_of_n
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.rewards import r1_zero_reward_fn


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy that has read enough to close its answers."""
    config = dataclasses.replace(SMALL, steps=60, batch=16, hidden=64, heads=2)
    return str(make_base_policy(0, tmp_path_factory.mktemp("cache"), config, progress=False))


def settings(policy: str, folder: Path, kind: Any = Evaluation, **more: Any) -> Any:
    fixed = {"problems": 12, "max_tokens": 40, "batch_size": 5, "use_vllm": "false"}
    return kind(model_name_or_path=policy, output_dir=str(folder), **{**fixed, **more})


def samples(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "samples.jsonl")


@pytest.mark.moderate
def test_the_samples_the_summary_and_the_table_say_the_same(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_evaluation(settings(policy, tmp_path / "run", samples=2, show=3, max_tokens=18))
    printed, rows = capsys.readouterr().out, samples(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(row["problem_id"], row["sample"]) for row in rows] == [(p, s) for p in range(12) for s in range(2)]
    assert len({row["response"] for row in rows}) > 12
    assert load_dataset("json", data_files=str(tmp_path / "run" / "samples.jsonl"), split="train").to_list() == rows
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert all(row["response"].endswith("</answer>") for row in rows if row["outcome"] == "correct")
    recount = [r1_zero_reward_fn(row["response"], row["answer"]) for row in rows]
    for name in ("format_reward", "answer_reward", "reward"):
        assert [row[name] for row in rows] == [verdict[name] for verdict in recount]
    right = sum(verdict["reward"] for verdict in recount)
    formatted = sum(verdict["format_reward"] for verdict in recount)
    assert summary["accuracy"] == right / 24
    assert summary["counts"] == {"correct": right, "format_only": formatted - right, "neither": 24 - formatted}
    assert formatted > 0, "a policy that never keeps the format shows little"
    assert summary["accuracy_low"] <= summary["accuracy"] <= summary["accuracy_high"]
    assert (summary["problems"], summary["samples"]) == (12, 24)
    assert {"command", "commit", "hardware", "engine", "model"} <= set(summary)
    for words in (
        f"accuracy {right / 24:.3f}",
        "95 % interval",
        "12 problems, 24 samples",
        "level 1",
        "--- problem 1, sample 0",
    ):
        assert words in printed, words
    assert re.search(rf"1 +1 +{right:.0f} ", printed)


def test_the_number_of_a_sample_decides_its_draw(policy: str) -> None:
    sampler = HFSampler(policy, Sampling(max_tokens=20), 1)
    first, second, third = (one.text for one in sampler(["1 + 1 ="] * 3, [0, 1, 2]))
    assert len({first, second, third}) == 3
    assert [one.text for one in sampler(["1 + 1 ="] * 2, [2, 1])] == [third, second]


@pytest.mark.slow
def test_log_probabilities_are_the_models_own(policy: str, tmp_path: Path) -> None:
    run_evaluation(settings(policy, tmp_path, temperature=0.7, top_p=0.9))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    for row in samples(tmp_path):
        prompt, response = (tokenizer(row[name])["input_ids"] for name in ("prompt", "response"))
        if len(response) != row["tokens"]:
            continue  # another split into tokens, or an EOS that the text does not show
        with torch.no_grad():
            logps = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        assert row["logp"] == pytest.approx(logps[range(len(response)), response].sum().item(), abs=1e-3)


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes_with_the_same_result(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_evaluation(settings(policy, tmp_path / "whole"))
    run_evaluation(settings(policy, tmp_path / "torn"))
    lines = (tmp_path / "torn" / "samples.jsonl").read_text().splitlines(keepends=True)
    torn_line = lines[5][:100]  # as after the first batch, and a power cut in the second
    (tmp_path / "torn" / "samples.rank0.jsonl").write_text("".join(lines[:5]) + torn_line)
    for name in ("samples.jsonl", "summary.json"):
        (tmp_path / "torn" / name).unlink()
    batch, sizes = HFSampler._batch, []
    monkeypatch.setattr(
        HFSampler, "_batch", lambda self, prompts, rows: sizes.append(len(prompts)) or batch(self, prompts, rows)
    )
    run_evaluation(settings(policy, tmp_path / "torn"))
    assert sum(sizes) == 7  # of twelve
    assert samples(tmp_path / "torn") == samples(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "torn").iterdir()) == [
        "samples.jsonl",
        "settings.yaml",
        "summary.json",
    ]


@pytest.mark.moderate
def test_finished_evaluation_is_shown_again_without_a_model(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_evaluation(settings(policy, tmp_path))
    before = (tmp_path / "summary.json").read_bytes()
    capsys.readouterr()
    (tmp_path / "no_model").mkdir()
    run_evaluation(settings(policy, tmp_path, show=2, category="format0"))
    assert capsys.readouterr().out.count(": neither (") == 2
    assert (tmp_path / "summary.json").read_bytes() == before
    with pytest.raises(
        InputError, match=r"holds an evaluation of other settings \(temperature: 1\.0 there, 0\.5 now\)"
    ):
        run_evaluation(settings(policy, tmp_path, temperature=0.5))


@pytest.mark.moderate
def test_a_setting_of_how_it_is_sampled_reaches_the_sampler(policy: str, tmp_path: Path) -> None:
    def texts(**more: Any) -> list[str]:
        sampler = settings(policy, tmp_path, **more).sampler(policy)
        return [completion.text for completion in sampler(["1 + 1 ="] * 6, range(6))]

    usual = texts()
    assert usual == texts()
    for name, value in {"temperature": 0.1, "top_p": 0.2, "max_tokens": 4, "min_tokens": 39, "stop": ["1"]}.items():
        assert texts(**{name: value}) != usual, name
    assert settings(policy, tmp_path, dtype="bfloat16").sampler(policy).model.dtype is torch.bfloat16
    assert settings(policy, tmp_path).sampler(policy).model.dtype is torch.float32


@pytest.mark.vllm
def test_settings_of_the_engine_reach_it(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("vllm.LLM", lambda **given: started.append(given))
    changed = {
        "dtype": "bfloat16",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 99,
        "vllm_enforce_eager": True,
    }
    for more in ({}, changed):
        settings(policy, tmp_path, use_vllm="true", **more).sampler(policy)
    usual, found = (
        {k: given.get(k) for k in ("dtype", "gpu_memory_utilization", "max_model_len", "enforce_eager")}
        for given in started
    )
    assert usual == {
        "dtype": dtype_to_sample_in("auto"),
        "gpu_memory_utilization": 0.9,
        "max_model_len": None,
        "enforce_eager": None if torch.cuda.is_available() else True,
    }
    assert list(found.values()) == list(changed.values())


def test_best_of_n_takes_the_most_likely_per_token() -> None:
    drawn = [
        (0, 0, "correct", -2.0, 4),
        (0, 1, "neither", -1.5, 1),
        (1, 0, "neither", -8.0, 4),
        (1, 1, "correct", -9.0, 9),
    ]
    names = ("problem_id", "sample", "outcome", "logp", "tokens")
    found = curves(Report([dict(zip(names, row, strict=True)) | {"extracted": "1"} for row in drawn]), [1, 2])
    assert [found["best"][n]["mean"] for n in ("1", "2")] == [0.5, 1.0]
    assert (found["problems_with_right_and_wrong"], found["likelihood_prefers_wrong"]) == (2, 0.0)


@pytest.mark.slow
def test_best_of_n_uses_one_set_of_samples_and_draws_its_curves(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_best_of_n(settings(policy, tmp_path, BestOfN, samples=4, at=[1, 2, 4]))
    rows = samples(tmp_path)
    assert len(rows) == 48
    first = sum(row["reward"] for row in rows if row["sample"] == 0) / 12
    assert [found[name]["1"]["mean"] for name in ("first", "best", "majority")] == [pytest.approx(first)] * 3
    assert found["pass"]["1"]["mean"] == pytest.approx(sum(row["reward"] for row in rows) / 48)
    means = [found["pass"][n]["mean"] for n in ("1", "2", "4")]
    assert means == sorted(means)
    assert found["pass"]["4"] == found["first"]["4"]
    assert "Best@4 is" in capsys.readouterr().out
    with Image.open(tmp_path / "best_of_n.png") as plot:
        assert plot.width > 500
    assert json.loads((tmp_path / "best_of_n.json").read_text())["pass"] == found["pass"]


def responses_file(folder: Path, *more: dict[str, Any]) -> Path:
    texts = {"1 + 1?": ["</think> <answer> 2 </answer>", "</think> <answer> 3 </answer>"], "2 + 2?": ["four"]}
    lines = [{"q": q, "out": out, "gold": str(n * 2)} for n, q in enumerate(texts, 1) for out in texts[q]]
    path = folder / "theirs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*lines, *more)))
    return path


def grade(path: Path, folder: Path, *fields: str, **more: Any) -> Report:
    names = ["prompt=q", "response=out", "truth=gold", *fields]
    return run_evaluation(Evaluation(responses=str(path), response_fields=names, output_dir=str(folder), **more))


def test_responses_of_someone_else_are_graded_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Evaluation, "sampler")
    monkeypatch.setattr("trl_ext.data.dataset.make_base_policy", None)
    grade(responses_file(tmp_path), tmp_path / "run", show=1)
    printed, rows = capsys.readouterr().out, samples(tmp_path / "run")
    assert [(row["problem_id"], row["sample"], row["outcome"]) for row in rows] == [
        (0, 0, "correct"), (0, 1, "format_only"), (1, 0, "neither"),
    ]  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["problems"], summary["samples"], summary["accuracy"]) == (2, 3, pytest.approx(1 / 3))
    assert (summary["mean_tokens"], summary["truncated"], summary["engine"]) == (None, None, "drawn by someone else")
    assert "2 problems, 3 samples\n" in printed
    assert "the first problem and answer: '1 + 1?' -> '2'" in printed
    before = (tmp_path / "run" / "summary.json").read_bytes()
    grade(responses_file(tmp_path), tmp_path / "run")  # shown again
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    with pytest.raises(InputError, match=r"of other settings .*responses_are"):
        grade(responses_file(tmp_path, {"q": "3?", "out": "", "gold": "3"}), tmp_path / "run")


def test_a_stop_string_that_was_taken_away_is_put_back(tmp_path: Path) -> None:
    texts = {"</think> <answer> 1 ": None, "</think> <answer> 1 </answer>": None, "</think> <answer> 1": "length"}
    lines = [{"q": "1?", "out": out, "gold": "1", "finish_reason": end} for out, end in texts.items()]
    path = tmp_path / "theirs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = grade(path, tmp_path / "run", response_stop="</answer>")
    assert [row["outcome"] for row in report.rows] == ["correct", "correct", "neither"]
    assert report.rows[1]["response"] == "</think> <answer> 1 </answer>"


def test_a_bad_line_is_refused_before_anything_is_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_ext.recipes.evaluate.grade_rows", None)
    with pytest.raises(InputError, match=r"theirs\.jsonl', line 4: no field 'gold' \(the truth\); there is: q, out"):
        grade(responses_file(tmp_path, {"q": "3?", "out": "3"}), tmp_path / "run")
    solutions = [{"q": f"{n}?", "out": "", "gold": f"So it is\n#### {n}"} for n in range(9)]
    with pytest.raises(
        InputError, match=r"responses: 9 of 12 reference answers .*answer_source after_hashes 9 of them"
    ):
        grade(responses_file(tmp_path, *solutions), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.moderate
def test_a_graders_file_and_their_verdicts_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "def ends(response, reference):\n"
        "    return {'format_reward': 1.0, 'answer_reward': float(response.endswith(reference))}\n"
    )
    lines = [{"q": "1?", "out": out, "gold": "1", "ok": ok} for out, ok in (("is 1", 1), ("1 it is", True), ("2", 0.0))]
    path = tmp_path / "theirs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = grade(path, tmp_path / "run", "verdict=ok", grader=f"{tmp_path / 'mine.py'}:ends")
    assert [row["outcome"] for row in report.rows] == ["correct", "format_only", "format_only"]
    assert [row["verdict"] for row in report.rows] == [True, True, False]
    assert "the two graders agree on 2 of 3 responses" in capsys.readouterr().out


def test_an_evaluation_is_exported_without_a_model(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Evaluation, "sampler")
    given = {"dataset": str(rows_file(tmp_path)), "export": str(tmp_path / "tasks"), "grader": "strict"}
    run_evaluation(settings(policy, tmp_path / "run", **given, samples=3))
    assert f"pretrained={policy}" in capsys.readouterr().out
    task = json.loads((tmp_path / "tasks" / "task.json").read_text())
    assert (task["name"], task["grader"], task["samples"]) == ("twelve", "strict", 3)
    assert task["options"] == {"answer_format": "r1_zero"}
    assert task["sampling"]["max_tokens"] == 40
    rows = read_jsonl(tmp_path / "tasks" / "data" / "test.jsonl")
    assert sorted(int(row["answer"]) for row in rows) == list(range(1, 13))
    assert f"{int(rows[0]['answer']) - 1} + 1 = ?" in rows[0]["prompt"] != rows[0]["problem"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"category": "format2"}, "unknown category 'format2'. Known: correct, format_only, neither, format1_answer1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"grader": "lenient"}, "unknown grader 'lenient'"),
        ({"use_vllm": "maybe"}, "auto, true or false"),
        ({"response_fields": ["truth=x"]}, "give --responses FILE as well"),
        ({"response_fields": ["x"], "responses": "a"}, "not of the form name=field"),
        ({"responses": "a", "export": "b"}, "give one of responses and export"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        settings("nothing", tmp_path, **wrong)


def test_best_of_n_draws_its_samples_itself(tmp_path: Path) -> None:
    for given in ({"responses": "theirs.jsonl"}, {"export": "tasks"}):
        with pytest.raises(ValueError, match=r"are of evaluate\.py: best_of_n draws its samples itself"):
            settings("nothing", tmp_path, BestOfN, **given)


def test_every_n_must_be_among_the_samples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at=\[1, 8\].*samples \(4\)"):
        settings("nothing", tmp_path, BestOfN, samples=4, at=[1, 8])


@pytest.mark.parametrize("name", ["evaluate", "evaluate_math", "evaluate_gsm8k", "best_of_n", "best_of_n_gsm8k"])
def test_the_yamls_that_ship_resolve(name: str) -> None:
    (parsed,) = parse((Evaluation if "evaluate" in name else BestOfN,), "about", ROOT / "recipes" / f"{name}.yaml", [])
    assert parsed.output_dir == f"runs/{name}"
    assert parsed.grader == "compatible"
    if parsed.model_name_or_path:  # the handout's settings
        assert parsed.sampling() == Sampling(1.0, 1.0, 1024, 0, ("</answer>",), 0)


def test_a_dataset_that_cannot_be_used_is_reported_with_its_row(policy: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "", "answer": "2"}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl', line 2: 'problem'"):
        run_evaluation(settings(policy, tmp_path / "run", dataset=str(tmp_path / "rows.jsonl"), problems=None))


@pytest.mark.moderate
def test_evaluate_refuses_or_drops_prompts_beyond_the_context(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_file(tmp_path).read_text().splitlines()
    rows[4] = json.dumps({"problem": "1 + " * 500 + "1 = ?", "answer": "501"})
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    given = {"dataset": str(tmp_path / "rows.jsonl"), "samples": 2, "max_tokens": 8}
    with monkeypatch.context() as without_engine:
        without_engine.delattr(Evaluation, "sampler")
        with pytest.raises(InputError, match=r"line 5 of .*rows\.jsonl': its prompt of .*\(max_tokens\) do not fit"):
            run_evaluation(settings(policy, tmp_path / "run", **given))
    assert not (tmp_path / "run").exists()
    run_evaluation(settings(policy, tmp_path / "run", too_long="drop", **given))
    printed = capsys.readouterr().out
    assert "validation: 11 problems of 12" in printed
    assert "1 too long and left out: line 5" in printed
    assert {row["row"] for row in samples(tmp_path / "run")} == set(range(12)) - {4}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["problems"], summary["samples"]) == (11, 22)
    assert (summary["data"]["available"], summary["data"]["too_long"]) == (12, ["line 5"])
    with monkeypatch.context() as without_engine:
        without_engine.delattr(Evaluation, "sampler")
        run_evaluation(settings(policy, tmp_path / "run", too_long="drop", **given))  # shown again


def test_evaluate_refuses_unmatchable_reference_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # else it is asked for the model, again and again
    solution = {"problem": "1 + 1?", "answer": "1 + 1 = 2.\n#### 2"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(solution)}\n" * 3)
    wrong = settings("not_there", tmp_path / "run", dataset=str(tmp_path / "rows.jsonl"))
    with pytest.raises(InputError, match=r"validation: 3 of 3 reference answers .*--answer_source after_hashes 3 of"):
        run_evaluation(wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_recipes_run_from_command_line_and_compare_evaluations(policy: str, tmp_path: Path) -> None:
    def recipe(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "recipes" / f"{name}.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)

    common = ["--model_name_or_path", policy, "--problems", "12", "--max_tokens", "40", "--use_vllm", "false"]
    done = recipe("evaluate", *common, "--dataset", str(rows_file(tmp_path)), "--output_dir", "run0")
    assert done.returncode == 0, done.stderr[-2000:]
    run_evaluation(settings(policy, tmp_path / "run1", dataset=str(rows_file(tmp_path)), seed=1))
    done = recipe("compare", "run0", "run1", "--json", "compared.json")
    assert done.returncode == 0, done.stderr
    assert "on the same 12 problems" in done.stdout
    assert json.loads((tmp_path / "compared.json").read_text())["problems"] == 12
    assert "run recipes/evaluate.py" in recipe("compare", "run0", "nowhere").stderr


def rows_file(folder: Path) -> Path:
    path = folder / "twelve.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + 1 = ?", "answer": str(i + 1)}) + "\n" for i in range(12)))
    return path


ENGINE = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}


@pytest.mark.vllm
def test_vllm_sample_depends_on_its_number_and_has_its_own_logps(policy: str, tmp_path: Path) -> None:
    sampler = VLLMSampler(policy, Sampling(max_tokens=40), **ENGINE)
    prompts = ["What is $2 + 3$? <think>", "What is $4 + 4$? <think>", "What is $5 - 1$? <think>"]
    together = sampler(prompts, [7, 8, 9])
    assert [sampler([prompt], [number])[0].text for prompt, number in zip(prompts, (7, 8, 9), strict=True)] == [
        completion.text for completion in together
    ]
    assert sampler(prompts[:1], [10])[0].text != together[0].text
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    prompt, response = tokenizer(prompts[0])["input_ids"], tokenizer(together[0].text)["input_ids"]
    if len(response) == together[0].tokens:
        with torch.no_grad():
            logps = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert together[0].logp == pytest.approx(logps[range(len(response)), response].sum().item(), abs=1e-3)
    handout_writes_what_the_engine_sampled(sampler, prompts, tmp_path / "handout.jsonl")


def handout_writes_what_the_engine_sampled(sampler: VLLMSampler, prompts: list[str], path: Path) -> None:
    params = [vllm_params(sampler.sampling, seed=number) for number in (7, 8, 9)]
    truths = ["5", "8", "4"]
    report = evaluate_vllm(sampler.llm, r1_zero_reward_fn, prompts, params, truths, path)
    rows = read_jsonl(path)
    assert [row["response"] for row in rows] == [completion.text for completion in sampler(prompts, [7, 8, 9])]
    verdicts = [r1_zero_reward_fn(row["response"], truth) for row, truth in zip(rows, truths, strict=True)]
    assert [{name: row[name] for name in verdicts[0]} for row in rows] == verdicts
    assert report.rows == rows
    assert report.summary()["by_level"] == {}
    half_right = {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
    logged, _ = log_generations(prompts, None, truths, r1_zero_reward_fn, model=sampler.llm, sampling=params)
    assert [row["ground_truth"] for row in logged] == truths
    assert all(0 < row["length"] <= params[0].max_tokens for row in logged)
    judged = evaluate_vllm(sampler.llm, lambda *_: half_right, prompts, params, truths)
    assert [row["outcome"] for row in judged.rows] == ["format_only"] * 3
    with pytest.raises(ValueError, match="shorter"):
        evaluate_vllm(sampler.llm, r1_zero_reward_fn, prompts, params, ["5"])


@pytest.mark.vllm
def test_the_recipe_samples_with_vllm(policy: str, tmp_path: Path) -> None:
    wanted = {"use_vllm": "true", "dtype": "float32", "vllm_max_model_length": 128, "vllm_enforce_eager": True}
    report = run_evaluation(settings(policy, tmp_path / "run", samples=2, **wanted))
    rows = samples(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engine"] == "vLLM"
    assert [row["number"] for row in rows] == list(range(24))
    assert sum(row["format_reward"] for row in rows) > 0
    assert report.rows == rows


SECOND_RANK_READS_SLOWLY = """
import runpy, sys, time
import trl_ext.recipes.evaluate as evaluation
from accelerate import PartialState
from torch.distributed import distributed_c10d

read = evaluation.read_jsonl

def slowly(path):
    time.sleep(PartialState().process_index)
    return read(path)

evaluation.read_jsonl = slowly
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.write(f"the group's time limit: {distributed_c10d.default_pg_timeout}\\n")  # one write: two ranks, one pipe
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "engine",
    [
        ["false"],
        pytest.param(
            ["true", "--vllm_enforce_eager", "true", "--vllm_max_model_length", "128"], marks=pytest.mark.nightly
        ),
    ],
)
def test_two_ranks_share_the_samples_and_leave_one_file(policy: str, tmp_path: Path, engine: list[str]) -> None:
    (tmp_path / "slow.py").write_text(SECOND_RANK_READS_SLOWLY)
    command = [sys.executable, "-m", *by_accelerate("two_cpu_ranks_ddp"), "slow.py", str(ROOT / "recipes/evaluate.py")]
    options = ["--model_name_or_path", policy, "--problems", "11", "--max_tokens", "40", "--batch_size", "4"]
    options += ["--ddp_timeout", "321"]
    done = subprocess.run(
        [*command, *options, "--use_vllm", *engine, "--dtype", "float32", "--output_dir", "run"],
        cwd=tmp_path, env=environment_of_ranks(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert done.stdout.count("11 problems, 11 samples") == 1
    assert done.stdout.count("the group's time limit: 0:05:21") == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "samples.jsonl",
        "settings.yaml",
        "summary.json",
    ]
    rows = samples(tmp_path / "run")
    assert [row["number"] for row in rows] == list(range(11))
    assert len({row["response"] for row in rows}) > 5


@pytest.mark.moderate
def test_best_of_n_takes_its_first_samples_from_an_evaluation(policy: str, tmp_path: Path) -> None:
    common = {"model_name_or_path": policy, "problems": 4, "max_tokens": 8, "use_vllm": "false"}
    before, folder = tmp_path / "before", tmp_path / "at_n"
    zero_shot = run_evaluation(Evaluation(**common, output_dir=str(before)))
    settings = {**common, "samples": 3, "at": [1, 3], "first_from": str(before), "output_dir": str(folder)}
    found = run_best_of_n(BestOfN(**settings))
    rows = {(row["problem_id"], row["sample"]): row for row in read_jsonl(folder / "samples.jsonl")}
    assert len(rows) == 4 * 3
    assert [rows[problem, 0]["response"] for problem in range(4)] == [row["response"] for row in zero_shot.rows]
    assert found["first"]["1"]["mean"] == found["best"]["1"]["mean"] == zero_shot.accuracy
    assert not list(folder.glob("samples.rank*"))
    warmer = BestOfN(**{**settings, "temperature": 0.5, "output_dir": str(tmp_path / "other")})
    with pytest.raises(InputError, match=r"is an evaluation of other settings \(temperature: 1.0 there, 0.5 now\)"):
        run_best_of_n(warmer)
    with pytest.raises(InputError, match=r"has no summary.json: no evaluation has ended there"):
        run_best_of_n(BestOfN(**{**settings, "first_from": str(tmp_path), "output_dir": str(tmp_path / "other")}))
