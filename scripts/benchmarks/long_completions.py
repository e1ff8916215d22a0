r"""Seconds and memory of an optimizer step at 1k, 4k and 16k tokens per response: TRL's own `GRPOTrainer`, and ours.

    python -m scripts.benchmarks.long_completions --json docs/results/long_completions.json \
        --plot docs/results/long_completions.png

All get the same replayed completions, in alternation, as in `step.py`; the longest has that many tokens, the mean is
0.6 of it. What the step keeps for each token must grow in proportion: the memory's growth is the slope between two
lengths on logarithmic axes, which is 1 for what is proportional and 2 for a matrix of tokens by tokens. Attention
itself takes time with the square of the length. On a CPU there is one thread, and its CPU time counts, in which other
work on the machine shows less than on the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from trl_ext.runs.provenance import provenance

from .random_model import SHAPES
from .step import STOCK, WAYS, Workload, measure

SHOWN = ["all but share_prompts", "all"]
_MEAN = 0.6  # of the longest response


def workload(tokens: int, rows: int, prompt: int) -> Workload:
    """One group of `rows` responses of which the longest has `tokens`."""
    return Workload(rows, rows, prompt, _MEAN * tokens, tokens, idle=0.0, micro=2)


def growth(points: dict[str, Any], way: str, quantity: str) -> list[float]:
    """The slope between each length and the next on logarithmic axes."""
    pairs = itertools.pairwise((int(tokens), by_way[way][quantity]) for tokens, by_way in points.items())
    return [math.log(b / a) / math.log(n / m) for (m, a), (n, b) in pairs]


def table(points: dict[str, Any]) -> str:
    """A row for each way and length, as a page has it."""
    lines = ["| tokens | | s per step | against TRL | extra MiB | against TRL | gradient, from TRL's |"]
    lines.append("|---|---|---|---|---|---|---|")
    for tokens, by_way in points.items():
        for way, one in by_way.items():
            stock = by_way[STOCK]
            lines.append(
                f"| {tokens} | {way} | {one['seconds']:.2f} | {stock['seconds'] / one['seconds']:.2f}x | "
                f"{one['extra_mib']:.0f} | {one['extra_mib'] / stock['extra_mib']:.2f} | "
                f"{one['gradient_difference']:.0e} |"
            )
    for way in next(iter(points.values())):
        said = ", ".join(f"{slope:.2f}" for slope in growth(points, way, "extra_mib"))
        time = ", ".join(f"{slope:.2f}" for slope in growth(points, way, "seconds"))
        lines.append(f"growth of {way}: memory {said}; seconds {time}")
    return "\n".join(lines)


def plot(points: dict[str, Any], path: Path) -> None:
    """Seconds and MiB against tokens, on logarithmic axes, with a line of slope 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = [int(tokens) for tokens in points]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    shown = {"seconds": "seconds per optimizer step", "extra_mib": "MiB above the start of the step"}
    for panel, (quantity, label) in zip(panels, shown.items(), strict=True):
        for way in next(iter(points.values())):
            panel.plot(lengths, [by_way[way][quantity] for by_way in points.values()], "o-", markersize=4, label=way)
        first = min(next(iter(points.values())).values(), key=lambda one: one[quantity])[quantity]
        panel.plot(lengths, [first * n / lengths[0] for n in lengths], "k:", label="slope 1")
        panel.set(xscale="log", yscale="log", xlabel="tokens of the longest response", ylabel=label)
        panel.set_xticks(lengths, [str(n) for n in lengths], minor=False)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, and write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384], help="(default: 1k, 4k, 16k)")
    parser.add_argument("--rows", type=int, default=4, help="responses, one group (default: 4)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of a random model (default: tiny)")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=SHOWN, metavar="WAY", help=f"(default: {SHOWN})")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--repeats", type=int, default=1, help="timed rounds (default: 1)")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    # One thread's CPU seconds, which other programs on the machine change less.
    args.correction, args.cpu_time = False, not torch.cuda.is_available()
    torch.set_num_threads(1)
    points: dict[str, Any] = {}
    for tokens in tqdm(args.tokens, leave=False):
        points[str(tokens)] = measure(args, workload(tokens, args.rows, args.prompt), args.checkpointing)
    print(table(points))
    if args.plot:
        plot(points, args.plot)
    if args.json:
        settings = {"shape": args.shape, "rows": args.rows, "prompt": args.prompt, "checkpointing": args.checkpointing}
        args.json.write_text(
            json.dumps({**settings, "found": points, **provenance()}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
