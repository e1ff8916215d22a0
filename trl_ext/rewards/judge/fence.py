"""A fence around a text that somebody else wrote, so that it can be graded and not obeyed.

The text stands between two lines with an identifier that it cannot know, and what would end the fence or begin another
turn of the conversation is made harmless in it: a chat template is filled in before it is tokenized, so that
`<|im_end|>` in a message would be the end of the message.
"""

from __future__ import annotations

import re
import unicodedata

_LESS, _BAR = "<\N{FULLWIDTH LESS-THAN SIGN}\N{SMALL LESS-THAN SIGN}", "|\N{FULLWIDTH VERTICAL LINE}"
_MORE = ">\N{FULLWIDTH GREATER-THAN SIGN}\N{SMALL GREATER-THAN SIGN}"
# Nothing that a tokenizer knows as one token is left where a space follows the sign that opens it.
_TAG = re.compile(rf"([{_LESS}])(?=[A-Za-z/!{_BAR}{_LESS}])")
_TAG_END = re.compile(rf"([{_BAR}])(?=[{_MORE}])")
_BRACKET = re.compile(r"\[(?=/?[A-Z_]{2,}\])")  # [INST], [/INST], [SYSTEM_PROMPT]
_OWN = re.compile(r"^(?=[^\S\n]*(?:BEGIN|END)\b)", re.MULTILINE)
_ROLES = "system user human assistant instructions? developer judge grader response input output model ai bot tool"
_ROLE = re.compile(
    rf"^(?=[^\S\n]*[#*]{{0,6}}[^\S\n]*(?:{_ROLES.replace(' ', '|')})\b[^\S\n]*\**:)", re.MULTILINE | re.IGNORECASE
)


def neutralized(text: str) -> str:
    """The text without invisible characters, chat tokens, lines of our fence, and lines that begin a turn.

    What is left reads the same to a person: `</think> <answer> 4 < 5` is `< /think> < answer> 4 < 5`.
    """
    visible = "".join(
        c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    )
    spaced = _BRACKET.sub("[ ", _TAG_END.sub(r"\1 ", _TAG.sub(r"\1 ", visible)))
    return _ROLE.sub("| ", _OWN.sub("| ", spaced))


def fenced(name: str, text: str, identifier: str) -> str:
    """The text between two lines that say what it is."""
    inside = neutralized(text).replace(identifier, "")
    return f"BEGIN {name} {identifier}\n{inside}\nEND {name} {identifier}"
