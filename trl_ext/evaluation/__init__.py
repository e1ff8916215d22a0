"""Graded completions to accuracies with intervals, pass@n and comparisons."""
