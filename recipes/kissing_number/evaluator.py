"""Is the set that a program constructs a kissing configuration, exactly?

    python recipes/kissing_number/evaluator.py recipes/kissing_number/program.py
    python recipes/kissing_number/evaluator.py --json --seconds 10 my_program.py

The program runs in a sandbox and leaves a global `points`, a list of points of integers. They are valid if none is
zero, no two are equal, and the smallest distance of two is at least the largest length, in exact integer arithmetic.
The line `sandbox` says what kept the program in on this system.
"""

from __future__ import annotations

import sys

from problem import verify

from trl_ext.tools.discovery.evaluator import evaluate, evaluator_parser

if __name__ == "__main__":
    sys.exit(evaluate(evaluator_parser(__doc__).parse_args(), verify))
