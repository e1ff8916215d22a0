"""The rules of comparison by name: what a worker runs. Each is imported when it is first asked for."""

from __future__ import annotations


def compare(rule: str, answer: str, truth: str) -> tuple[bool, str]:
    """Whether `answer` is `truth` under the rule, and why: `strict`, `compatible`, or `lenient` (with math-verify).

    `strict:0.01` is strict with a relative tolerance.

    The rule `readable` asks whether the strict one can read `truth`, whatever the answer is.

    Raises:
        ValueError: no such rule.
    """
    name, _, tolerance = rule.partition(":")
    if name == "strict":
        from trl_ext.rewards.strict import compare as compare_strictly

        comparison = compare_strictly(answer, truth, float(tolerance or 0))
        return comparison.right, comparison.reason
    if rule in ("compatible", "lenient"):
        from trl_ext.rewards.compatible import is_equal

        right = is_equal(answer, truth, fast=rule == "compatible")
        return right, "equal" if right else "not equal"
    if rule == "readable":
        from trl_ext.rewards.strict import can_read

        return can_read(truth), "as strict reads it"
    raise ValueError(f"unknown rule {rule!r}")
