"""The strict grader: how a text is read, and what is equal to what."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from trl_ext.rewards.strict import compare
from trl_ext.rewards.strict.answers import Based, Ordered, Quantity, Relation, Several, Text, Time, Union, Unreadable
from trl_ext.rewards.strict.clean import clean
from trl_ext.rewards.strict.grammar import MAX_DEPTH, parse
from trl_ext.rewards.strict.read import readings
from trl_ext.rewards.strict.units import read_unit
from trl_ext.rewards.strict.worked_out import NOT_EXPANDED, NOT_FACTORED, NOT_WORKED_OUT

DATA = Path(__file__).parents[1] / "data"
LABELS = [json.loads(line) for line in (DATA / "grader_labels.jsonl").read_text(encoding="utf-8").splitlines()]
FORMS = [json.loads(line) for line in (DATA / "grader_forms.jsonl").read_text(encoding="utf-8").splitlines()]
PARITY = [json.loads(line) for line in (DATA / "grader_parity.jsonl").read_text(encoding="utf-8").splitlines()]


# Text to text.


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  5  ", "5"), ("$5$", "5"), (r"\(5\)", "5"), (r"\[5\]", "5"), ("**5**", "5"), ("`5`", "5"), ("5.", "5"),
        (r"so it is $\boxed{5}$.", "5"), (r"\boxed{\boxed{5}}", "5"), ("−5", "-5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 1 , 2 \right)", "(1,2)"), (r"\left.x\right|", "x|"), (r"\left.3\right.", "3"), ("1{,}000", "1000"), (r"1\,000", "1000"),
        (r"1\,00", "1 00"), (r"\mathrm{cm}", r"\text{cm}"), (r"90^\circ", r"90\text{degrees}"), (r"5\%", "5%"),
        ("½", r"\frac{1}{2}"), ("x²³", "x^{23}"), ("2 million", r"2\cdot 10^{6}"), (r"a \\ b", r"a\\b"), ("{5}", "5"),
        ("{5}{6}", "{5}{6}"), (r"x\in A", r"x\in A"), ("a b", "a b"), ("=5", "5"), (r"(1,2)\.", "(1,2)"), ("5\n6", "5 6"), ("", ""), ("$$", ""),
    ],
)  # fmt: skip
def test_one_spelling(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned
    assert clean(cleaned) == cleaned


# Text to answers.


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1,2", Several), (r"\{1,2\}", Several), (r"\pm 2", Several), ("1 or 2", Several), ("(1,2)", Ordered),
        ("(1,2]", Ordered), (r"\begin{pmatrix}1\\2\end{pmatrix}", Ordered), ("3:2:1", Ordered), (r"(0,1)\cup(2,3)", Union),
        ("x=5", Relation), ("1<x<2", Relation), ("5 cm", Quantity), (r"\$5", Quantity), ("5%", Quantity), ("1A_{16}", Based),
        (r"\text{Evelyn}", Text), ("(C)", Text), ("10:30 pm", Time),
    ],
)  # fmt: skip
def test_what_a_text_is_read_as(text: str, kind: type) -> None:
    assert isinstance(readings(text)[0], kind)


def test_five_m_is_a_length_or_a_product_and_2t_is_no_tonne() -> None:
    assert [type(reading).__name__ for reading in readings("5 m")] == ["Quantity", "Apply"]
    assert [type(reading).__name__ for reading in readings("2t")] == ["Apply"]


@pytest.mark.parametrize(
    "text",
    ["", "5 6", "(1", "1)", r"\frac{1}", "5+", "*5", "^2", "|x", r"\foo", "x__2", "1.2.3", "{", r"\sqrt", "5#", "'"],
)
def test_text_that_is_not_an_answer_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        parse(text)


def test_nesting_and_length_are_bounded() -> None:
    parse("(" * (MAX_DEPTH // 3) + "1" + ")" * (MAX_DEPTH // 3))
    for text in ("(" * 2000, "1+" * 2000 + "1", "{" * 500 + "1" + "}" * 500, "x^" * 300 + "2", r"\sqrt" * 300 + "2"):
        with pytest.raises(Unreadable):
            parse(text)


@pytest.mark.parametrize(
    ("phrase", "same"),
    [
        ("cm", "centimeters"), ("square cm", "cm^2"), ("sq. ft", "square feet"), ("dollars", "USD"), ("minutes", "min"),
        ("apple", "apples"), ("boxes", "box"),
    ],
)  # fmt: skip
def test_units_have_spellings(phrase: str, same: str) -> None:
    assert read_unit(phrase) == read_unit(same) is not None


@pytest.mark.parametrize("phrase", ["or", "5", "x", "cm^4", "", "not km", "a b c d e f g"])
def test_phrases_that_are_not_units(phrase: str) -> None:
    assert read_unit(phrase) is None


# Answers to a verdict.


@pytest.mark.moderate
def test_every_hand_labeled_answer_has_its_verdict() -> None:
    assert not [row for row in LABELS if compare(row["answer"], row["truth"]).correct is not row["right"]]


@pytest.mark.moderate
def test_answers_in_other_forms_are_told_from_unfinished_ones() -> None:
    wrong = [row for row in FORMS if compare(row["answer"], row["truth"]).correct is not row["right"]]
    assert not wrong


@pytest.mark.moderate
def test_unfinished_answers_are_equal_by_value_alone() -> None:
    """A row without `equal` is right or wrong whatever is left to do in it."""
    for row in LABELS + FORMS:
        verdict = compare(row["answer"], row["truth"], worked_out=False)
        assert verdict.correct is row.get("equal", row["right"]), row
        if row.get("equal"):
            assert compare(row["answer"], row["truth"]).reason in (NOT_WORKED_OUT, NOT_EXPANDED, NOT_FACTORED), row


def test_the_labels_are_many_distinct_and_of_both_kinds() -> None:
    for rows in (LABELS, FORMS):
        assert len({(row["answer"], row["truth"]) for row in rows}) == len(rows)
        assert min(sum(row["right"] is right for row in rows) for right in (True, False)) >= 300


@pytest.mark.moderate
def test_reference_matches_its_respelling_and_no_label_crashes() -> None:
    references = [row["truth"] for row in LABELS]
    assert not [reference for reference in references if not compare(f" ${reference}$. ", reference).correct]
    for row in LABELS:
        compare(row["truth"], row["answer"])  # with the sides exchanged there is a verdict, whichever


@pytest.mark.parametrize(
    ("answer", "reference", "reason"),
    [
        ("5", "5", "same text"), ("$5.$", "5", "same text"), ("2/4", "1/2", "same value"), ("10/2", "5", "not worked out"), ("6", "5", "different value"),
        ("", "5", "no answer"), ("5#", "5", "cannot read the answer"), ("5", r"\int x", "cannot read the reference answer"),
        ("9^{9^{9^9}}", "5", "too large to compute, or undefined"), ("2004!", "2005!", "different value"),
        ("17+25", "42", "not worked out"), ("x(x+1)", "x^2+x", "not multiplied out"), ("x^2+x", "x(x+1)", "not factored"),
        ("9 or 8", "9", "more than one answer"), ("7 kg", "7 km", "another unit"), ("9" * 700, "9", "too long"),
    ],
)  # fmt: skip
def test_the_reason_is_given(answer: str, reference: str, reason: str) -> None:
    assert compare(answer, reference).reason == reason


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [
        ("0.333", "1/3", True), ("0.33", "1/3", True), ("0.3", "1/3", False), ("3.14", r"\pi", True), ("-0.333", "1/3", False),
        ("2.83 cm", r"2\sqrt2\text{ cm}", True), ("2.83 kg", r"2\sqrt2\text{ cm}", False), ("0.001", "0", False),
        ("x", "1.001x", False), ("0.333 or 5", "1/3", False),
    ],
)  # fmt: skip
def test_a_tolerance_is_relative_and_for_numbers_only(answer: str, reference: str, correct: bool) -> None:
    assert compare(answer, reference, tolerance=0.01).correct == correct
    assert not compare(answer, reference).correct


def test_an_unreadable_reference_accepts_its_own_text() -> None:
    assert compare(r"\int_0^1 x\,dx", r"\int_0^1 x \, dx").correct
    assert not compare(r"\int_0^1 x\,dx", r"\int_0^2 x\,dx").correct


HUGE = 100_000


@pytest.mark.parametrize(
    "answer",
    [
        "(" * HUGE, "x" * HUGE, "9" * HUGE, "1," * HUGE, r"\text{" * 20_000, r"\frac{" * 20_000, " " * HUGE, "$" * HUGE,
        "9" * 500 + "!", "9^{9^{9^{9}}}", "(9!)!!", r"\sqrt[999999999]{2}", "10^{10^{10}}", "1/" * 150 + "1", "-" * 500,
        r"\binom{999999999}{5}", "|" * 500, "x^" * 200 + "2", "\x00", "\ud800", "%" * 500, r"\boxed{" * 20_000, "e^" * 150 + "9",
        r"\sin" * 150 + "1", "1:" * 250, "a=" * 250, "\\" * HUGE, "{}" * 250, "(x+y)^{999}/(x-y)^{999}", r"\pm" * 150 + "1",
        "x+" * 199 + "1", "+".join(f"{9999 - n}!" for n in range(80)), "(1," * 200, "\\over" * 60, "{" * 20 + r"1\over" * 20, "€" * HUGE, "*" * HUGE,
        "0." + "12" * 19 + "\\ldots", r"\text{" + "." * 5000 + "}", r"\pmatrix{" * 60, "n" + " " * 500 + "integer", "(" + "," * 500 + "U",
        '"' * 5000, "AB=" * 100, "1 to " * 100, r"\sin" * 60 + "^\\circ", "1" + r",\!" * 150, "." * 5000, "7" * 200 + ".{" * 100, "0.(" * 150,
    ],
)  # fmt: skip
def test_whatever_a_model_writes_gets_a_verdict_at_once(answer: str) -> None:
    for reference in ("5", "x+1", r"\sqrt{2}", "(1,2)", r"\{1,2\}"):
        began = time.perf_counter()
        assert not compare(answer, reference).correct
        assert time.perf_counter() - began < 1.0, reference
