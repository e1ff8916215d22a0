"""Whoever waits for completions sees a line every half minute, counted in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import ends_early, make_trainer, tiny_model, tiny_tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation import progress
from trl_ext.generation.hf import hf_generate
from trl_ext.generation.progress import advance, reporting
from trl_ext.generation.sampling import sampling_config


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "_clock", lambda: now[0])
    return now


def test_lines_come_by_the_clock_and_count_tokens(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("validation at step 20", completions=4, longest=100):
        for second in range(1, 71):
            clock[0] = second
            with reporting("a rollout within it", completions=1, longest=1):
                advance(2, finished=second == 5)
    advance(1000)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "validation at step 20: 1 of 4 completions, 20 tokens, 2 tokens/s, at most 2 min left",
        "validation at step 20: 1 of 4 completions, 80 tokens, 2 tokens/s, at most 2 min left",
        "validation at step 20: 1 of 4 completions, 140 tokens, 2 tokens/s, at most 2 min left",
    ]


def test_short_sampling_prints_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("rollout", completions=4, longest=100):
        clock[0] = 9.9
        advance(2)
    with pytest.raises(ZeroDivisionError), reporting("rollout", completions=4, longest=100):
        1 / 0  # noqa: B018
    clock[0] = 99
    advance(1)
    assert capsys.readouterr().out == ""


def test_both_loops_count_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = tokenizer(["1 + 1 =", "2 + 3 = a"])["input_ids"]
    for reason in (None, "it is asked for"):
        monkeypatch.setattr("trl_ext.generation.hf.own_loop_unsupported", lambda model, config, why=reason: why)
        config = sampling_config(model.generation_config, {"do_sample": False, "max_new_tokens": 12})
        with reporting("rollout", completions=2, longest=12):
            rows = hf_generate(model, tokenizer, prompts, config)
            current = progress._CURRENT.get()
        assert current is not None
        assert (current.tokens, current.finished) == (sum(map(len, rows)), 2)


@pytest.mark.parametrize("stop", [None, ["="]], ids=["the loop of transformers", "ours"])
def test_rollouts_are_counted_with_stop_strings_and_without(
    stop: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[progress.SamplingProgress] = []
    usual = progress.SamplingProgress.advance

    def kept(self: progress.SamplingProgress, tokens: int, finished: int = 0) -> None:
        usual(self, tokens, finished)
        counted[:] = [self]

    monkeypatch.setattr(progress.SamplingProgress, "advance", kept)
    trainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, max_steps=1, preset="grpo_clip", stop=stop
    )
    trainer.train()
    (rollout,) = counted
    assert rollout.purpose == "rollout after step 0"
    assert rollout.finished == rollout.completions == len(trainer.last_rollout)
    drawn = sum(row["tokens"] for row in trainer.last_rollout)
    is_close = (
        0.9 * drawn <= rollout.tokens <= drawn
    )  # where a policy draws the pad token, transformers' loop has padding
    assert rollout.tokens == drawn if stop else is_close
