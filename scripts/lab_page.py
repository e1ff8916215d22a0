r"""The reports of a lab's questions -> one result page with their tables, plots and what was found.

    python scripts/lab_page.py runs/lab_mini_math --findings docs/results/lab_findings.yaml \
        --page docs/results/lab.md

The findings are a YAML file: `intro`, and a text for each question, in the order of the page. Plots are copied
next to the page. A question that has no report there keeps the section that the page has of it, with its commit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from PIL import Image

from trl_ext.experiments.lab.report import PARTS
from trl_ext.io import read_json


def section(parts: Path, finding: str, plot: str) -> str:
    """A question's part of the page: title, finding, table, noise, what is published, plots, commands folded away."""
    report = read_json(parts)
    shown = "\n".join([*report["results"], *(line.format(plots=f"{plot}_") for line in report["plots"])]).strip()
    how = "\n".join(report["how"]).rstrip()
    folded = f"<details><summary>commands, commit, hardware</summary>\n\n{how}\n\n</details>"
    return f"## {report['title']}\n\n**Found.** {finding.strip()}\n\n{shown}\n\n{folded}\n"


def kept_section(page: Path, question: str) -> str | None:
    """What the page has of a question now, from its headline to the next; None if it has nothing."""
    sections = page.read_text(encoding="utf-8").split("\n## ")[1:] if page.is_file() else []
    return next((f"## {text.rstrip()}\n" for text in sections if f"(lab_{question}_accuracy.png)" in text), None)


def main() -> None:
    """Write the page and its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab", type=Path, help="where recipes/lab.py has left its reports")
    parser.add_argument("--findings", type=Path, required=True, help="a YAML file: question -> text, and `intro`")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    args = parser.parse_args()
    findings = yaml.safe_load(args.findings.read_text(encoding="utf-8"))
    parts = [findings.pop("intro").strip() + "\n"]
    for question, finding in findings.items():
        report = args.lab / question / PARTS
        if not report.is_file():
            if (kept := kept_section(args.page, question)) is None:
                sys.exit(f"error: {report}: no such file; run `python recipes/lab.py {question}` first")
            print(f"{question}: no report there, so its section stays as it is")
            parts.append(kept)
            continue
        plot = f"lab_{question}"
        for name in ("accuracy", "training"):
            with Image.open(report.parent / f"{name}.png") as image:
                smaller = image.convert("RGB").reduce(2).quantize(64)  # dots and colors: an eighth of the bytes
            smaller.save(args.page.with_name(f"{plot}_{name}.png"), optimize=True)
        parts.append(section(report, finding, plot))
    args.page.write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote {args.page}")


if __name__ == "__main__":
    main()
