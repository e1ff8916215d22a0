"""Two ranks of gloo on the CPU train to the weights of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generation.test_vllm import AGREE
from tests.support import two_ranks
from tests.support.tiny import tiny_model, tool_tokenizer
from tests.support.versions import needs_bitsandbytes
from trl_ext import AGGREGATIONS, PRESETS

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of_ranks() -> dict[str, str]:
    """For a launcher's process: one thread per rank, and nothing of a launch that this process belongs to."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), inherited.get("PYTHONPATH", "")]),
    }


def on_two_ranks(launcher: list[str], output: Path, part: str, seconds: float = 280) -> list[dict[str, Any]]:
    """What each of two ranks found in that part of `two_ranks.py`."""
    command = [sys.executable, "-m", *launcher, "--module", "tests.support.two_ranks", str(output), part]
    here = environment_of_ranks() | {"TORCH_EXTENSIONS_DIR": str(output / "compiled")}
    with subprocess.Popen(
        command, cwd=ROOT, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launched:
        try:
            _, said = launched.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            launched.terminate()  # a launcher that is killed would leave its ranks behind
            raise
    tracebacks = said.partition("Traceback")
    assert launched.returncode == 0, "".join(tracebacks[1:])[:4000]
    assert not (output / "compiled").exists()  # DeepSpeed would, for a minute, what only inference calls
    return [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def by_accelerate(config: str) -> list[str]:
    path = ROOT / "accelerate_configs" / f"{config}.yaml"
    return ["accelerate.commands.launch", "--config_file", str(path), "--main_process_port", str(free_port())]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One launch for all tests, most of whose time is imports."""
    torchrun = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return on_two_ranks(torchrun, tmp_path_factory.mktemp("two_ranks"), "all")


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same under DeepSpeed."""
    return on_two_ranks(by_accelerate(f"two_cpu_ranks_{request.param}"), tmp_path_factory.mktemp(request.param), "axes")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks.all_runs(tmp_path_factory.mktemp("one_rank"))


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


FINE_TUNED = ["sft", "sft_constant", "expert_iteration"]
SAME_ON_ONE_RANK = [
    *sorted(AGGREGATIONS),
    "kl",
    "left_out",
    "unequal",
    "saved",
    "as_trl_cuts",
    "opo",
    "discounted",
    "gdpo",
    "dynamic_sampling",
    "selected",
    "step_tokens",
    *two_ranks.TAUGHT,
    *FINE_TUNED,
]
UNDER_ZERO = [
    run if run in (*two_ranks.UNDER_ZERO, *two_ranks.TAUGHT) else pytest.param(run, marks=pytest.mark.nightly)
    for run in SAME_ON_ONE_RANK
]
RUNS = [
    *SAME_ON_ONE_RANK,
    "uninformative",
    "decay",
    "stock_trl",
    "stock_ours",
    *(
        pytest.param(f"off_policy_{preset}", marks=() if preset in two_ranks.OFF_POLICY else pytest.mark.nightly)
        for preset in sorted(PRESETS)
    ),
]


@pytest.mark.parametrize("run", RUNS)
def test_both_ranks_end_with_the_same_weights(run: str, ranks: list[dict[str, Any]]) -> None:
    assert distance(ranks[0][run]["weights"], ranks[1][run]["weights"]) == 0
    assert distance(ranks[0][run]["weights"], tiny_model().state_dict()) > 1e-4


def test_stock_settings_give_stock_weights_exactly_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    assert distance(ranks[0]["stock_trl"]["weights"], ranks[0]["stock_ours"]["weights"]) == 0


@pytest.mark.parametrize("run", SAME_ON_ONE_RANK)
def test_two_ranks_train_to_the_weights_of_one(run: str, ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    # SGD in float64, but the model's norms and TRL's head compute in float32: 1e-8 apart, and 2e-8 if every norm is half
    # of its last digit off. A rank's own count gives 1e-3.
    assert distance(ranks[0][run]["weights"], one_rank[run]["weights"]) < 1e-7


@pytest.mark.parametrize("run", UNDER_ZERO)
def test_under_zero_two_ranks_train_to_the_weights_of_one(
    run: str, sharded: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    # SGD in float32, summed in another order: 2e-7 apart. A rank's own count gives 1e-3.
    assert distance(sharded[0][run]["weights"], sharded[1][run]["weights"]) == 0
    assert distance(sharded[0][run]["weights"], one_rank[run]["weights"]) < 2e-6


def test_turns_on_two_ranks_train_to_the_weights_of_one(
    ranks: list[dict[str, Any]], sharded: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    """One rank has calls to answer while the other has none; tools' tokens and turns' rewards stay where they are."""
    wanted = one_rank["playing"]
    # float64 and float32, as in the tests above.
    for found, tolerance in ((ranks, 1e-7), (sharded, 2e-6)):
        assert distance(found[0]["playing"]["weights"], found[1]["playing"]["weights"]) == 0
        assert distance(found[0]["playing"]["weights"], wanted["weights"]) < tolerance
        for name in ("tools/call_frequency", "tools/rollouts_with_call", "tools/unanswered_frequency", "reward"):
            of_two, of_one = ([entry[name] for entry in of["playing"]["logs"]] for of in (found[0], one_rank))
            assert of_two == pytest.approx(of_one, abs=1e-6)
    calls = [entry["tools/call_frequency"] for entry in wanted["logs"]]
    assert 0 < calls[0] < calls[1]
    before = tiny_model(vocab_size=len(tool_tokenizer())).state_dict()
    assert distance(wanted["weights"], before) > 1e-4


def test_what_two_ranks_leave_out_changes_nothing(
    ranks: list[dict[str, Any]], sharded: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    plain = one_rank["as_trl_cuts"]["weights"]
    assert max(entry["step/rows_trained"] for entry in ranks[0]["saved"]["logs"]) <= 0.5
    assert distance(ranks[0]["saved"]["weights"], plain) < 1e-7  # float64
    assert distance(sharded[0]["saved"]["weights"], plain) < 2e-6  # float32


def test_several_sets_of_shared_prompts_change_nothing(
    ranks: list[dict[str, Any]], sharded: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    """Gradients are exchanged after every micro-batch under ZeRO-2, parameters in every layer under ZeRO-3."""
    plain = one_rank["sets_as_trl_cuts"]["weights"]
    for found, tolerance in ((ranks, 1e-7), (sharded, 2e-6)):  # float64, float32
        assert distance(found[0]["sets"]["weights"], found[1]["sets"]["weights"]) == 0
        assert distance(found[0]["sets"]["weights"], plain) < tolerance
        assert found[0]["sets"]["sets"] == found[1]["sets"]["sets"] == found[0]["sets"]["trained_sets"]
        assert found[1]["sets"]["trained_sets"][0] < found[0]["sets"]["trained_sets"][0]
        assert found[0]["sets"]["micro_batches"][0] > 1, "the one call of a step has several"
    assert distance(plain, tiny_model().state_dict()) > 1e-3


def test_a_gradient_that_is_not_finite_is_left_out_on_both_ranks(
    ranks: list[dict[str, Any]], sharded: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    for found in (*ranks, *sharded, one_rank):
        assert found["left_out"]["skipped"] == 1
        assert all(weight.isfinite().all() for weight in found["left_out"]["weights"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3"])
def test_compiled_layers_learn_the_same_on_two_ranks(config: str, tmp_path: Path) -> None:
    found = on_two_ranks(by_accelerate(f"two_cpu_ranks_{config}"), tmp_path, "compiled", seconds=900)
    if config == "zero3":
        assert all("which ZeRO-3 has in parts: leave torch_compile out" in rank["refused"] for rank in found)
        return
    assert min(rank["graphs"] for rank in found) > 0
    assert distance(found[0]["compiled"]["weights"], found[1]["compiled"]["weights"]) == 0
    assert distance(found[0]["compiled"]["weights"], found[0]["plain"]["weights"]) < 2e-6  # float32 under ZeRO


@pytest.mark.nightly
@needs_bitsandbytes
@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3"])
def test_adapters_on_quantized_weights_train_on_two_ranks(config: str, tmp_path: Path) -> None:
    first, second = on_two_ranks(by_accelerate(f"two_cpu_ranks_{config}"), tmp_path, "quantized")
    assert first == pytest.approx(second, rel=1e-6)
    assert min(first.values()) > 0.01


@pytest.mark.vllm
@pytest.mark.parametrize(
    "config", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("ddp", "zero2")), "zero3"]
)
def test_on_two_ranks_engine_and_policy_agree_after_a_sync(config: str, tmp_path: Path) -> None:
    for found in on_two_ranks(by_accelerate(f"two_cpu_ranks_{config}"), tmp_path, "sync"):
        for apart in found.values():
            assert apart["unsynced"] > 100 * AGREE  # the last optimizer step
            assert apart["after_training"] < AGREE
            assert apart["shaken"] > 100 * AGREE
            assert apart["synced"] < AGREE


@pytest.mark.parametrize(
    "metric",
    [
        *("loss", "grad_norm", "reward", "reward_std", "completions/clipped_ratio"),
        *("completions/mean_length_correct", "completions/mean_length_incorrect"),
        *(f"completions/{name}_terminated_length" for name in ("mean", "min", "max")),
    ],
)
def test_two_ranks_log_the_values_of_one(metric: str, ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    for run in sorted(AGGREGATIONS):
        of_two, of_one = ([entry[metric] for entry in found[run]["logs"]] for found in (ranks[0], one_rank))
        assert of_two == pytest.approx(of_one, abs=1e-6)
        assert any(of_one), "a metric that is always 0 shows nothing"


@pytest.mark.parametrize("run", two_ranks.TAUGHT)
def test_two_ranks_log_of_a_teacher_what_one_does(
    run: str, ranks: list[dict[str, Any]], sharded: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    """Nothing of the second rank's is taught: a metric without a token there has a place in the sum all the same."""

    def of_teachers(found: dict[str, Any]) -> list[dict[str, float]]:
        return [{k: v for k, v in entry.items() if k.startswith("distillation/")} for entry in found[run]["logs"]]

    expected = of_teachers(one_rank)
    assert {"distillation/reverse_kl", "distillation/agreement_correct"} <= expected[0].keys()
    for found, tolerance in ((ranks, 1e-7), (sharded, 1e-5)):  # float64, float32
        assert of_teachers(found[0]) == of_teachers(found[1])
        assert of_teachers(found[0]) == [pytest.approx(entry, abs=tolerance) for entry in expected]


def test_each_kept_row_is_trained_on_by_one_rank(ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    of_two, of_one = (
        [entry["num_tokens"] for entry in found["expert_iteration"]["logs"] if "num_tokens" in entry]
        for found in (ranks[0], one_rank)
    )
    assert of_two == of_one != []


def test_each_rank_keeps_its_last_rollout_rows_with_rewards(
    ranks: list[dict[str, Any]], one_rank: dict[str, Any]
) -> None:
    of_two = [found["kl"]["rollout"] for found in ranks]
    assert of_two[0] != of_two[1]
    assert of_two[0] + of_two[1] == one_rank["kl"]["rollout"]


def test_validation_gives_the_first_rank_all_completions(ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    texts = {"0": "x", "1": "y</answer>", "2": "z" * 12}
    expected = [texts[prompt[-1]] for prompt in [*two_ranks.SAMPLED, two_ranks.SAMPLED[0]]]
    assert [completion.text for completion in one_rank["sampled"]] == expected
    assert ranks[0]["sampled"] == one_rank["sampled"]
    assert ranks[1]["sampled"] == []
    # as many prompts on either rank: where weights are sharded, a rank that generates alone waits forever
    assert ranks[0]["batches"] == ranks[1]["batches"] == [2, 1, 1]
    assert one_rank["batches"] == [2, 2, 1, 1]


def test_ranks_share_curriculum_choices_and_outcomes(ranks: list[dict[str, Any]]) -> None:
    known = ranks[0]["uninformative"]["curriculum"]
    assert known == ranks[1]["uninformative"]["curriculum"]
    assert set(known["taught"].values()) == {True, False}
    assert len(known["of_kind"]) == 6


def test_learning_rate_follows_the_furthest_clock_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        rates = [entry["learning_rate"] for entry in found["decay"]["logs"]]
        assert rates == pytest.approx([0.1, 0.08, 0.07, 0.06])


def test_both_ranks_have_the_accuracy_that_the_first_one_found(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["validated"] == ranks[1]["validated"] == [1.0]


@pytest.mark.parametrize(
    ("case", "by", "kind", "message"),
    [
        ("raises", 1, "KeyError", "reward 'raises' raised KeyError: "),
        ("raises_later", 1, "KeyError", "reward 'raises_later' raised KeyError: "),
        ("hangs", 1, "RewardError", "reward 'hangs' took longer than 1.0 s for 8 completions"),
        ("model", 1, "OutOfMemoryError", "no memory for the reward model"),
        ("validates", 0, "LookupError", "no verdict"),
    ],
)
def test_error_on_one_rank_ends_both_with_the_same_message(
    case: str, by: int, kind: str, message: str, ranks: list[dict[str, Any]]
) -> None:
    """Were a rank to wait for one that has raised, it would be for 30 minutes."""
    own, others = ranks[by]["faults"][case], ranks[1 - by]["faults"][case]
    assert kind in own["kinds"]
    assert message in own["message"]
    assert ("RankError" if case == "validates" else "RewardError") in others["kinds"]
    assert f"on rank {by}: " in others["message"]
    assert others["message"].endswith(own["message"])
    assert max(own["seconds"], others["seconds"]) < 30
