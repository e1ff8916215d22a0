"""What dividing by the response's own length does to the gradient: the handout's two responses, of 4 and of 7 tokens.

python scripts/length_normalization.py                 print the page
python scripts/length_normalization.py --page docs/results/length_normalization.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from trl_ext import AGGREGATIONS
from trl_ext.algorithms.types import StepTotals
from trl_ext.functional import masked_mean, masked_normalize

LENGTHS, ADVANTAGE = (4, 7), 2.0
LONGEST = max(LENGTHS)


def responses() -> tuple[Tensor, Tensor]:
    """(2, 7) ratios of 1 that take a gradient, and the mask of the responses' tokens."""
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    return torch.ones(len(LENGTHS), LONGEST, dtype=torch.float64, requires_grad=True), mask


def gradients(aggregate: str) -> tuple[float, Tensor]:
    """The objective's value by an aggregation of the trainer, and its gradient at every token."""
    ratio, mask = responses()
    options = {"normalize_constant": float(LONGEST)} if aggregate == "constant" else {}
    totals = StepTotals(len(LENGTHS), float(mask.sum()), LONGEST)
    value = AGGREGATIONS.build(aggregate, **options)(ratio * ADVANTAGE, mask, totals)
    value.backward()
    assert ratio.grad is not None
    return value.item(), ratio.grad


def handout() -> tuple[Tensor, Tensor]:
    """The handout's two functions on both responses, (2,) each."""
    ratio, mask = responses()
    return masked_mean(ratio * ADVANTAGE, mask, dim=1), masked_normalize(ratio * ADVANTAGE, mask, float(LONGEST), dim=1)


AGGREGATION_OF = {"masked_mean": "sequence_mean", "masked_normalize": "constant", "token_mean": "token_mean"}


def row(name: str, values: Tensor) -> str:
    """A Markdown row of a response's gradient, token by token."""
    return f"| {name} | {' | '.join(f'{value:.4f}' for value in values.tolist())} |"


def page() -> str:
    """The worked example, in Markdown."""
    mean, normalized = handout()
    lines = [
        "# Dividing by the response's own length, or by a constant",
        "",
        f"Two responses to one prompt, of {LENGTHS[0]} and {LENGTHS[1]} tokens, both with advantage {ADVANTAGE:g}; the "
        "ratio is 1 at every token, as it is on-policy. The course handout asks what each normalizer does to them.",
        "",
        "| | 4 tokens | 7 tokens |",
        "|---|---|---|",
        f"| `masked_mean` | {mean[0]:.4f} | {mean[1]:.4f} |",
        f"| `masked_normalize`, constant {LONGEST} | {normalized[0]:.4f} | {normalized[1]:.4f} |",
        "",
        "The gradient of their mean over both responses, token by token, by the aggregations that the trainer uses:",
        "",
        f"| aggregation, response | {' | '.join(f'token {i}' for i in range(1, LONGEST + 1))} |",
        "|---" * (LONGEST + 1) + "|",
    ]
    for handouts, ours in AGGREGATION_OF.items():
        _, gradient = gradients(ours)
        lines += [row(f"`{handouts}`, {length} tokens", gradient[i]) for i, length in enumerate(LENGTHS)]
    _, own = gradients("sequence_mean")
    lines += [
        "",
        f"With `masked_mean` a token of the short response counts {own[0, 0] / own[1, 0]:.2f} times as much as "
        "one of the long response, since each response has the same weight in all. So among correct responses short "
        "ones are reinforced more per token, and among incorrect ones long ones are penalized less per token: an "
        "incorrect response has no reason to end. With a constant, and with the mean over all tokens of the step, "
        "every token counts the same, whichever response it is in; the constant also keeps the step's size from "
        "depending on how long the other responses are. Dr. GRPO (arXiv:2503.20783) calls the first a bias and "
        "takes the constant.",
        "",
        "What it does to training on mini-MATH: the question `length_normalization` in [lab.md](lab.md).",
        "",
        "Made by `python scripts/length_normalization.py --page docs/results/length_normalization.md`; "
        "`tests/test_scripts.py` holds the numbers.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write it there")
    args = parser.parse_args()
    if args.page is None:
        print(page(), end="")
    else:
        args.page.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
