"""What more samples per problem buy: pass@n, Best@n by the model's own likelihood, and majority@n, with a plot.

    python recipes/best_of_n.py
    python recipes/best_of_n.py --model_name_or_path runs/grpo_math --output_dir runs/best_of_n_after
    python recipes/best_of_n.py --config recipes/evaluate_math.yaml --problems 500 --output_dir runs/math_at_16
    python recipes/best_of_n.py --model_name_or_path Qwen/Qwen3-0.6B --benchmark aime24,amc23

One set of samples serves every n. Interrupted, it resumes where it stopped when it is started again.
"""

from __future__ import annotations

from trl_ext.recipes.settings_help import answer_help

if __name__ == "__main__":
    answer_help(__file__)  # before the imports below, which take seconds

import sys
from pathlib import Path

from trl_ext.recipes.benchmarks import default_config, run_best_of_ns
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.cli import start

if __name__ == "__main__":
    start(run_best_of_ns, (BestOfN,), __doc__, default_config=default_config(Path(__file__), sys.argv))
