"""The table of settings -> recipes/trl_settings.md.

python scripts/settings_page.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from trl_ext.training.settings_table import (
    BEST_OF_N,
    EVALUATION,
    EXPERT_ITERATION,
    MODEL,
    OURS,
    SFT,
    SFT_OURS,
    SFT_TASK,
    TASK,
    TRAINER,
    TRL,
)
from trl_ext.training.trl_settings import HONORED, NO_EFFECT, Entry

PAGE = Path(__file__).parents[1] / "recipes" / "trl_settings.md"
INTRODUCTION = """\
# Every setting, and what becomes of it

A preset or an axis (`--preset`, `--advantage`, `--policy_loss`, `--aggregation`, or the handout's short forms of these)
replaces TRL's advantages and loss. What becomes of every setting then:

- **honored**: it does what TRL's documentation says;
- **taken over**: it is translated into an option of an axis, with the same weights as TRL trains to;
- **refused**: an error in one line, before a model loads, names the setting and what to use instead;
- **no effect**: it is accepted, and changes nothing in TRL's GRPO either.

Without a preset and without an axis every setting is TRL's and training is bit-identical to TRL's, with one exception:
on a CPU, `bf16` that is not set is off (TRL: on with `use_cpu`), which the run says when it starts. `--bf16 true` gives
TRL's numbers. A setting that needs another one is refused without it.

Shown by *a run*: `tests/training/test_settings_table.py` trains with the setting and without it, and compares weights,
metrics and files. Written by `python scripts/settings_page.py` from `trl_ext/training/settings_table.py`.
"""
HEADLINES = {
    "`TrainingArguments` of transformers": TRAINER,
    "`GRPOConfig` of TRL": TRL,
    "`ModelConfig` of TRL, in every recipe": MODEL,
    "`ExtGRPOConfig`, ours": OURS,
    "`GRPOTask`, the recipe's": TASK,
    "`SFTConfig` of TRL, in fine-tuning and expert iteration": SFT,
    "`ExtSFTConfig`, ours; the rest is as in `ExtGRPOConfig`": SFT_OURS,
    "`SFTTask`, the recipe's; the rest is as in `GRPOTask`": SFT_TASK,
    "`ExpertIterationConfig`, ours": EXPERT_ITERATION,
    "`Evaluation`; problems are as in `GRPOTask`": EVALUATION,
    "`BestOfN`": BEST_OF_N,
}


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


def page() -> str:
    """The Markdown of the page."""
    return "\n".join([INTRODUCTION, *(f"## {headline}\n\n{table(part)}" for headline, part in HEADLINES.items())])


def table(part: Mapping[str, Entry]) -> str:
    """One row per setting, in the order of the alphabet."""
    lines = [
        f"| `{name}` | {entry.verdict} | {_remark(entry)} | {_shown(entry)} |" for name, entry in sorted(part.items())
    ]
    return "\n".join(["| setting | | remark | shown by |", "|---|---|---|---|", *lines, ""])


def _remark(entry: Entry) -> str:
    needs = [f"`{need}`" if need != "uses_axes" else "a preset or an axis" for need in entry.needs]
    return "; ".join([*([f"needs {' and '.join(needs)}"] if needs else []), *filter(None, [entry.note])])


def _shown(entry: Entry) -> str:
    if "::" in entry.shown:
        return f"`{entry.shown}`"
    if entry.shown:
        return f"not on a CPU in milliseconds: {entry.shown}" if entry.shown.startswith("needs") else entry.shown
    return "a run" if entry.verdict in (HONORED, NO_EFFECT) else f"`training/test_settings_table`, {entry.verdict}"


if __name__ == "__main__":
    main()
