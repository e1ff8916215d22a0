"""What is asked for ahead, and when, by its order alone; `generation/test_server.py` trains with servers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_ext.errors import ServerError
from trl_ext.generation.in_flight import InFlight, in_background
from trl_ext.grpo.rollout_ahead import RolloutsAhead

STEP = 4  # optimizer steps made; a rollout is for two of them, of two micro-batches each


class Engine:
    """Says what it is asked for."""

    def __init__(self, version: int) -> None:
        self.ahead: InFlight | None = InFlight.complete([[1], [2]], version, [[[7], [8]], [[[-1.0]], [[-2.0]]], None])
        self.asked: list[Any] = []

    def answers_ahead(self, prompts: list[list[int]]) -> tuple[Any, ...]:
        assert self.ahead is not None
        ahead, self.ahead = self.ahead, None
        return prompts, *ahead.of(prompts), ahead.version

    def ask_ahead(self, *asked: Any) -> None:
        self.asked.append(asked)
        self.ahead = InFlight.complete(*asked[:2], answers=None)


def rolling_out(version: int, curriculum: object = None) -> tuple[RolloutsAhead, Engine, list[Any]]:
    engine, said = Engine(version), []
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(training=True), state=SimpleNamespace(global_step=STEP, max_steps=100), _step=2 * STEP,
        vllm_generation=engine, sync_engine=lambda: said.append(("synced", len(engine.asked))),
        accelerator=SimpleNamespace(gather=lambda values: torch.cat([values, values]), device="cpu"),
        _log_training=lambda *metric: said.append(metric), _tokenize_prompts=lambda prompts: (prompts,),
    )  # fmt: skip
    config: Any = SimpleNamespace(
        rollout_ahead=1,
        steps_per_generation=4,
        num_iterations=1,
        gradient_accumulation_steps=2,
        max_completion_length=9,
    )
    selected = lambda rows, call: ([{"prompt": [row["prompt"], call]} for row in rows], None)  # noqa: E731
    problems: Any = SimpleNamespace(curriculum=curriculum, selected=selected)
    return RolloutsAhead(trainer, config, problems), engine, said


def batches() -> Iterator[list[dict[str, int]]]:
    yield from ([{"prompt": number}] for number in range(6))


@pytest.mark.parametrize("curriculum", [None, "of earlier rewards"])
def test_next_rollout_is_asked_for_when_problems_are_known(curriculum: object) -> None:
    ahead, engine, said = rolling_out(STEP - 2, curriculum)
    watched = ahead.watched(batches())
    assert ahead.watched(watched.items) is watched  # type: ignore[attr-defined]
    next(watched), next(watched)  # of the first step on the rollout that is due
    assert ahead.roll_out([[1], [2]], now=pytest.fail) == ([[7], [8]], [[-1.0], [-2.0]])
    assert said == [("synced", 0)], "before the next one is asked for"
    assert len(engine.asked) == (curriculum is None)
    rows: list[dict[str, Any]] = [{}, {}]
    ahead.note_versions(rows)
    assert rows == [{"policy_version": STEP - 2}] * 2
    ahead.finish([rows[0], {"policy_version": STEP}])  # a further try, of current weights
    assert said[1:] == [("sampling/staleness", 1.0)]
    assert engine.asked == [([[4, 2 * STEP + 4]], STEP, ("train", STEP + 2))], "of the call after this rollout's, once"


def test_a_further_try_is_sampled_now() -> None:
    ahead, engine, _ = rolling_out(STEP - 2)
    engine.ahead = None
    now: Any = ([[9]], [[-3.0]])
    assert ahead.roll_out([[3]], now=lambda: now) == now
    rows: list[dict[str, Any]] = [{}]
    ahead.note_versions(rows)
    assert rows == [{"policy_version": STEP}]


def test_samples_older_than_a_rollout_end_the_run() -> None:
    ahead, *_ = rolling_out(STEP - 3)
    with pytest.raises(RuntimeError, match="a rollout is 3 optimizer steps old, where at most 2 are allowed"):
        ahead.roll_out([[1], [2]], now=pytest.fail)


def test_nothing_is_asked_for_beyond_the_end() -> None:
    ahead, engine, _ = rolling_out(STEP - 2)
    ahead.trainer.state.max_steps = STEP + 2
    ahead.watched(batches())
    ahead.ask_for_next()
    ahead.trainer.state.max_steps = STEP + 3
    ahead.ask_for_next()
    assert len(engine.asked) == 1


def test_a_checkpoint_waits_and_has_no_lost_rollout() -> None:
    def lost() -> Any:
        raise ServerError("lost")

    ahead, engine, _ = rolling_out(STEP - 2)
    whole = ahead.state_dict()["ahead"]()
    assert whole == {"prompts": [[1], [2]], "version": STEP - 2, "answers": [[[7], [8]], [[[-1.0]], [[-2.0]]], None]}
    engine.ahead = InFlight([[1]], STEP, in_background([lost])[0])
    assert ahead.state_dict()["ahead"]() is None
    ahead.load_state_dict({"ahead": None})
    assert engine.ahead.version == STEP
    ahead.load_state_dict({"ahead": whole})
    assert engine.ahead.version == STEP - 2
