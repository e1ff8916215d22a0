"""How often `python recipes/lab.py try` finds a difference where there is none, and how often one that is there.

    python -m scripts.benchmarks.false_alarms
    python -m scripts.benchmarks.false_alarms --draws 100000 --json docs/results/verdict_false_alarms.json

Differences between two arms of the same distribution are drawn for every task and verdict, and looked at as the command
does. "Naive" is the usual 95 % interval after every seed from the third on, stopped at the first one without 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from trl_ext.evaluation.statistics import student_t_quantile
from trl_ext.io import markdown_table, write_json
from trl_ext.tools.experiments.verdict.sequential import Design, Draws, first_alarms, power, seeds_needed

Arms = Callable[[np.random.Generator, tuple[int, ...]], Draws]
PROBLEMS = 512
BUDGETS = (4, 6, 8, 12)  # seeds at most
INTERVALS = 4  # two tasks, two verdicts each
CORRELATION = 0.8  # of the four intervals' differences at the same seed
DEVIATIONS = (0.005, 0.01, 0.015, 0.02, 0.03)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Draws:
    """Of a standard deviation that does not matter."""
    return rng.normal(0.0, 0.015, shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> Draws:
    """Student's t with 3 degrees of freedom: now and then a seed is far off."""
    return 0.01 * rng.standard_t(3, shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> Draws:
    """Arms with a long tail downwards, whose difference has two."""
    return 0.01 * (rng.exponential(size=shape) - rng.exponential(size=shape))


def collapsing(rng: np.random.Generator, shape: tuple[int, ...]) -> Draws:
    """A fifth of all runs of either arm lose 0.4."""
    fall = 0.4 * ((rng.random(shape) < 0.2).astype(float) - (rng.random(shape) < 0.2))
    return rng.normal(0.0, 0.015, shape) + fall


def counted(rng: np.random.Generator, shape: tuple[int, ...]) -> Draws:
    """Equally good policies, graded on `PROBLEMS` problems each: steps of 1/512."""
    rate = np.clip(rng.normal(0.8, 0.03, shape), 0, 1)
    return (rng.binomial(PROBLEMS, rate, shape) - rng.binomial(PROBLEMS, rate, shape)) / PROBLEMS


def skewed_alone(rng: np.random.Generator, shape: tuple[int, ...]) -> Draws:
    """Mean 0 and a tail to one side, which no difference of exchangeable arms has: where the assumption is broken."""
    return 0.01 * (rng.exponential(size=shape) - 1)


CASES: dict[str, Arms] = {
    "normal": normal,
    "heavy tails (t, 3)": heavy_tailed,
    "arms with long tails": skewed,
    "a fifth of the runs collapse": collapsing,
    f"counted on {PROBLEMS} problems": counted,
    "one-sided tail (not exchangeable)": skewed_alone,
}


def correlated(arms: Arms, rng: np.random.Generator, draws: int, seeds: int) -> list[Draws]:
    """Differences for each interval; a share of the seeds has the same one in all of them, which correlates them."""
    same = arms(rng, (draws, seeds))
    shared = rng.random((draws, seeds)) < CORRELATION
    return [np.where(shared, same, arms(rng, (draws, seeds))) for _ in range(INTERVALS)]


def alarms(rows: list[Draws], design: Design) -> float:
    """How often any of the intervals excludes 0 at any look."""
    return float(np.any([first_alarms(row, design, 1 / PROBLEMS) != 0 for row in rows], axis=0).mean())


def naive_alarms(rows: list[Draws]) -> float:
    """The same without any correction, looking after every seed."""
    is_alarmed = np.zeros(len(rows[0]), dtype=bool)
    for row in rows:
        for n in range(3, row.shape[1] + 1):
            half = student_t_quantile(0.05, n - 1) * row[:, :n].std(axis=1, ddof=1) / np.sqrt(n)
            is_alarmed |= abs(row[:, :n].mean(axis=1)) > half
    return float(is_alarmed.mean())


def measure(draws: int) -> dict[str, Any]:
    """All rates, with the seed 0."""
    rates: dict[str, dict[str, float]] = {}
    for name, arms in CASES.items():
        rng, rates[name] = np.random.default_rng(0), {}
        for most in BUDGETS:
            rows = correlated(arms, rng, draws, most)
            rates[name][str(most)] = alarms(rows, Design(most, INTERVALS))
            rates[name][f"naive {most}"] = naive_alarms(rows)
    needed = {
        str(deviation): {str(intervals): seeds_needed(0.02, deviation, intervals) for intervals in (1, 2, 4)}
        for deviation in DEVIATIONS
    }
    powers = {str(d): {str(most): power(Design(most, INTERVALS), 0.02, d) for most in BUDGETS} for d in DEVIATIONS}
    return {"draws": draws, "alarms": rates, "seeds_needed_for_0.02": needed, "power_for_0.02": powers}


def tables(figures: dict[str, Any]) -> list[str]:
    """The rates as Markdown."""
    error = NormalDist().inv_cdf(0.975) * (0.05 * 0.95 / figures["draws"]) ** 0.5
    heads = ["differences", *(f"{most} seeds" for most in BUDGETS), f"naive, {BUDGETS[-1]} seeds"]
    keys = [*map(str, BUDGETS), f"naive {BUDGETS[-1]}"]
    lines = markdown_table(
        heads, [[name, *(f"{of[key]:.3f}" for key in keys)] for name, of in figures["alarms"].items()]
    )
    lines += ["", f"{figures['draws']} draws: 0.050 is measured to {error:.3f}.", ""]
    needed, powers = figures["seeds_needed_for_0.02"], figures["power_for_0.02"]
    heads = ["sd of differences", "1 interval", "2", "4", *(f"power, 4 intervals, {most} seeds" for most in BUDGETS)]
    rows = [
        [
            d,
            *(str(needed[d][n] or "more than 60") for n in needed[d]),
            *(f"{value:.2f}" for value in powers[d].values()),
        ]
        for d in needed
    ]
    return [*lines, *markdown_table(heads, rows)]


def main() -> None:
    """Draw, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20000, help="(default: 20000)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    figures = measure(args.draws)
    print(*tables(figures), sep="\n")
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
