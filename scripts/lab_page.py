r"""The reports of a lab's questions -> one result page with their tables, plots and what was found.

    python scripts/lab_page.py runs/lab_mini_math --findings docs/results/lab_findings.yaml \
        --page docs/results/lab.md
    python scripts/lab_page.py runs/lab_effects --findings docs/results/effects_findings.yaml \
        --page docs/results/effects.md --plots effects --preregistered recipes/lab/effects

The findings are a YAML file: `intro`, and a text for each question, in the order of the page. Plots are copied
next to the page. A question that has no report there keeps the section that the page has of it, with its commit.
With `--preregistered`, {effects} in the intro becomes a table of that lab's hypotheses, run or not, with a plot; what
was found is kept in a JSON file next to the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from PIL import Image

from trl_ext.io import markdown_table, read_json, write_json
from trl_ext.plots import COLORS, figure
from trl_ext.tools.experiments.lab.answer import PARTS
from trl_ext.tools.experiments.lab.preregistration import HIGHER, Hypothesis
from trl_ext.tools.experiments.lab.questions import question_names, read_question
from trl_ext.tools.experiments.metrics import in_words
from trl_ext.tools.experiments.pages import write_page_of_findings

Effects = Mapping[str, Mapping[str, Any]]  # a question's `effect` in its report


def section(parts: Path, finding: str, plot: str) -> str:
    """A question's part of the page: title, finding, table, noise, what is published, plots, commands folded away."""
    report = read_json(parts)
    shown = "\n".join([*report["results"], *(line.format(plots=f"{plot}_") for line in report["plots"])]).strip()
    how = "\n".join(report["how"]).rstrip()
    folded = f"<details><summary>commands, commit, hardware</summary>\n\n{how}\n\n</details>"
    return f"## {report['title']}\n\n**Found.** {finding.strip()}\n\n{shown}\n\n{folded}\n"


def kept_section(page: Path, plot: str) -> str | None:
    """What the page has of a question now, from its headline to the next; None if it has nothing."""
    sections = page.read_text(encoding="utf-8").split("\n## ")[1:] if page.is_file() else []
    return next((f"## {text.rstrip()}\n" for text in sections if f"({plot}_accuracy.png)" in text), None)


def hypotheses_of(lab: Path) -> dict[str, Hypothesis]:
    """What a lab has preregistered, by question."""
    hypotheses = {name: read_question(lab, name).hypothesis for name in question_names(lab)}
    return {name: hypothesis for name, hypothesis in hypotheses.items() if hypothesis is not None}


def effects_table(hypotheses: Mapping[str, Hypothesis], effects: Effects) -> list[str]:
    """A row for each hypothesis, with what was found or that it was not run yet."""
    rows = []
    for name, hypothesis in hypotheses.items():
        effect = effects.get(name, {"shown": "–", "verdict": "not run yet", "minutes": "–"})
        published = f"{hypothesis.published.strip()} ({hypothesis.source})"
        asked = (name, hypothesis.hypothesis.strip(), published, hypothesis.expected)
        cells = (*asked, effect["shown"], effect["verdict"], effect["minutes"])
        rows.append([str(cell).replace("|", "/") for cell in cells])
    heads = ["question", "hypothesis", "published", "expected", "found (95 % interval)", "verdict", "core-minutes"]
    return markdown_table(heads, rows)


def write_effects_plot(path: Path, hypotheses: Mapping[str, Hypothesis], effects: Effects) -> None:
    """Each effect that has an interval, as a multiple of the interval's half-width, positive where as published."""
    known = [name for name in hypotheses if effects.get(name, {}).get("interval")]
    with figure(path, (8, 1.3 + 0.3 * len(known))) as (panel,):
        panel.axvline(0, color="0.4", linewidth=1)
        panel.set_xscale("symlog", linthresh=2)
        for place, name in enumerate(reversed(known)):
            hypothesis, (low, high) = hypotheses[name], effects[name]["interval"]
            sign = 1 if hypothesis.direction == HIGHER else -1
            at = sign * mean((low, high)) / max((high - low) / 2, 1e-9)
            panel.errorbar(at, place, xerr=1, fmt="o", capsize=3, color=COLORS[0 if at > 1 else 1])
            words = f"{in_words(hypothesis.metric).split(',')[0]} {mean((low, high)):+.3f}"
            panel.text(1.01, place, words, va="center", size=8, transform=panel.get_yaxis_transform())
        panel.set_yticks(range(len(known)), [name.replace("_", " ") for name in reversed(known)])
        ticks = [-2, -1, 0, 1, 2, 5, 10, 20]
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_xlabel("effect in half-widths of its 95 % interval, to the right as published")


def effects_of(args: argparse.Namespace) -> str:
    """The table and the plot, from the reports that are there and what the page knew before."""
    path, hypotheses = args.page.with_suffix(".json"), hypotheses_of(args.preregistered)
    effects = read_json(path) if path.is_file() else {}
    for name in hypotheses:
        if (report := args.lab / name / PARTS).is_file():
            effects[name] = read_json(report)["effect"]
    write_json(path, effects, indent=2)
    lines = effects_table(hypotheses, effects)
    if any(effect["interval"] for effect in effects.values()):
        write_effects_plot(args.page.with_suffix(".png"), hypotheses, effects)
        lines += ["", f"![effects with intervals]({args.page.with_suffix('.png').name})"]
    return "\n".join(lines)


def main() -> None:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab", type=Path, help="where recipes/lab.py has left its reports")
    parser.add_argument("--findings", type=Path, required=True, help="a YAML file: question -> text, and `intro`")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--plots", default="lab", help="what the plots' names begin with (default: lab)")
    parser.add_argument("--preregistered", type=Path, metavar="LAB", help="a folder of questions with hypotheses")
    args = parser.parse_args()

    def question_section(question: str, finding: str) -> str:
        report, plot = args.lab / question / PARTS, f"{args.plots}_{question}"
        if not report.is_file():
            if (kept := kept_section(args.page, plot)) is None:
                sys.exit(f"error: {report}: no such file; run `python recipes/lab.py {question}` first")
            print(f"{question}: no report there, so its section stays as it is")
            return kept
        for name in ("accuracy", "training"):
            with Image.open(report.parent / f"{name}.png") as image:
                smaller = image.convert("RGB").reduce(2).quantize(64)  # dots and colors: an eighth of the bytes
            smaller.save(args.page.with_name(f"{plot}_{name}.png"), optimize=True)
        return section(report, finding, plot)

    tables = {"effects": effects_of(args) if args.preregistered else ""}
    write_page_of_findings(args.page, args.findings, tables, question_section)


if __name__ == "__main__":
    main()
