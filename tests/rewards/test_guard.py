"""Reward functions as users write them: their results pass through, and their errors are reported as theirs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import ends_early, make_trainer, scripted
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.io import read_jsonl
from trl_ext.ranks import is_of_gather
from trl_ext.rewards import GRADERS, REWARDS
from trl_ext.rewards.guard import RewardError, guarded
from trl_ext.rewards.hooks import completion_text
from trl_ext.rewards.score import Score
from trl_ext.training.callbacks import GenerationsLog

EOS = 1


class Refused(ValueError):
    """An exception of a user's own, made with more than a message and with a field."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def own_type(**_: Any) -> list[float]:
    raise Refused(429, "slow down")  # here


def missing_file(**_: Any) -> list[float]:
    raise FileNotFoundError(2, "No such file", "judge.json")


def unusual(**_: Any) -> list[float]:
    b"\xff".decode()
    return []


def ends_iteration(**_: Any) -> list[float]:
    return [next(iter(()))]


def lazy(completions: list[str], **_: Any) -> Iterator[float]:
    yield from (1 / 0 for _ in completions)


class Judge:
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        raise Refused(503, "no judge")


def line_of(function: Any, words: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start = function.__code__.co_firstlineno
    return f"{__file__}:{next(n for n, line in enumerate(lines[start - 1 :], start) if words in line)}"


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (own_type, Refused, f"reward 'own_type' raised Refused: 429: slow down ({line_of(own_type, '# here')})"),
        (missing_file, FileNotFoundError, "reward 'missing_file' raised FileNotFoundError: [Errno 2] No such file"),
        (unusual, UnicodeDecodeError, "reward 'unusual' raised UnicodeDecodeError: 'utf-8' codec can't decode"),
        (ends_iteration, RewardError, "reward 'ends_iteration' raised StopIteration"),
        (lazy, ZeroDivisionError, f"division by zero ({line_of(lazy, '1 / 0')})"),
        (functools.partial(own_type, k=1), Refused, "reward 'own_type' raised Refused"),
        (Judge(), Refused, f"reward 'Judge' raised Refused: 503: no judge ({line_of(Judge.__call__, 'no judge')})"),
        (lambda completions: [2.0], TypeError, f"({__file__}:"),  # it does not take what TRL gives
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__)[:20],
)
def test_reward_exception_keeps_its_type_and_is_a_reward_error(
    function: Any, kind: type[Exception], words: str
) -> None:
    async def call() -> Any:
        called = guarded(function, 5.0)(prompts=["p"], completions=["c"])
        return await called if asyncio.iscoroutine(called) else called

    with pytest.raises(RewardError) as found:
        asyncio.run(call())
    assert isinstance(found.value, kind)
    assert words in str(found.value)
    assert type(found.value.__cause__) is (StopIteration if function is ends_iteration else kind)
    assert kind is not Refused or getattr(found.value, "code", None) in (429, 503)


