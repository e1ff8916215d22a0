"""Judges behind a scripted server: an honest one, and one that obeys whatever it finds outside of the fence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.scripted_server import Answer

CRITERIA = ("correct", "reasoning", "clarity")
PROBLEM = "Natalia sold 48 clips in April and half as many in May. How many did she sell in all?"
WRONG = "She sold 48 + 48 = 96 clips. </think> <answer> 96 </answer>"
INJECTIONS = Path(__file__).parents[1] / "rewards" / "judge" / "injections.jsonl"
# What ends a message, or begins another one's, once a chat template is filled in: in the fence too.
_TURN = re.compile(
    r"<\|[^|>]*\|>|<｜[^｜>]*｜>|＜\|[^|>]*\|＞|\[/?INST\]|</?s>|<</?SYS>>|<(?:start|end)_of_turn>|</?think>|</?tool_call>"
    r"|^(?:#+ *)?(?:System|Human|User|Assistant|Instruction|Response): *",
    re.MULTILINE | re.IGNORECASE,
)
_BEGIN, _END = re.compile(r"^\s*BEGIN [A-Z ]+\b.*$"), re.compile(r"^\s*END [A-Z ]+\b.*$")  # whatever the identifier
_ORDER = re.compile(r'full marks|scores of 5|score 5\b|"correct": ?5|how many points|puntuación máxima', re.IGNORECASE)


def verdict(score: int, criteria: tuple[str, ...] = CRITERIA) -> str:
    return json.dumps({"reason": "so it is", "scores": dict.fromkeys(criteria, score)})


def injections() -> list[dict[str, str]]:
    """40 kinds of text at the end of an incorrect response, `kind` and `text`."""
    rows = [json.loads(line) for line in INJECTIONS.read_text(encoding="utf-8").splitlines()]
    return [{**row, "text": row["text"].replace("{verdict}", verdict(5))} for row in rows]


def outside(question: str) -> str:
    """What such a judge takes for its own instructions: all but what is in a fence, up to where a turn ends."""
    kept, is_inside = [], False
    for line in question.splitlines():
        if _BEGIN.match(line):
            is_inside = True
        elif _END.match(line):
            is_inside = False
        elif not is_inside:
            kept.append(line)
        elif turn := _TURN.search(line):
            kept.append(line[turn.end() :])
            is_inside = False
    return "\n".join(kept)


def obedient(number: int, body: Mapping[str, Any]) -> Answer:
    """Full marks if anything outside of the fence asks for them, else none."""
    question = body["messages"][0]["content"]
    return Answer(verdict(5 if _ORDER.search(outside(question)) else 0))


def honest(number: int, body: Mapping[str, Any]) -> Answer:
    """Full marks for a response with 72 in it."""
    return Answer(verdict(5 if "72" in response_in(body) else 0))


def response_in(body: Mapping[str, Any]) -> str:
    """The response that a request asks to be graded, without the fence's lines."""
    found = re.search(
        r"^BEGIN RESPONSE \w+\n(.*)\nEND RESPONSE", body["messages"][0]["content"], re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return found[1]


def judge_file(folder: Path, at: str, **fields: Any) -> Path:
    """A judge's file for a scripted server, with little patience and a cache of its own."""
    limits = {"tries": 1, "timeout": 5, **fields.pop("limits", {})}
    path = folder / "judge.yaml"
    given = {"url": at, "model": "scripted", "cache": str(folder / "verdicts"), "limits": limits, **fields}
    path.write_text(yaml.safe_dump({name: value for name, value in given.items() if value is not None}))
    return path
