"""Measurements of speed, memory and accuracy: `python -m scripts.benchmarks.NAME --help`, in the repository's root.

The results are in docs/results. `scripts/bench_grader.py` and `scripts/bench_step.py` are the two that are also files.
"""
