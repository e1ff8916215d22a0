"""The command line of the rollout browser."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from trl_ext.browse.page import write_page
from trl_ext.browse.rows import Row, Source, read_rows, sources_in
from trl_ext.browse.second_opinion import grade_twice

PAGE = "rollouts.html"
_AT_A_TIME = 1024  # rows that the graders see at once

_ABOUT = """Write the rollouts of runs as one HTML file, to be opened in any browser without a network.

Reads generations.jsonl of a training run, samples.jsonl of an evaluation, and the rollouts of expert iteration. The
page shows rollouts by step and problem, tokens in color, a group side by side, and two steps of one problem; it filters
and searches. Tokens have values of their own in what GRPO with a preset or an axis has logged."""


def graded_rows(sources: Sequence[Source], grade: bool) -> Iterator[Row]:
    """All rows of the sources in their order, with both graders' verdicts if asked for."""
    for source in sources:
        rows = read_rows(source)
        while part := list(islice(rows, _AT_A_TIME)):
            if grade:
                grade_twice(part, source.answer_format)
            yield from part


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trl_ext.browse", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs or evaluations, or .jsonl files")
    parser.add_argument("--output", type=Path, help=f"the page; {PAGE} in the first folder if not given")
    parser.add_argument("--no_grading", action="store_true", help="do not grade every response with both graders")
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        print(browse(args.runs, args.output, not args.no_grading))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"written in {time.perf_counter() - began:.1f} s", file=sys.stderr)


def browse(runs: Sequence[Path], output: Path | None = None, grade: bool = True) -> str:
    """Write the page; a line that says where, and what is in it.

    Raises:
        FileNotFoundError: a place without rollouts.
        ValueError: a file's row is no rollout.
    """
    sources = sources_with_distinct_names(runs)
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    path = output or first / PAGE
    index = write_page(
        path, ", ".join(distinct_names([place.resolve() for place in runs])), graded_rows(sources, grade)
    )
    megabytes = path.stat().st_size / 1e6
    return f"{path}: {len(index.step)} rollouts of {len(index.problems)} problems, {megabytes:.1f} MB"


def sources_with_distinct_names(runs: Sequence[Path]) -> list[Source]:
    """All places' sources; of several, by the shortest ends of their paths that differ. A place given twice is one."""
    places = {place.resolve(): place for place in reversed(runs)}
    ordered = [places[path] for path in dict.fromkeys(place.resolve() for place in runs)]
    if len(ordered) == 1:
        return sources_in(ordered[0])
    names = distinct_names([place.resolve() for place in ordered])
    return [
        replace(source, name=name if place.is_file() else f"{name}: {source.name}")
        for place, name in zip(ordered, names, strict=True)
        for source in sources_in(place)
    ]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Each path's last part, a file's last two, with as many parents as it takes to differ from every other path's."""

    def ends(path: Path, depth: int) -> str:
        return "/".join(path.parts[1:][-depth - path.is_file() :])

    depths = dict.fromkeys(paths, 1)
    while True:
        names = Counter(ends(path, depth) for path, depth in depths.items())
        alike = [p for p, depth in depths.items() if names[ends(p, depth)] > 1 and depth < len(p.parts)]
        if not alike:
            return [ends(path, depths[path]) for path in paths]
        depths.update({path: depths[path] + 1 for path in alike})