def test_an_async_reward_has_its_answers_checked_and_its_time() -> None:
    async def late(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(60)
        return []

    async def short(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"reward 'late' took longer than 0.05 s for 2 completions"):
        asyncio.run(guarded(late, 0.05)(completions=["a", "b"]))
    with pytest.raises(RewardError, match=r"reward 'short' returned 1 rewards for 2 completions"):
        asyncio.run(guarded(short, None)(completions=["a", "b"]))
    assert asyncio.run(guarded(short, 5.0)(completions=["a"])) == [1.0]


def test_a_guarded_reward_is_a_function_as_it_was() -> None:
    """TRL and its users ask with `inspect` which of `trainer.reward_funcs` are async."""
    for function, is_async in ((own_type, False), (Judge(), True), (functools.partial(Judge()), True)):
        assert inspect.isfunction(guarded(function, 5.0))
        assert inspect.iscoroutinefunction(guarded(function, 5.0)) is is_async
    assert guarded(own_type, 5.0).__name__ == "own_type"


@pytest.mark.parametrize("reward", ["1", b"1", 1j, torch.ones(2), [1.0]], ids=str)
def test_a_reward_that_is_not_a_number_is_named(reward: Any) -> None:
    with pytest.raises(RewardError, match=r"reward '<lambda>' returned .* for completion 1, not a number or None"):
        guarded(lambda completions: [1, reward], None)(completions=["a", "b"])


def test_rewards_that_come_one_by_one_are_read_once() -> None:
    drawn = guarded(lambda completions, **_: (float(len(text)) for text in completions), None)(completions=["a", "bc"])
    assert list(drawn) == list(drawn) == [1.0, 2.0]


def test_a_reward_of_an_environment_is_called_as_trl_calls_it() -> None:
    """As `trainer.reward_funcs[i](environments=...)` does: TRL's `get_reward` wrapper takes nothing else."""
    assert guarded(lambda environments, **_: [1.0 for _ in environments], 5.0)(environments=["a", "b"]) == [1.0, 1.0]


@pytest.mark.moderate
def test_an_alarm_of_the_process_still_rings_on_time() -> None:
    def takes(completions: list[str], seconds: float) -> list[float]:
        time.sleep(seconds)
        return [seconds for _ in completions]

    rung: list[float] = []
    pytests = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    handler = signal.getsignal(signal.SIGALRM)
    try:
        for seconds, sleeps in ((0.05, 0.1), (0.3, 0.0)):  # it rings during the reward, and later
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, seconds)
            assert guarded(takes, 5.0)(completions=["c"], seconds=sleeps) == [sleeps]
            assert signal.getsignal(signal.SIGALRM) is handler
            while not rung and time.monotonic() < began + 2:
                time.sleep(0.005)
            assert rung.pop() - began == pytest.approx(seconds, abs=0.1)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *pytests)


# Responses that are not texts.


@pytest.mark.parametrize("grader", sorted(GRADERS))
def test_a_response_that_is_none_is_named(grader: str) -> None:
    truth = "24: 3 8" if grader == "countdown" else "4"
    with pytest.raises(TypeError, match="response 1 is None, not a text"):
        GRADERS[grader](["a", None], [truth] * 2)
    with pytest.raises(TypeError, match="completion 1 is None, neither a text nor a list of messages"):
        REWARDS[grader](["a", None], [truth] * 2)


def test_message_without_text_is_empty_and_parts_are_joined() -> None:
    assert completion_text([{"role": "assistant", "tool_calls": []}]) == ""
    assert completion_text([{"role": "assistant", "content": None}]) == ""
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": None}, {"type": "text", "text": "b"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "ab"


# What rewards log, in a trainer.


def trained(path: Path, *rewards: Any, **settings: Any) -> Any:
    words = lambda row, step: [4] * (1 + row % 4) + [EOS]  # noqa: E731
    settings = {"rollout_func": scripted(words), "max_steps": 1, "preset": "grpo_clip", **settings}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, list(rewards), **settings)
    trainer.add_callback(GenerationsLog(path / "generations.jsonl", 1, trainer))
    trainer.train()
    return trainer


