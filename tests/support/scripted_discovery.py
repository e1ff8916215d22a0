"""The discovery loop with a server that plays a model: programs prepared by hand, to show a run whose score rises.

    python -m tests.support.scripted_discovery        writes recipes/kissing_number/scripted/

No model is involved, and the report says so. The recipe's README.md links it next to the run with a real model.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.scripted_server import Answer, block, serving
from tests.tools.discovery.test_kissing_evaluator import CORE_PROGRAM

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "kissing_number" / "scripted"
ROOTS = """
from itertools import combinations, product
points = []
for i, j in combinations(range(11), 2):
    for s, t in product((1, -1), repeat=2):
        points.append([s if k == i else t if k == j else 0 for k in range(11)])
"""
ANSWERS = [
    Answer("I would start from the roots of D11, which have squared norm 2 and are 220 in number."),
    block("import numpy as np\npoints = list(np.eye(11)) + list(-np.eye(11))"),
    block("import numpy as np\npoints = list(np.eye(11, dtype=int)) + list(-np.eye(11, dtype=int))"),
    block(ROOTS.replace("points = []", "points = [[2 if k == i else 0 for k in range(11)] for i in range(11)]")),
    block(ROOTS),
    Answer("```python\nwhile True:\n    pass", finish_reason="length"),
    block(CORE_PROGRAM.replace("(3, -3), repeat=4", "(3, -3), repeat=5")),
    block(CORE_PROGRAM),
    block(CORE_PROGRAM + "points += [[3, 3, 3, 0, 0, 0, 0, 0, 0, 3, 0], [0] * 8 + [4, 4, 2]]"),
    block(CORE_PROGRAM + "points += [[0] * 8 + [4, 4, 2]]"),
    block(CORE_PROGRAM + "points += [[0] * 8 + [4, 4, 2], [0] * 8 + [-4, -4, -2], [0] * 8 + [-4, 4, 2]]"),
]
NOTE = (
    "**No model took part in this run.** A server of the tests returned programs that were prepared by hand "
    "(tests/support/scripted_discovery.py), the core of 496 points from arXiv 2606.10402 among them, to show a run whose "
    "score rises."
)


def main() -> None:
    """Run the loop against the server that plays a model."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    with serving(ANSWERS) as server:
        script = ROOT / "recipes" / "kissing_number" / "discover.py"
        arguments = f"--base_url {server.url} --max_calls {len(ANSWERS)} --strategy_options turns=1".split()
        command = [sys.executable, str(script), "--output_dir", str(FOLDER), *arguments]
        subprocess.run([*command, "--note", NOTE], check=True)
    (FOLDER / "_in_use").unlink()


if __name__ == "__main__":
    main()
