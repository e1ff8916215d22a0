"""Before a model loads, what would not fit is refused; what cannot be estimated is said, and the run starts."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.grpo.test_distributed import free_port, on_two_ranks
from tests.tools.estimate.memory.test_parts import with_engine
from tests.tools.estimate.memory.test_step import NETWORK
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.preflight import CHECKS_GROUP, run_checks
from trl_ext.tools.estimate import before_run
from trl_ext.tools.estimate.before_run import VERDICT, MemoryCheck, estimate_in_subprocess, launch_of_process
from trl_ext.tools.estimate.planned import Launch, Lengths, NoEstimateError


class Tokens:
    """A tokenizer of letters."""

    bos_token_id = eos_token_id = None

    def __call__(self, text: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [list(one) for one in text]}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with a GPU of 1,000 bytes, and what was asked of the other process."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 1000))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the model is none on the Hub
    monkeypatch.setattr(before_run, "AutoConfig", SimpleNamespace(from_pretrained=lambda *_, **__: NETWORK))
    monkeypatch.setattr(before_run, "load_tokenizer", lambda *_, **__: Tokens())
    monkeypatch.setattr(before_run, "PlannedRun", lambda *given: given)
    return asked


def check(task: GRPOTask) -> None:
    """Estimate a run on two prompts."""
    config: Any = SimpleNamespace(
        use_vllm=True, world_size=1, max_completion_length=10, trust_remote_code=False, ddp_timeout=100
    )
    model: Any = SimpleNamespace(model_revision="main")
    data: Any = SimpleNamespace(train={"prompt": ["abc", "abcde"]})
    run_checks(task, model, config, data, "policy")


def test_an_installation_without_the_check_is_said(
    on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: {}.get(group, ()))
    check(GRPOTask(check_memory="auto"))
    assert f"no check is installed as an entry point of {CHECKS_GROUP!r}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="check_memory: true, and no check is installed"):
        check(GRPOTask(check_memory="true"))
    check(GRPOTask(check_memory="false"))
    assert not capsys.readouterr().out


def verdict(monkeypatch: pytest.MonkeyPatch, said: MemoryCheck | NoEstimateError, asked: list[Any]) -> None:
    """Have the other process say this."""

    def answer(*given: Any) -> MemoryCheck:
        asked.extend(given)
        if isinstance(said, NoEstimateError):
            raise said
        return said

    monkeypatch.setattr(before_run, "estimate_in_subprocess", answer)


def test_a_refusal_ends_the_run_with_its_setting(on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    verdict(monkeypatch, MemoryCheck("lower micro_train_batch_size from 4 to 2", "backward", 2000), on_a_gpu)
    with pytest.raises(ValueError, match=r"from 4 to 2. \(check_memory: false starts the run as it is\)"):
        check(GRPOTask())
    given, capacity, seconds = on_a_gpu
    assert capacity == 1000
    assert seconds == 50  # the other ranks wait for 100
    assert given[5] == Lengths(4.0, 5, 5.0, 10)


def test_a_run_that_fits_is_told_its_peak(
    on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(monkeypatch, MemoryCheck(None, "backward", 3 * 2**30), on_a_gpu)
    check(GRPOTask())
    assert "estimated memory: 3.0 GiB at the peak (backward)" in capsys.readouterr().out


def test_an_engine_that_would_preempt_prints_a_warning(
    on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(monkeypatch, MemoryCheck(None, "backward", 1, "it would preempt some; set it to 0.5"), on_a_gpu)
    check(GRPOTask())
    assert "memory: it would preempt some; set it to 0.5" in capsys.readouterr().out


def test_what_cannot_be_estimated_stops_only_who_asked(
    on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(monkeypatch, NoEstimateError("of its images"), on_a_gpu)
    check(GRPOTask())
    assert "memory is not estimated: of its images" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot be estimated here: of its images"):
        check(GRPOTask(check_memory="true"))


def test_nothing_is_estimated_without_a_gpu_or_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    verdict(monkeypatch, MemoryCheck("no", "backward", 1), asked)
    check(GRPOTask())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(GRPOTask(check_memory="false"))
    assert not asked


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="check_memory must be auto, true or false, got 'maybe'"):
        GRPOTask(check_memory="maybe")
    with pytest.raises(ValueError, match="check_memory: true needs a GPU"):
        GRPOTask(check_memory="true")


def test_the_launch_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_of_process(SimpleNamespace(world_size=1)) == Launch(1, 1, 0)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert launch_of_process(SimpleNamespace(world_size=16)) == Launch(16, 2, 0)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert launch_of_process(SimpleNamespace(world_size=16)) == Launch(16, 2, 2)


@pytest.mark.parametrize(
    ("environment", "settings", "said"),
    [
        ({"USE_FSDP": "true"}, {}, "FSDP"),
        ({}, {"fsdp": "full_shard"}, "FSDP"),
        ({"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": "ds.json"}, {}, "file of DeepSpeed's own"),
        ({"DEEPSPEED_ZERO_STAGE": "2"}, {"deepspeed": "ds.json"}, "file of DeepSpeed's own"),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {}, "offloading"),
        ({"DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, {}, "offloading"),
        ({}, {}, "without a zero_stage"),
    ],
)
def test_a_launch_that_is_not_modeled_is_no_zero_0(
    environment: dict[str, str], settings: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for name, value in environment.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(NoEstimateError, match=said):
        launch_of_process(SimpleNamespace(world_size=2, **settings))


@pytest.mark.parametrize("failing", ["PlannedRun", "estimate_in_subprocess", "launch_of_process"])
def test_no_error_on_the_way_ends_a_run_that_may_fit(
    failing: str, on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict(monkeypatch, MemoryCheck("no", "backward", 1), on_a_gpu)

    def fail(*_: object) -> None:
        raise KeyError("prompt")

    monkeypatch.setattr(before_run, failing, fail)
    check(GRPOTask())
    assert "memory is not estimated: KeyError: 'prompt'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot be estimated here: KeyError: 'prompt'"):
        check(GRPOTask(check_memory="true"))


def answered(monkeypatch: pytest.MonkeyPatch, out: str) -> dict[str, str]:
    """Have the other process print this, and return the environment that it gets."""
    environment: dict[str, str] = {}

    def start(*command: object, env: dict[str, str], **_: object) -> SimpleNamespace:
        environment.update(env)
        return SimpleNamespace(returncode=0, stdout=out.encode(), stderr=b"")

    monkeypatch.setattr(before_run.subprocess, "run", start)
    return environment


def test_the_verdict_is_found_among_a_librarys_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said = VERDICT + '{"refusal": null, "peak": "forward", "bytes": 3}'
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "1")
    environment = answered(monkeypatch, f"hello\n{said}\nbye\n")
    assert estimate_in_subprocess(with_engine(network=NETWORK), 1) == MemoryCheck(None, "forward", 3)
    assert not [name for name in environment if name.endswith("_RANK")]
    answered(monkeypatch, "")
    with pytest.raises(NoEstimateError, match="without a verdict"):
        estimate_in_subprocess(with_engine(network=NETWORK), 1)


def test_the_other_process_needs_no_class_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        """Of a script, which the other process does not import."""

    answered(monkeypatch, VERDICT + '{"refusal": null, "peak": "forward", "bytes": 3}')
    run = replace(with_engine(network=NETWORK), task=Task())
    assert estimate_in_subprocess(run, 1) == MemoryCheck(None, "forward", 3)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    torchrun = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return on_two_ranks(torchrun, tmp_path_factory.mktemp("estimated"), "estimate", seconds=240)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("fits", None),
        ("does not fit", "GiB would be needed at the peak"),
        ("too slow", None),
        ("too slow and asked for", "check_memory: true, and memory cannot be estimated here: it took more than 0.5 s"),
    ],
)
def test_the_first_rank_estimates_and_both_end_alike(
    case: str, said: str | None, two_ranks: list[dict[str, Any]]
) -> None:
    first, second = (found[case] for found in two_ranks)
    assert (first["processes"], second["processes"]) == (1, 0)
    assert first["refusal"] == second["refusal"]
    assert (first["refusal"] is None) == (said is None)
    assert said is None or said in first["refusal"]
    line = {"fits": "estimated memory: ", "too slow": "memory is not estimated: it took more than 0.5 s"}.get(case, "")
    assert first["printed"].startswith(line)
    assert second["printed"] == ""


@pytest.mark.slow
def test_another_process_estimates_without_joining_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    lengths = Lengths(16, 32, 64, 128)
    small = with_engine(network=NETWORK, lengths=lengths, vllm_mode="server")
    assert estimate_in_subprocess(small, 2**29).refusal is not None  # CUDA itself takes all of it
    found = estimate_in_subprocess(small, 2**34)
    assert found.refusal is None
    assert found.peak in ("forward", "backward")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_that_fails_is_told_by_its_last_line() -> None:
    with pytest.raises(NoEstimateError, match="Error"):
        estimate_in_subprocess(with_engine(network=None), 2**30)
