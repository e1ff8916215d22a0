"""Two GPUs: seconds of a rollout with its steps by the ratio of sampling to training, 2 colocated against 1 + 1.

    python -m scripts.benchmarks.two_gpus --plot docs/results/two_gpus.png

An estimate with assumed efficiencies, not a measurement; it needs no GPU. The ratio is changed as if sampling took
longer or shorter, with what two GPUs save of it as the recipe's estimate has it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from trl_ext.plots import figure
from trl_ext.tools.estimate.hardware import GPUS, gpu_by_name
from trl_ext.tools.estimate.layouts import two_gpus
from trl_ext.tools.estimate.sides import TwoGpus

RECIPES = [Path(f"recipes/{name}.yaml") for name in ("grpo_math_qwen2.5_math_1.5b", "grpo_gsm8k_qwen3_0.6b")]
RATIOS = np.linspace(0.02, 3.0, 150)


def draw(path: Path, compared: dict[str, TwoGpus]) -> None:
    """A panel per recipe: a line per mode, and the recipe's own ratio."""
    with figure(path, (11, 4), (1, len(compared))) as panels:
        for panel, (name, modes) in zip(panels, compared.items(), strict=True):
            for mode in modes.sides():
                panel.plot(RATIOS, [modes.sides(ratio)[mode].seconds for ratio in RATIOS], label=mode)
            panel.axvline(modes.ratio, color="gray", linestyle="--", linewidth=1, label="the recipe")
            panel.set(title=name, xlabel="sampling / training, on one GPU each", ylabel="seconds per rollout")
            panel.set_ylim(bottom=0)
            panel.legend(fontsize=8)


def main() -> None:
    """Estimate, print, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, nargs="+", default=RECIPES, help="YAML files of GRPO")
    parser.add_argument("--gpu", default="h100", help=f"one of: {', '.join(GPUS)} (default: h100)")
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    gpu = gpu_by_name(args.gpu)
    compared = {config.stem: two_gpus(config, [], gpu) for config in args.configs}
    for name, modes in compared.items():
        print(f"{name}, {gpu.name}\n{modes.table()}\n")
    if args.plot:
        draw(args.plot, compared)


if __name__ == "__main__":
    main()
