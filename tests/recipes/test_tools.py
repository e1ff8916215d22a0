"""Tools in the recipes: how a prompt says what there is, and what is refused before a model loads."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl.chat_template_utils import qwen2_5_chat_template

from tests.support.tiny import calling_model, tool_tokenizer
from trl_ext.errors import InputError
from trl_ext.generation.adapter_models import load_tokenizer
from trl_ext.generation.model_source import locate
from trl_ext.generation.samplers import HFSampler
from trl_ext.io import read_json
from trl_ext.recipes.chat import Chat, ShownTools
from trl_ext.recipes.cli import read_settings
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.preflight import prepare
from trl_ext.turns.responses import ToolUse

ROOT = Path(__file__).parents[2]
ASKED = [{"role": "user", "content": "How much is 2^10?"}]


def settings(protocol: str = "auto") -> Any:
    return SimpleNamespace(tools="python,calculator", tool_protocol=protocol, stop=["</answer>"])


@pytest.mark.moderate
def test_a_template_with_tools_is_taken_and_fences_otherwise() -> None:
    source = locate("smollm2")
    tokenizer = load_tokenizer(source)
    plain = settings()
    shown = ShownTools.of(plain, tokenizer, is_chat=True)
    assert (plain.tool_protocol, plain.stop, shown.functions) == ("fences", ["</answer>", "```output"], ())
    text = Chat.with_model(source, tokenizer, None, shown).texts([{"prompt": ASKED}])[0]["prompt"]
    assert "How much is 2^10?\n\nYou can use tools." in text
    assert text.endswith("<|im_start|>assistant\n")
    tokenizer.chat_template = qwen2_5_chat_template
    for protocol in ("auto", "template"):
        described = settings(protocol)
        shown = ShownTools.of(described, tokenizer, is_chat=True)
        assert (described.tool_protocol, described.stop) == ("template", ["</answer>"])
        text = Chat.with_model(source, tokenizer, None, shown).texts([{"prompt": ASKED}])[0]["prompt"]
        assert '"name": "calculator"' in text
        assert "You can use tools" not in text
    asked_for = settings("fences")
    assert ShownTools.of(asked_for, tokenizer, is_chat=True).instructions
    texts = settings()
    assert ShownTools.of(texts, tokenizer, is_chat=False).instructions
    assert texts.tool_protocol == "fences"
    for is_chat, said in ((False, "its prompts are texts"), (True, "its chat template writes no tools")):
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match=f"tool_protocol template: {said}.*: choose --tool_protocol fences"):
            ShownTools.of(settings("template"), tokenizer, is_chat)


def test_a_text_template_has_a_place_for_the_tools() -> None:
    shown = ShownTools((), "You can use tools.")
    assert shown.in_texts([{"prompt": "{tools} Go.", "answer": "1"}]) == [
        {"prompt": "You can use tools. Go.", "answer": "1"}
    ]


OWN = "tests/support/own_tools.py"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tools", "calculato"], "unknown tool 'calculato'. Did you mean 'calculator'"),
        (["--tools", "calculator,calculator"], "two are called 'calculator'"),
        (["--tools", f"{OWN}:check"], "has the argument 'answer', which is what rewards call the truth"),
        (["--tools", f"{OWN}:untyped"], "a tool needs a type for every argument"),
        (["--tools", "calculator", "--max_turns", "0"], "max_turns must be at least 2, got 0"),
        (["--max_turns", "3"], "max_turns=3 needs tools"),
    ],
)
def test_bad_tools_are_refused_before_a_model(monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["grpo_math.py"])
    arguments = ["--use_cpu", "true", "--use_vllm", "false", "--model_name_or_path", "nowhere", *flags]

    def until_model() -> None:
        task, model, config = read_settings(GRPO_SETTINGS, None, ROOT / "recipes" / "grpo_math.yaml", arguments)
        prepare(task, model, config, task.data)

    with pytest.raises((InputError, ValueError), match=said):
        until_model()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a folder that calls the calculator or guesses, and says 6 or 7."""
    tokenizer, folder = tool_tokenizer(), tmp_path_factory.mktemp("caller")
    calling_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_an_evaluation_calls_tools_and_compares(
    caller: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template, rows = tmp_path / "ask.prompt", tmp_path / "rows.jsonl"
    template.write_text("{question}=")
    rows.write_text("".join(json.dumps({"problem": f"{n}+1", "answer": "6"}) + "\n" for n in range(9)))
    settings = Evaluation(
        model_name_or_path=str(caller), dataset=str(rows), prompt=str(template), answer_format="r1_zero", samples=4,
        max_tokens=40, tools="calculator", max_turns=3, output_dir=str(tmp_path / "out"), show=36, grader=f"{ROOT / OWN}:says",
    )  # fmt: skip
    report = run_evaluation(settings)
    assert settings.tool_protocol == "fences"
    called = [row for row in report.rows if row["calls"]]
    assert 0 < len(called) < len(report.rows) == 36
    for row in report.rows:
        own = "".join(turn["text"] for turn in row["turns"] if turn["role"] == "assistant")
        assert row["response"] == own.replace("<eos>", "")
        assert row["tokens"] == sum(turn["tokens"] for turn in row["turns"] if turn["role"] == "assistant")
        assert (row["outcome"] == "correct") == row["response"].endswith("6")
    figures = read_json(tmp_path / "out" / "summary.json")["tools"]
    for name, chosen in (("with", called), ("without", [row for row in report.rows if not row["calls"]])):
        correct = sum(row["outcome"] == "correct" for row in chosen)
        assert figures[f"accuracy_{name}_call"] == pytest.approx(correct / len(chosen))
    assert figures["calls_per_response"] == pytest.approx(sum(row["calls"] for row in report.rows) / 36)
    printed = capsys.readouterr().out
    assert "tools: calls per response" in printed
    assert "[calculator: ok|\n6\n```\n]" in printed  # what --show has of a response
    again = run_evaluation(settings)
    assert [row["response"] for row in again.rows] == [row["response"] for row in report.rows]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_turns": 1}, "max_turns must be at least 2, got 1"),
        ({"min_tokens": 3}, "tools with min_tokens: no tool would be called as it says"),
        ({"tools": "abacus"}, "unknown tool 'abacus'"),
        ({"tools": None, "tool_timeout": 3.0}, "tool_timeout=3.0 needs tools"),
        ({"export": "there"}, "tools with export: no tool would be called"),
    ],
)
def test_an_evaluation_refuses_what_tools_cannot_have(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Evaluation(**{"tools": "calculator", **settings})


@pytest.mark.vllm
def test_vllm_samples_a_response_by_its_number_with_tools(caller: Path) -> None:
    settings = Evaluation(
        model_name_or_path=str(caller), tools="calculator", tool_protocol="fences", max_tokens=40, use_vllm="true",
        dtype="float32", vllm_max_model_length=64,
    )  # fmt: skip
    sampler = settings.sampler(str(caller))
    numbers = list(range(24))
    together = sampler(["1+1="] * 24, numbers)
    assert {len(completion.turns or ()) for completion in together} >= {1, 3}  # no call, one, and more
    assert sampler(["1+1="] * 12, numbers[12:]) == together[12:]
    by_hf = {c.text: c for c in HFSampler(str(caller), settings.sampling(), 96, turns=partial(ToolUse.of, settings))(
        ["1+1="] * 96, list(range(96))
    )}  # fmt: skip
    shared = [completion for completion in together if completion.text in by_hf]
    assert len(shared) > 12
    for completion in shared:
        same = by_hf[completion.text]
        assert (completion.tokens, completion.turns, completion.finished) == (same.tokens, same.turns, same.finished)
        assert completion.logp == pytest.approx(same.logp, abs=1e-4)
