"""An evaluation's samples -> a page with examples of each category and what lost the incorrect ones.

python recipes/evaluate.py
python scripts/samples_page.py runs/evaluate --page runs/evaluate/samples.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_ext.evaluation.samples_page import samples_page
from trl_ext.io import read_json, read_jsonl, write_text
from trl_ext.runs.provenance import platform_of


def main() -> None:
    """Read the samples, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of an evaluation, with samples.jsonl and summary.json")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--examples", type=int, default=3, help="of each category (default: 3)")
    parser.add_argument("--title", help="(default: Samples of and the model's name)")
    args = parser.parse_args()
    for name in ("samples.jsonl", "summary.json"):
        if not (args.run / name).is_file():
            parser.error(f"{args.run} has no {name}: has the evaluation ended?")
    summary = read_json(args.run / "summary.json")
    how = [
        f"Model: {summary['model']}. Made from `samples.jsonl` by `python scripts/samples_page.py`.",
        "",
        f"`{summary['command']}` at commit `{summary['commit']}`, on {platform_of(summary)}.",
    ]
    title = args.title or f"Samples of {summary['model']}"
    write_text(args.page, samples_page(title, read_jsonl(args.run / "samples.jsonl"), how, args.examples))
    print(f"wrote {args.page}")


if __name__ == "__main__":
    main()