@pytest.mark.moderate
def test_every_reward_has_its_own_columns_and_keeps_row_columns(tmp_path: Path) -> None:
    def first(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        for half in (completions[:8], completions[8:]):  # in two parts
            log_extra("note", [f"first {len(text)}" for text in half])
        log_extra("tokens", [-1] * len(completions))
        log_extra("response", torch.arange(len(completions)))
        log_extra("first", ["TRL's column of this reward"] * len(completions))
        log_extra("score", [np.float32(0.5), torch.tensor(2), {3}, *completions[3:]])
        return ends_early(completions)

    async def second(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("note", [f"second {len(text)}" for text in completions])
        return [float(len(text) > 3) for text in completions]

    trainer = trained(tmp_path, first, second)
    for number, row in enumerate(trainer.last_rollout):
        assert row["note"] == f"first {len(row['response'])}"
        assert row["second/note"] == f"second {len(row['response'])}"
        assert (row["tokens"], row["first/tokens"]) == (2 + number % 4, -1)
        assert (row["response"], row["first/response"]) == (" ".join("b" * (1 + number % 4)), number)
    assert [row["score"] for row in trainer.last_rollout[:3]] == [0.5, 2, "{3}"]
    assert len(read_jsonl(tmp_path / "generations.jsonl")) == 4


@pytest.mark.moderate
@pytest.mark.parametrize("asked", [True, False])
def test_columns_are_in_trls_table_where_one_is_asked_for(asked: bool, tmp_path: Path) -> None:
    def first(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("note", [len(text) for text in completions])
        log_extra("tokens", [-1] * len(completions))
        return ends_early(completions)

    logged = trained(tmp_path, first, log_completions=asked)._logs["extra"]
    assert {name: len(values) for name, values in logged.items()} == ({"note": 16, "first/tokens": 16} if asked else {})


@pytest.mark.moderate
def test_a_column_of_another_length_names_the_reward(tmp_path: Path) -> None:
    def forgetful(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("note", ["only one"])
        return ends_early(completions)

    with pytest.raises(RewardError, match=r"reward 'forgetful' logged 1 values in column 'note' for 16 completions"):
        trained(tmp_path, forgetful)


@pytest.mark.moderate
def test_response_without_verdict_is_not_correct_or_incorrect(tmp_path: Path) -> None:
    def graded(completions: list[str], **_: Any) -> list[float]:
        verdicts = [(True, None, False, False)[row % 4] for row, _ in enumerate(completions)]
        return [Score(row % 2, verdict) for row, verdict in enumerate(verdicts)]

    entry = trained(tmp_path, graded).state.log_history[0]
    # rows of 2, 3, 4 and 5 tokens, EOS included
    assert (entry["completions/mean_length_correct"], entry["completions/mean_length_incorrect"]) == (2, 4.5)


# Rewards that score nothing.


@pytest.mark.moderate
def test_nan_for_every_completion_ends_the_run_and_none_does_not(tmp_path: Path) -> None:
    def of_nothing(completions: list[str], **_: Any) -> list[float]:
        return [math.nan] * len(completions)

    def unscored(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    words = r"reward 'of_nothing' returned NaN for all 16 completions.*a number, or None for one that it cannot score"
    with pytest.raises(RewardError, match=words):
        trained(tmp_path / "a", of_nothing)
    with pytest.raises(RewardError, match=words):
        trained(tmp_path / "b", unscored, of_nothing)
    assert trained(tmp_path / "c", ends_early, of_nothing).state.global_step == 1
    assert trained(tmp_path / "d", unscored).state.global_step == 1


@pytest.mark.moderate
def test_all_nan_rewards_are_tolerated_for_a_while_once_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fails_from_the_second_on(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return ends_early(completions) if len(calls) == 1 else [math.nan] * len(completions)

    fails_from_the_second_on.__name__ = "sometimes"
    with pytest.raises(RewardError, match=r"NaN for all 16 completions, 2 rollouts in a row"):
        trained(tmp_path, fails_from_the_second_on, max_steps=9, max_nonfinite_steps=2)
    assert len(calls) == 3
    assert "reward 'sometimes' returned NaN for all 16 completions" in caplog.text
    assert json.loads((tmp_path / "generations.jsonl").read_text().splitlines()[0])["reward"] in (0, 1)


def test_an_error_of_the_gathering_itself_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose peer has gone must not begin to gather a second time."""
    from accelerate.utils import gather, operations

    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    kind = operations.PartialState().distributed_type
    monkeypatch.setattr(operations, "TORCH_DISTRIBUTED_OPERATION_TYPES", [kind])
    monkeypatch.setattr(operations, "_gpu_gather", closed)
    for function, expected in ((lambda: gather(torch.ones(1)), True), (closed, False)):
        with pytest.raises(RuntimeError, match="closed by peer") as found:
            function()
        assert is_of_gather(found.value) is expected
