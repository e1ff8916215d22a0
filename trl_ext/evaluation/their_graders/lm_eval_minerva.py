"""lm-eval's `minerva_math`, which needs an older antlr than math-verify's newest (`pip install lm_eval[math]`)."""

from __future__ import annotations

from lm_eval.tasks.minerva_math import utils


def exact(response: str, reference: str) -> tuple[bool, str]:
    """`exact_match`: what follows "Final Answer: The final answer is", by sympy."""
    return _grade("exact_match", response, reference)


def verify(response: str, reference: str) -> tuple[bool, str]:
    """`math_verify`: whatever math-verify finds in the response."""
    return _grade("math_verify", response, reference)


def _grade(metric: str, response: str, reference: str) -> tuple[bool, str]:
    doc = {"solution": rf"\boxed{{{reference}}}", "answer": utils.normalize_final_answer(reference)}
    return bool(utils.process_results(doc, [response])[metric]), ""


exact("Final Answer: The final answer is $1$. I hope it is correct.", "1")  # what is imported at the first call
