"""How a call is written and how its answer is read: by a model's chat template, or in fences, which need none.

Both work on token ids. What the model has sampled is never made anew from its text; of an answer the ids are made once
and put behind it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from transformers.utils import get_json_schema
from trl.chat_template_utils import add_response_schema, parse_response, supports_tool_calling

from trl_ext.generation.conversation import ChatTemplate
from trl_ext.turns.calls import Call
from trl_ext.turns.settings import STOP

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT = " ..."
_CALL = re.compile(r"```(?P<name>\w+)[ \t]*\n(?P<body>(?:(?!```).)*)(?:```\s*)?```output", re.DOTALL)
_SPELLINGS = {"py": "python", "Python": "python"}

Function = Callable[..., Any]


class ToolProtocol(Protocol):
    """How calls and answers are written."""

    def calls(self, before: Sequence[int], ids: Sequence[int]) -> list[Call]:
        """What a turn of the model calls at its end; empty if it calls nothing.

        Args:
            before: everything before the turn, the prompt first.
            ids: the turn.
        """

    def answer_ids(self, ids: Sequence[int], calls: Sequence[Call], answers: Sequence[str]) -> list[int]:
        """What the model reads after its turn `ids`: the answers, and how its next turn begins."""


def supports_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a model's chat template writes tools, calls and answers, and calls can be read from its responses."""
    if not tokenizer.chat_template or not supports_tool_calling(tokenizer):
        return False
    try:
        return bool(_reading(tokenizer))
    except ValueError:
        return False


def _reading(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that reads calls; the run's own is saved with the model and stays as it is."""
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return tokenizer
    reading: PreTrainedTokenizerBase = add_response_schema(copy.deepcopy(tokenizer))
    return reading


def shortened(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> str:
    """An answer of at most so many tokens, none of which is a special one, whatever a tool prints."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for token in sorted((token for token in special if len(token) > 1), key=len, reverse=True):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    ids = _ids(tokenizer, text)
    kept = tokens
    while len(ids) > tokens and kept:
        kept -= 1
        text = tokenizer.decode(ids[:kept]).rstrip("\ufffd") + _CUT * (kept > 2)
        if len(_ids(tokenizer, text)) <= tokens:
            break
    return text


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text=text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


class Fences:
    """A block of code and a fence ```` ```output ````, at which the turn stops; the answer and a closing fence follow.

    The word behind the first fence is the tool's name. A tool of one argument takes the block as it is, another one
    JSON with its arguments. ToRA (arXiv:2309.17452) and Qwen2.5-Math write so.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, functions: Sequence[Function]) -> None:
        self.tokenizer = tokenizer
        self.arguments = {function.__name__: arguments_of(function) for function in functions}

    def calls(self, before: Sequence[int], ids: Sequence[int]) -> list[Call]:
        """At most one: that of the last block."""
        text = self.tokenizer.decode(list(ids))
        if STOP not in text:
            return []
        found = list(_CALL.finditer(text))
        if not found:
            return [Call(next(iter(self.arguments)), None, f"no block of code before {STOP}")]
        name = _SPELLINGS.get(found[-1]["name"], found[-1]["name"])
        return [self._call(name, found[-1]["body"].strip("\n"))]

    def _call(self, name: str, body: str) -> Call:
        names = self.arguments.get(name, ["it"])
        if len(names) == 1:
            return Call(name, {names[0]: body})
        return Call(name, *_json_object(body, f"a JSON object with {', '.join(names)}"))

    def answer_ids(self, ids: Sequence[int], calls: Sequence[Call], answers: Sequence[str]) -> list[int]:
        """The answer between the fence that the model has opened and one that closes it."""
        (answer,) = answers
        after = self.tokenizer.decode(list(ids)).rpartition(STOP)[2]  # in the token that completes the fence
        lead = "" if after.endswith("\n") else "\n"
        return _ids(self.tokenizer, f"{lead}{answer.replace('```', chr(39) * 3)}\n```\n")

    def instructions(self, functions: Sequence[Function]) -> str:
        """What a prompt has to say of the tools."""
        lines = [
            "You can use tools. Write a block as below, up to ```output; the output follows, then your turn again."
        ]
        for function in functions:
            described, names = get_json_schema(function)["function"], self.arguments[function.__name__]
            what = names[0] if len(names) == 1 else json.dumps(dict.fromkeys(names, "..."))
            lines += ["", str(described["description"]), f"```{function.__name__}", what, "```", STOP]
        return "\n".join(lines)


class Template:
    """As the model's chat template writes calls and answers.

    Args:
        options: variables of the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        functions: Sequence[Function],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.reading = tokenizer, _reading(tokenizer)
        self.functions, self.options = list(functions), dict(options or {})
        end = ChatTemplate(tokenizer, "the policy", self.options).end_of_turn()
        self.end = tokenizer.eos_token_id if end is None else tokenizer.convert_tokens_to_ids(end)

    def calls(self, before: Sequence[int], ids: Sequence[int]) -> list[Call]:
        """Those of a turn that the model has ended."""
        if not ids or ids[-1] != self.end:
            return []
        parsed = parse_response(self.reading, list(ids), prefix=list(before), tools=self.functions)
        return [_call_of(call.get("function", call)) for call in parsed.get("tool_calls") or ()]

    def answer_ids(self, ids: Sequence[int], calls: Sequence[Call], answers: Sequence[str]) -> list[int]:
        """The messages of the tools, and the beginning of the assistant's next one."""
        told = [
            {"role": "tool", "name": call.name, "content": answer} for call, answer in zip(calls, answers, strict=True)
        ]
        asked = {"type": "function", "function": {"name": calls[0].name, "arguments": {}}}
        said: list[dict[str, Any]] = [{"role": "user", "content": "dummy"}]
        said.append({"role": "assistant", "content": "", "tool_calls": [asked]})
        before, whole = self._rendered(said), self._rendered([*said, *told], add_generation_prompt=True)
        if self.end in before:  # what a template writes after the end of a turn comes with the answer
            before = before[: len(before) - before[::-1].index(self.end)]
        if whole[: len(before)] != before:
            raise ValueError("the chat template writes a call in another way when its answer follows")
        return whole[len(before) :]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **how: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **how, **self.options)
        return _ids(self.tokenizer, str(text))


def arguments_of(function: Function) -> list[str]:
    """The names of a tool's arguments."""
    return list(get_json_schema(function)["function"]["parameters"]["properties"])


def _call_of(said: Mapping[str, Any]) -> Call:
    name, given = str(said.get("name")), said.get("arguments")
    if isinstance(given, str):
        return Call(name, *_json_object(given, "a JSON object with the arguments"))
    return Call(name, given if isinstance(given, Mapping) else {})


def _json_object(text: str, what: str) -> tuple[dict[str, Any] | None, str]:
    """The object that a text is, or what it should have been."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        read = None
    return (read, "") if isinstance(read, dict) else (None, f"not {what}")
