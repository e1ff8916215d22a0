"""Environments: each response's own, reset with its problem; what turns earn; and what a class has to have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from recipes.countdown_game import CountdownByTurns, CountdownGame
from tests.support.tiny import CALL, WAIT, calling_model, make_trainer, tiny_model, tool_tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.adapter_models import load_tokenizer
from trl_ext.generation.model_source import locate
from trl_ext.turns.calls import Call
from trl_ext.turns.protocols import Fences
from trl_ext.turns.responses import ToolUse
from trl_ext.turns.tools import Toolbox, functions_of

OWN = "tests/support/own_environments.py"
ROWS = [{"prompt": f"{n}+1=", "answer": "6", "start": n} for n in range(8)]


def called(name: str, place: int = 0, **arguments: Any) -> Call:
    return Call(name, arguments, place=place)


def test_every_response_has_its_own_and_calls_keep_their_order() -> None:
    box = Toolbox.of(f"{OWN}:Counter,calculator", 1.0)
    assert [function.__name__ for function in box.functions] == ["add", "double", "calculator"]
    box.begin(ROWS[1:4])
    calls = [
        called("add", 0, number=4), called("double", 1, times=1), called("double", 0, times=1), called("add", 0, number=1),
        called("calculator", expression="2*3"), called("add", 2, number=-3), called("add", 1, number=5),
    ]  # fmt: skip
    assert [answer.text for answer in box.answers(calls)] == ["5", "4", "10", "11", "6", "0", "9"]
    assert [box.turn_rewards(place) for place in range(3)] == [5.0, 5.0, -3.0]
    box.begin(ROWS[5:6])  # those that are there are reset
    assert [answer.text for answer in box.answers([called("add", number=0)])] == ["5"]
    assert box.turn_rewards(0) == 0


def test_what_a_method_does_is_an_answer() -> None:
    box = Toolbox.of(f"{OWN}:Counter", 0.3)
    box.begin(ROWS[:1])
    calls = [
        called("add", number=13),
        called("add"),
        called("add", number=99),
        called("reset"),
        called("add", number=1),
    ]
    answers = box.answers(calls)
    assert [answer.kind for answer in answers] == ["failed", "failed", "timeout", "failed", "ok"]
    assert [answer.text for answer in answers[:1]] == ["Error: not that one"]
    assert answers[2].text == "Error: took longer than 0.3 s"
    assert "no tool 'reset'" in answers[3].text
    assert answers[4].text == "1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Untyped", "Untyped.add: .*a tool needs a type for every argument"),
        ("Telling", "Telling.check has the argument 'answer', which is what rewards call the truth"),
        ("Idle", "has no public method next to reset and get_reward"),
        ("NoReset", "is a class without reset"),
        ("Nothing", "has no function 'Nothing'"),
        (f"Counter,{OWN}:Calculators", "is a second environment, and a response has one"),
        ("Calculators,calculator", "two are called 'calculator'"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Toolbox.of(f"{OWN}:{name}", 1.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Talkative", "Talkative.reset returned 'Begin!': prompts are made before responses begin"),
        ("Broken", "Broken.reset raised KeyError: 'numbers'"),
    ],
)
def test_a_reset_that_fails_says_whose_it_is(name: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        Toolbox.of(f"{OWN}:{name}", 1.0).begin(ROWS)
    with pytest.raises(ValueError, match="is reset with the rows of the problems, and there are none"):
        Toolbox.of(f"{OWN}:{name}", 1.0).begin([])


def test_a_turn_has_its_tokens_and_what_it_earned() -> None:
    tokenizer = tool_tokenizer()
    box = Toolbox.of(f"{OWN}:Calculators", 1.0)
    use = ToolUse(tokenizer, box, Fences(tokenizer, box.functions), 3, 20)
    ids = [tokenizer.convert_tokens_to_ids(words) for words in ([CALL, "2*3", WAIT], ["guess", "7", "<eos>"])]
    later = [[ids[0]], [tokenizer.convert_tokens_to_ids(["so", "6"])]]
    first, second = use.continued(
        [[1], [2]], ids, None, lambda prompts, room, places: (later.pop(0), None), 60, rows=ROWS[:2]
    )
    assert first.turns == [(3, 1.0), (3, 1.0), (2, 0.0)]
    assert second.turns == [(3, 0.0)]


def test_the_shipped_game_answers_and_pays_by_turn() -> None:
    game = CountdownByTurns()
    game.reset(answer="24: 3 8 1", problem="Make $24$.")
    said = [game.attempt(text) for text in ("3+8", "3+8", "3*9", "3*8", "__import__('os')")]
    assert said[:2] == ["equals 11"] * 2
    assert said[2:4] == ["uses numbers that are not given, or one too often", "equal"]
    assert said[4].startswith("not an expression")
    assert game.turn_rewards == [0.0, -0.1, 0.0, 0.5, 0.0]
    names = [function.__name__ for function in functions_of("recipes/countdown_game.py:CountdownGame")]
    assert names == ["attempt"]
    assert not hasattr(CountdownGame(), "turn_rewards")


SETTINGS: dict[str, Any] = {
    "tools": f"{OWN}:Calculators", "preset": "grpo_clip", "max_completion_length": 40, "max_turns": 3, "max_steps": 2,
    "learning_rate": 0.001,
}  # fmt: skip


def says_six(completions: list[str], **_: Any) -> list[float]:
    return [float(text.endswith("6")) for text in completions]


def nothing(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def trained(path: Path, **more: Any) -> Any:
    tokenizer = tool_tokenizer()
    data = {"model": calling_model(tokenizer), "processing_class": tokenizer, "train_dataset": Dataset.from_list(ROWS)}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, says_six, **data, **SETTINGS | more)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_a_rollout_plays_and_its_turns_are_trained_on(tmp_path: Path) -> None:
    trainer = trained(tmp_path, advantage="turn_returns")
    rows = trainer.last_rollout
    for row in rows:
        calls = sum(turn["role"] == "tool" for turn in row["turns"])
        start = int(row["prompt"][0])
        assert row["rewards"]["Calculators"] == start + calls  # get_reward, as TRL adds it
        assert row["rewards"]["says_six"] == float(row["response"].endswith("6"))
    assert any("tool" in {turn["role"] for turn in row["turns"]} for row in rows)
    batch = trainer._buffered_inputs[0]
    assert batch["advantages"].shape == batch["completion_ids"].shape
    assert (batch["advantages"][batch["tool_mask"] == 0] == 0).all()
    completions = trainer.sample([row["prompt"] for row in ROWS], 8, 0, rows=ROWS)
    assert any(len(completion.turns or ()) > 1 for completion in completions)
    with pytest.raises(ValueError, match="and there are none"):
        trainer.sample(["1+1="], 8, 0)


@pytest.mark.slow
def test_trls_trainer_takes_the_same_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = load_tokenizer(locate("smollm2"))
    tokenizer.chat_template = qwen2_5_chat_template
    asked = [{"prompt": [{"role": "user", "content": "Make 24."}], "answer": "24: 3 8 1"}] * 8
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, max_steps=1,
        max_completion_length=4, report_to="none", save_strategy="no",
    )  # fmt: skip
    shape = {**tiny_model().config.to_dict(), "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    trainer = GRPOTrainer(
        model, [nothing], config, Dataset.from_list(asked), processing_class=tokenizer, environment_factory=CountdownByTurns
    )  # fmt: skip
    trainer.train()
    assert [tool.__name__ for tool in trainer.tools] == ["attempt"]
    assert [environment.answer for environment in trainer.environments] == ["24: 3 8 1"] * 4
