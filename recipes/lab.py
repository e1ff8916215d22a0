"""One question, one small grid of runs, one page with a table and plots. The questions are YAML files in recipes/lab.

    python recipes/lab.py --list
    python recipes/lab.py learning_rate
    python recipes/lab.py baseline length_normalization --jobs 2
    python recipes/lab.py all --lab effects --jobs 2
    python recipes/lab.py all --lab qwen2.5_math_1.5b --jobs 2
    python recipes/lab.py baseline --lab my_lab --seeds 0 1 --sampling_temperature 0.8
    python recipes/lab.py try recipes/my_loss.py:soft_clip --against grpo_clip

What this program does not know goes to the recipe, in every cell. All cells are checked before the first one runs. A
question may start from the best cells of others (`after`), which are then asked before it, or were before. A run that
several questions need is run once, and a page is written as soon as its runs have ended. Interrupted, it resumes when
it is started again; what has ended is not run again, what failed is. With --jobs each run has one of the GPUs, or its
share of the cores. `try` is a verdict for an idea of your own, with as many seeds as it takes: `python recipes/lab.py
try --help`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trl_ext.errors import InputError
from trl_ext.runs.layout import METRICS, RunFolder, finished
from trl_ext.tools.experiments.ending import ending_in_a_line
from trl_ext.tools.experiments.lab.answer import best_cell, read_winner, table, write_report
from trl_ext.tools.experiments.lab.preregistration import effect_of, sentence
from trl_ext.tools.experiments.lab.questions import (
    Question,
    cells_of,
    check,
    in_order,
    question_names,
    read_lab,
    read_question,
)
from trl_ext.tools.experiments.runspec import RunSpec, Settings
from trl_ext.tools.experiments.sweep import run_all
from trl_ext.tools.experiments.verdict import command as verdict

HERE = Path(os.path.relpath(Path(__file__).parent))  # so that pages name no folder of this machine


def main() -> None:
    """Read, check, run what is missing, write each question's page."""
    if sys.argv[1:2] == ["try"]:
        verdict.main(sys.argv[2:], HERE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="names of questions, or all")
    parser.add_argument("--lab", default="mini_math", help="a folder of recipes/lab, or a path (default: mini_math)")
    parser.add_argument("--list", action="store_true", help="show the questions and their cells, and stop")
    parser.add_argument("--seeds", nargs="+", type=int, help="(default: the question's, or 0 1 2)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--output_dir", type=Path, help="(default: runs/lab_ and the lab's name)")
    args, rest = parser.parse_known_args()
    with ending_in_a_line():
        folder = next((place for place in (HERE / "lab" / args.lab, Path(args.lab)) if place.is_dir()), None)
        if folder is None:
            known = sorted(path.name for path in (HERE / "lab").iterdir())
            raise InputError(f"--lab {args.lab!r}: no such folder. Known: {', '.join(known)}")
        if args.list:
            show(folder)
        elif not args.questions:
            parser.error(f"which question? Known: {', '.join(question_names(folder))}, all")
        elif args.jobs < 1:
            parser.error(f"--jobs must be at least 1, got {args.jobs}")
        else:
            answer(folder, args, rest)


def show(folder: Path) -> None:
    """The questions of a lab with their cells."""
    for name in question_names(folder):
        question = read_question(folder, name)
        print(f"{name}: {question.question}")
        for cell, settings in question.cells.items():
            own = {**question.settings, **settings}
            print(f"    {cell}: {', '.join(f'{key}={value}' for key, value in own.items()) or 'as in lab.yaml'}")


def answer(folder: Path, args: argparse.Namespace, rest: list[str]) -> None:
    """Run the cells and write the pages, a question after those whose winners it starts from."""
    lab = read_lab(folder)
    known = question_names(folder)
    names = known if args.questions == ["all"] else args.questions
    questions = in_order(read_question(folder, name) for name in names)
    output = args.output_dir or Path("runs") / f"lab_{folder.name}"
    before = {name for question in questions for name in question.after} - set(names)
    winners: dict[str, Settings] = {name: read_winner(output, name) for name in before}
    expected, planned = dict(winners), []  # what is not known yet is checked with the reference cells
    for question in questions:
        cells = cells_of(lab, folder, question, expected, rest)
        expected[question.name] = cells[question.reference].settings
        planned.append((question, cells))
    check(planned)
    while questions:
        ready = [question for question in questions if winners.keys() >= set(question.after)]
        planned = [(question, cells_of(lab, folder, question, winners, rest)) for question in ready]
        if any(question.after for question in ready):
            check(planned)
        winners |= _run(planned, output, args)
        questions = [question for question in questions if question not in ready]


def _run(
    planned: list[tuple[Question, dict[str, RunSpec]]], output: Path, args: argparse.Namespace
) -> dict[str, Settings]:
    """Run what is missing of some questions, each page written as its runs have ended; the best cells' settings."""
    commands = {
        cell.run_name(seed): cell.command(HERE, seed)
        for question, cells in planned
        for cell in cells.values()
        for seed in args.seeds or question.seeds
    }
    winners: dict[str, Settings] = {}
    waiting = list(planned)

    def write_pages(summaries: Mapping[str, dict[str, Any]]) -> None:
        """Of the questions all of whose runs have ended by now."""
        for question, cells in list(waiting):
            seeds = args.seeds or question.seeds
            if all(cell.run_name(seed) in summaries for cell in cells.values() for seed in seeds):
                waiting.remove((question, cells))
                winners[question.name] = _page(question, cells, seeds, summaries, output)

    run_all(commands, output / "runs", args.jobs, keep_going=True, on_end=write_pages)
    return winners


def _page(
    question: Question,
    cells: Mapping[str, RunSpec],
    seeds: Sequence[int],
    summaries: Mapping[str, dict[str, Any]],
    output: Path,
) -> Settings:
    """Write a question's page and print its table; returns the settings of its best cell."""
    named = {label: {seed: cell.run_name(seed) for seed in seeds} for label, cell in cells.items()}
    runs = {label: {seed: summaries[name] for seed, name in of.items()} for label, of in named.items()}
    logs = {label: {seed: log_of(output / "runs" / name) for seed, name in of.items()} for label, of in named.items()}
    commands = {label: cell.command(HERE, seeds[0]) for label, cell in cells.items()}
    best = best_cell(runs, question.reference)
    winner = (best, cells[best].settings)
    page = write_report(output / question.name, question, runs, commands, logs, winner)
    verdict = (
        [] if (hypothesis := question.hypothesis) is None else [sentence(hypothesis, effect_of(hypothesis, runs)), ""]
    )
    tqdm.write("\n".join(["", question.question, "", *verdict, *table(runs, question.reference), "", str(page)]))
    return cells[best].settings


def log_of(run: Path) -> Path:
    """Where a run has its metrics, whether it has ended or not."""
    return (finished(run) or RunFolder(run)).path / METRICS


if __name__ == "__main__":
    main()
