r"""Verdicts of `python recipes/lab.py try` -> one result page, with how often they are wrong.

    PYTHONPATH=. python scripts/verdict_page.py runs --findings docs/results/verdict_findings.yaml \
        --false_alarms docs/results/verdict_false_alarms.json --page docs/results/verdict.md

The findings are a YAML file: `intro`, in which {false_alarms} is replaced by the simulation's tables, and a text for
each verdict by its folder, in the order of the page. Plots and their figures are copied next to the page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from scripts.benchmarks.false_alarms import tables
from trl_ext.io import read_json
from trl_ext.tools.experiments.pages import write_page_of_findings
from trl_ext.tools.experiments.verdict.page import CURVES, PAGE


def section(text: str, finding: str, plots: str) -> str:
    """A verdict's page with what was found, a heading level lower, without the power that is stated once for all."""
    title, _, rest = text.partition("\n")
    rest = re.sub(r"^## Power.*?(?=^## )", "", rest, flags=re.MULTILINE | re.DOTALL)
    rest = rest.replace(f"({CURVES}.png)", f"({plots}.png)").strip()
    return re.sub(r"^#", "##", f"{title}\n\n**Found.** {finding.strip()}\n\n{rest}\n", flags=re.MULTILINE)


def main() -> None:
    """Write the page, its plots and their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the folder of the verdicts' folders")
    parser.add_argument("--findings", type=Path, required=True, help="a YAML file: folder -> text, and `intro`")
    parser.add_argument("--false_alarms", type=Path, required=True, help="of scripts.benchmarks.false_alarms --json")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    args = parser.parse_args()

    def verdict_section(name: str, finding: str) -> str:
        folder, plots = args.runs / name, f"{args.page.stem}_{name.removeprefix('try_')}"
        if not (folder / PAGE).is_file():
            sys.exit(f"error: {folder / PAGE}: no such file; run `python recipes/lab.py try` first")
        for suffix in (".png", ".csv"):
            shutil.copy(folder / f"{CURVES}{suffix}", args.page.with_name(plots + suffix))
        return section((folder / PAGE).read_text(encoding="utf-8"), finding, plots)

    rates = "\n".join(tables(read_json(args.false_alarms)))
    write_page_of_findings(args.page, args.findings, {"false_alarms": rates}, verdict_section)


if __name__ == "__main__":
    main()
