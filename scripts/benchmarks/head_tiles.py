"""Time of TRL's LM head on a CPU, forward and backward, by the width of its tiles: TRL's own, ours and others.

    python -m scripts.benchmarks.head_tiles --json docs/results/head_tiles.json

Rounds take the widths in turn; a ratio is of the same round, and the table has their medians.
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
from trl_ext.compat.trl_head import TILE
from trl_ext.runs.provenance import provenance

TRLS = utils._CHUNKED_LOGPROB_CHUNK_SIZE
WIDTHS = (TRLS, 4096, 2048, TILE, 512, 256)
TOKENS = (256, 640, 2048)


def seconds(tokens: int, vocabulary: int, hidden: int, width: int) -> float:
    """Of one forward and one backward pass of the head."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) / hidden).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    began = time.perf_counter()
    found = ChunkedLogProbFunction.apply(states, weight, None, targets, 1.0, width, None, 1.0, ("log_probs", "entropy"))
    found[0].sum().backward()
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
    found: dict[str, Any] = {}
    for tokens in TOKENS:
        taken: dict[int, list[float]] = {width: [] for width in WIDTHS}
        for _ in tqdm(range(args.repeats + 1), desc=f"{tokens} tokens", leave=False):  # the first warms up
            for width in WIDTHS:
                taken[width].append(seconds(tokens, args.vocabulary, args.hidden, width))
        ratios = {w: median(a / b for a, b in zip(taken[TRLS][1:], taken[w][1:], strict=True)) for w in WIDTHS}
        found[str(tokens)] = {str(w): {"seconds": median(taken[w][1:]), "ratio": ratios[w]} for w in WIDTHS}
        shown = ", ".join(f"{width}: {ratio:.2f}x" for width, ratio in ratios.items())
        print(f"{tokens} tokens, TRL's {median(taken[TRLS][1:]):.3f} s; {shown}", flush=True)
    if args.json:
        settings = {"vocabulary": args.vocabulary, "hidden": args.hidden, "threads": torch.get_num_threads()}
        args.json.write_text(
            json.dumps({**settings, "found": found, **provenance()}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
