"""Unit words, which the textual normal form deletes where they stand alone.

An entry is deleted between two non-word characters (or the ends), which stay. A dot in an entry stands for any
character, as in the course's grader, where entries are regular expressions. Each entry is tried in the singular and
with an `s`, the whole list twice, and never if nothing would be left.
"""

from __future__ import annotations

import re
from functools import cache

# Entries that begin or end with the words of another entry depend on the order of the groups.
_BEFORE_INITIALS = """ab deg degree dm east ft gain gm kmph lb lt m·sqaure mile monkey mph o per prime profit·of·rs
    ratio rd sq·m tile way west"""
_INITIALS = "q·. p·.·m a·. b·. c·. d·. e·. f·. g·. h·."
_COMPOUNDS = "no·change π·r·2 °·f cu·cm v·â·€·™ ∏·cm·³ cu·.·m cm·2 rs·."
_WORDS = """a acre am apple are bc by c cc cm coin cube cubic d day decrease excess feet g gal gallon h hectare hour hr
    inch inches increase kg km kmh l less liter litre loss m man mark men meter metre min minute minw mm month more mp
    mt mtr noon number ohm percent pie pm profit pure rise rounds rs rupee s sec second soldier sq square st Surface t
    th toy unit woman women yard year yr"""
_AFTER_WORDS = "·m·east a·.·m sq·.·m sq·inch pi·sq·m s·."

ENTRIES = tuple(
    entry.replace("·", " ")
    for group in (_BEFORE_INITIALS, _INITIALS, _COMPOUNDS, _WORDS, _AFTER_WORDS)
    for entry in group.split()
)
_FORMS = ENTRIES + tuple(entry + "s" for entry in ENTRIES)
_WORD = re.compile(r"\w+")
# An entry can match only a text that has its words: one pass over the text finds the entries to try.
_WORDS_OF = tuple((form, frozenset(_WORD.findall(form))) for form in _FORMS)
_ALL_WORDS = frozenset().union(*(words for _, words in _WORDS_OF))


def remove_unit_words(text: str) -> str:
    """`text` without unit words that stand alone."""
    present = _ALL_WORDS.intersection(_WORD.findall(text))
    if not present:
        return text
    forms = [form for form, words in _WORDS_OF if words <= present]
    for _ in range(2):
        before = text
        for form in forms:
            text = _pattern(form).sub(r"\1\2", text) or text
        if text == before:
            break
    return text


@cache
def _pattern(form: str) -> re.Pattern[str]:
    return re.compile(rf"(^|\W){form}($|\W)")
