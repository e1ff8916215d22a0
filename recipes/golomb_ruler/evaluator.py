"""Is the list of marks that a program constructs a Golomb ruler?

python recipes/golomb_ruler/evaluator.py my_program.py

The program leaves a global `marks`, a list of distinct integers whose differences are all different.
"""

from __future__ import annotations

import sys

from problem import verify

from trl_ext.tools.discovery.evaluator import evaluate, evaluator_parser

if __name__ == "__main__":
    sys.exit(evaluate(evaluator_parser(__doc__).parse_args(), verify))
