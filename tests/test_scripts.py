"""The scripts that measure run, small, and say what they are for."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import touched_names
from scripts.benchmarks import compare_leaderboard as compare
from scripts.benchmarks import cpu_ceilings, length_trap, presets
from scripts.results_page import rollouts_over_time
from trl_ext import PRESETS
from trl_ext.step import Rows

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*.py") if "parse_args(" in path.read_text())
THIN = ["bench_grader", "bench_step"]  # of a benchmark, at the path that it is known by


def script(name: str, *arguments: str, timeout: int = 280) -> str:
    """What a script prints; a benchmark is started as a module."""
    path = ROOT / "scripts" / f"{name}.py"
    program = [str(path)] if path.exists() else ["-m", f"scripts.benchmarks.{name}"]
    done = subprocess.run(
        [sys.executable, *program, *arguments], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", [*(path.stem for path in SCRIPTS), *THIN])
def test_a_script_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported torch already: there are two dozen of them."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    path = ROOT / "scripts" / f"{name}.py"
    monkeypatch.syspath_prepend(path.parent)
    run = (
        partial(runpy.run_path, str(path)) if path.exists() else partial(runpy.run_module, f"scripts.benchmarks.{name}")
    )
    with pytest.raises(SystemExit) as ended:
        run(run_name="__main__")
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_installed_libraries_have_every_name_touched() -> None:
    site = Path(torch.__file__).parents[1]
    assert touched_names.missing(site) == []


@pytest.mark.moderate
def test_names_that_a_library_lacks_are_listed(tmp_path: Path) -> None:
    base = tmp_path / "vllm/distributed/weight_transfer/base.py"
    base.parent.mkdir(parents=True)
    methods = "init_transfer_engine receive_weights shutdown trainer_send_weights start_weight_update new_in_another"
    abstract = [f"    @abstractmethod\n    def {name}(self, update_info): ..." for name in methods.split()]
    base.write_text("class WeightTransferEngine:\n" + "\n".join(abstract))
    found = touched_names.missing(tmp_path)
    assert [line for line in found if "abstract" in line] == [  # that of vLLM up to 0.27 is defined
        "vllm.distributed.weight_transfer.base.WeightTransferEngine.new_in_another "
        "(abstract, and HttpWeightTransfer does not define it)"
    ]
    for name in ("finish_weight_update", "init_transfer_engine['init_info']", "model_config"):
        assert f"vllm.distributed.weight_transfer.base.WeightTransferEngine.{name}" in found
    assert "vllm.SamplingParams" in found
    assert not any(line.startswith(("trl", "transformers")) for line in found)  # not in that folder


@pytest.mark.nightly
@pytest.mark.slow
def test_length_normalization_page_has_the_handout_numbers() -> None:
    said = script("length_normalization")
    for row in (
        "| `masked_mean` | 2.0000 | 2.0000 |",
        "| `masked_normalize`, constant 7 | 1.1429 | 2.0000 |",
        f"| `masked_mean`, 4 tokens |{' 0.2500 |' * 4}{' 0.0000 |' * 3}",
        f"| `masked_mean`, 7 tokens |{' 0.1429 |' * 7}",
        f"| `masked_normalize`, 4 tokens |{' 0.1429 |' * 4}{' 0.0000 |' * 3}",
        f"| `masked_normalize`, 7 tokens |{' 0.1429 |' * 7}",
    ):
        assert row in said
    assert (ROOT / "docs" / "results" / "length_normalization.md").read_text() == said


def test_rollouts_are_shown_from_the_first_step_to_the_last() -> None:
    rows = [
        {"step": s, "prompt": f"Say it.\nUser: {n}?\nA:", "response": f"r{s}{n}", "ground_truth": "4", "reward": n}
        for s in (1, 20, 40, 60) for n in (0, 1)
    ]  # fmt: skip
    shown = rollouts_over_time(rows, 3)
    assert re.findall("Step ([0-9]+): reward ([0-9])", shown) == [("1", "0"), ("40", "0"), ("60", "0")]
    assert "```text\n0?\n```\n\n```text\nr400\n```" in shown
    assert rollouts_over_time(rows[:2], 1).count("Step ") == 1
    assert rollouts_over_time([], 3) == ""


def test_no_script_changes_where_python_looks() -> None:
    for path in (ROOT / "scripts").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "sys.path" not in text, path
        assert not re.search(r"^(from|import) tests\b", text, re.MULTILINE), path


def test_comparison_needs_runs_of_one_length() -> None:
    def run(accuracy: float, problems: int = 5000, seconds: float = 299.0) -> dict[str, Any]:
        return {
            "validation_accuracy_after": accuracy, "final_validation_problems": problems, "wall_clock_s": seconds,
        }  # fmt: skip

    first, second = [run(0.5), run(0.6)], [run(0.4), run(0.5)]
    assert compare.refusal({"leaderboard": first, "default": second}, 300) is None
    assert compare.refusal({"default": [run(0.4), run(0.4, seconds=301.0)]}, 300) == "longer than 300 s: default"
    other = {"leaderboard": first, "default": [run(0.4, problems=512)]}
    assert compare.refusal(other, 300) == "numbers of problems: {'leaderboard': [5000], 'default': [512]}"
    assert "| +0.100 (" in compare.table({"leaderboard": first, "default": second}, [0, 1])
    assert "| 0.4500 ± 0.0707 |  | 299 to 299 |" in compare.table({"default": second}, [0, 1])


@pytest.mark.nightly
@pytest.mark.slow
def test_the_fuzzer_finds_no_answer_that_takes_the_grader_down() -> None:
    said = script("fuzz_grader", "--answers", "300")
    assert "300" in said


@pytest.mark.nightly
@pytest.mark.vllm
def test_a_sync_is_timed_and_trls_way_is_reported_as_it_is(tmp_path: Path) -> None:
    script("sync", "--shape", "tiny", "--repeats", "2", "--json", str(tmp_path / "sync.json"))
    ways = json.loads((tmp_path / "sync.json").read_text())["ways"]
    assert ways["reload"].get("seconds", 0) > 0, ways
    assert ways["through disk"].get("seconds", 0) > 0, ways
    assert "weight_loader" in ways["per parameter"].get("failed", "weight_loader"), ways


def test_decoding_is_bound_by_reading_and_by_products() -> None:
    shapes = Counter({(4, 3): 2, (5, 3): 1})  # 39 numbers
    found = cpu_ceilings.tokens_at_most(shapes, rows=8, itemsize=2, bandwidth=780, products=0.5)
    # 78 bytes are read 10 times a second, for 8 tokens each time; 2 * 39 * 8 operations take half a second.
    assert found == {"tokens_per_s_by_bandwidth": 80, "tokens_per_s_by_products": 16, "flops_per_s": 1248}


@pytest.mark.nightly
@pytest.mark.slow
def test_trl_and_ours_are_timed_on_the_same_completions(tmp_path: Path) -> None:
    flags = [
        "--preset",
        "dr_grpo",
        "--rollout_batch_size",
        "16",
        "--train_batch_size",
        "16",
        "--group_size",
        "4",
        "--stop",
        "none",
    ]
    sides = ["TRL", "ours by HF generate"]
    said = script("stock_step", "--sides", *sides, "--json", str(tmp_path / "found.json"), "--", *flags)
    (stock,), (ours,) = json.loads((tmp_path / "found.json").read_text())["found"].values()
    assert stock["tokens"] == ours["tokens"] > 16
    assert stock["reward"] == ours["reward"]
    assert min(side["cpu_s"][part] for side in (stock, ours) for part in ("sampling", "step")) > 0
    assert stock["cpu_s"]["sync"] == 0  # without an engine
    assert "CPU seconds" in said


def test_every_preset_and_member_is_named_in_a_run() -> None:
    found = {(axis, name) for flags in presets.cases() for axis, name in flags.items()}
    of_presets = {(axis, getattr(preset, axis, None)) for preset in PRESETS.values() for axis in presets.AXES}
    assert {("preset", name) for name, preset in PRESETS.items() if not preset.needs_teacher} <= found
    assert {(axis, name) for axis, registry in presets.AXES.items() for name in registry} <= found | of_presets


def test_the_length_trap_counts_the_weights_of_correct_rows() -> None:
    weight = torch.tensor([[1.0, 0.5, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, 9.0]])
    trainer = object.__new__(length_trap.Trainer)
    trainer.correct = []
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]])
    rows = Rows(*[torch.ones(3, 1).long()] * 2, mask, mask, mask.bool(), torch.tensor([[0.5], [-0.5], [0.5]]))
    trainer.count(lambda *_: weight, rows, torch.zeros(3, 3))
    assert trainer.correct == [(2, 0.75, True), (2, 0.0, False)]  # of their own tokens, without the incorrect row


def test_the_length_trap_counts_what_is_left_by_length() -> None:
    found = length_trap.by_length([(9, 1.0, True), (9, 0.5, True), (9, 0.0, False), (17, 2.0, True), (12, 1.0, True)])
    # Effective: (1 + 0.5)^2 / (1 + 0.25) of 3 completions. A completion of 11 words belongs to no length.
    assert found[8] == pytest.approx({"correct": 3, "kept": 2 / 3, "mean_weight": 0.5, "effective": 1.8 / 3})
    assert found[16] == {"correct": 1, "kept": 1, "mean_weight": 2, "effective": 1}
    assert len(found) == 2


@pytest.mark.nightly
@pytest.mark.vllm
def test_the_length_trap_trains_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "trap.json"
    brief = ["--base_steps", "20", "--steps", "2", "--seeds", "1", "--jobs", "1"]
    said = script("length_trap", *brief, "--only", "TRL", "--json", str(out), "--plot", str(tmp_path / "trap.png"))
    (run,) = json.loads(out.read_text())["runs"]
    assert "| sequence ratio, rejected over 3 (TRL's default) |" in said
    assert len(run["rewards"]) == 2
    assert list(run["accuracy"]) == ["8", "16", "32", "64"]
    assert (tmp_path / "trap.png").stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.distributed
def test_the_gpu_check_runs_on_two_cpu_ranks(tmp_path: Path) -> None:
    config = ROOT / "accelerate_configs" / "two_cpu_ranks_zero2.yaml"
    said = script("gpu", "--steps", "2", "--accelerate", str(config), "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert "no GPU here" in said
    assert found["optimizer_steps"] == 2
    assert found["engine"] == "vLLM"
    assert min(found[name] for name in ("rollout_tokens_per_s", "training_tokens_per_s", "sync_s", "step_s")) > 0


def test_folders_that_workflows_name_are_there() -> None:
    named = {
        path
        for workflow in (ROOT / ".github" / "workflows").glob("*.yml")
        for path in re.findall(r"\b(?:tests|scripts|trl_ext|recipes)/[\w/.]+", workflow.read_text(encoding="utf-8"))
    }
    assert named
    assert [path for path in sorted(named) if not list(ROOT.glob(f"{path}*"))] == []
