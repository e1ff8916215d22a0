"""The course grader's verdicts, from a description of its behavior and without evaluating anything.

That grader is `math_grader.py` of sail-sg/understand-r1-zero ("Understanding R1-Zero-Like Training",
arXiv:2503.20783), which parses answers with sympy, that is with Python's `eval`. `tests/data/grader_parity.jsonl` has
rows labeled by it.
"""

from trl_ext.rewards.compatible.compare import compare

__all__ = ["compare"]
