"""What the parsers of answers share: tokens and a place in them. How deeply a text may nest is bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeVar

Read = TypeVar("Read")


def scan(token: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The matches of `token` one after another, or a ValueError at a text that does not match."""
    at, text = 0, text.strip()
    while at < len(text):
        match = token.match(text, at)
        if match is None:
            raise ValueError(f"at {text[at : at + 10]!r}")
        yield match
        at = match.end()


class Cursor:
    """The tokens of a text and how many of them are read. Parsers add a method per rule."""

    max_depth: ClassVar[int] = 60
    error: ClassVar[type[ValueError]] = ValueError  # raised for a text that is not in the grammar

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = self.depth = 0

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        """The next token, which must be one of those expected if any are; moves on."""
        token = self.token
        if expected and token not in expected:
            raise self.error(f"unexpected {token or 'end'!r}")
        self.at += 1
        return token

    def accept(self, *expected: str) -> str:
        """The next token if it is one of those expected, and moves on; else the empty text."""
        if self.at < len(self.tokens) and (token := self.tokens[self.at]) in expected:
            self.at += 1
            return token
        return ""

    def nested(self, rule: Callable[[], Read]) -> Read:
        """What a rule reads one level deeper."""
        self.depth += 1
        if self.depth > self.max_depth:
            raise self.error("nested too deeply")
        result = rule()
        self.depth -= 1
        return result

    def separated(self, sign: str, rule: Callable[[], Read]) -> list[Read]:
        """What a rule reads, once and after each `sign`."""
        items = [rule()]
        while self.accept(sign):
            items.append(rule())
        return items
