"""Time of TRL's LM head on a CPU, forward and backward, by the width of its tiles and how they are folded.

    python -m scripts.benchmarks.head_tiles --json docs/results/head_tiles.json

Tiles are TRL's own, ours and others, folded by TRL and in place. Rounds take them in turn; a ratio is of the same
round, and the table has their medians.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils

from trl_ext.compat.startup import use_all_cores
from trl_ext.compat.trl_head import TILE, FoldedInPlace
from trl_ext.runs.provenance import provenance

TRLS = utils._CHUNKED_LOGPROB_CHUNK_SIZE
WIDTHS = (4096, 2048, TILE, 512, 256)
FOLDED = {"TRL's": ChunkedLogProbFunction, "in place": FoldedInPlace}
STOCK = "TRL's", TRLS
WAYS = (STOCK, *((how, width) for how in FOLDED for width in WIDTHS))
TOKENS = (256, 640, 2048)


def seconds(tokens: int, vocabulary: int, hidden: int, how: str, width: int) -> float:
    """Of one forward and one backward pass of the head."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) / hidden).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    began = time.perf_counter()
    outputs = FOLDED[how].apply(states, weight, None, targets, 1.0, width, None, 1.0, ("log_probs", "entropy"))
    outputs[0].sum().backward()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, and write the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=4096, help="(default: 4096)")
    parser.add_argument("--hidden", type=int, default=256, help="size of a hidden state (default: 256)")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    use_all_cores()
    figures: dict[str, Any] = {}
    for tokens in TOKENS:
        taken: dict[tuple[str, int], list[float]] = {way: [] for way in WAYS}
        for _ in tqdm(range(args.repeats + 1), desc=f"{tokens} tokens", leave=False):  # the first warms up
            for way in WAYS:
                taken[way].append(seconds(tokens, args.vocabulary, args.hidden, *way))
        print(f"{tokens} tokens, TRL's {median(taken[STOCK][1:]):.3f} s")
        ratios = {way: median(a / b for a, b in zip(taken[STOCK][1:], taken[way][1:], strict=True)) for way in WAYS}
        for how in FOLDED:
            figures.setdefault(str(tokens), {})[how] = {
                str(width): {"seconds": median(taken[how, width][1:]), "ratio": ratios[how, width]}
                for folded, width in WAYS
                if folded == how
            }
            shown = ", ".join(f"{width}: {ratios[how, width]:.2f}x" for folded, width in WAYS if folded == how)
            print(f"    {how:<8} {shown}", flush=True)
    if args.json:
        settings = {"vocabulary": args.vocabulary, "hidden": args.hidden, "threads": torch.get_num_threads()}
        args.json.write_text(
            json.dumps({**settings, "found": figures, **provenance()}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
