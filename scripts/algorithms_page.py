"""`docs/reference/algorithms.md`: every member of every axis, and every preset, from the registries.

The formulas and the names in TRL and verl are in `docs/site/algorithms.yaml`; all else is in the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS, Preset
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.io import markdown_table, read_yaml
from trl_ext.registry import Registry

SOURCE = Path(__file__).parents[1] / "docs" / "site" / "algorithms.yaml"
AXES: dict[str, tuple[str, Registry]] = {
    "advantage": ("Rewards of P prompts with G completions each, `(P, G)`, to advantages of that shape", ADVANTAGES),
    "policy_loss": ("Log-probabilities and advantages to a loss per token, `(B, T)`", POLICY_LOSSES),
    "aggregation": ("Losses of the tokens of a whole optimizer step to a number", AGGREGATIONS),
    "kl_estimator": ("The penalty per token that `--beta` scales", KL_ESTIMATORS),
    "sampler_weight": ("What multiplies the policy loss for the mismatch with vLLM", SAMPLER_WEIGHTS),
    "sampler_rejection": (
        "Which tokens or sequences keep their policy loss in spite of that mismatch",
        SAMPLER_REJECTIONS,
    ),
}
INTRODUCTION = """\
# Algorithms

An algorithm is one member of each axis, by its flag. Options stand with their defaults, and are set as
`--policy_loss_options eps_high=0.28`. A member's docstring, in the [package](../packages/algorithms.md), says more;
`tests/algorithms/test_papers.py` holds each loss against its paper in float64. All since 0.1.

| letter | |
|---|---|
| $r$, $\\bar r$, $s$ | rewards, their mean and standard deviation over the group; with $B$ over the batch |
| $l$ | length of a response in tokens |
| $A$ | advantage |
| $\\pi$, $\\pi_{old}$, $\\mu$ | probability of a sampled token, under the old policy, under the engine that sampled |
| $\\rho$, $w$ | ratios $\\pi / \\pi_{old}$ and $\\pi_{old} / \\mu$ |
| $\\text{sg}$ | without gradient |

Written by `python -m scripts.docs_pages` from the registries and `docs/site/algorithms.yaml`.
"""
REFUSED = """\
## Not here

| method | why |
|---|---|
| BAPO ([2510.18927](https://arxiv.org/abs/2510.18927)), Clip-Cov and KL-Cov ([2505.22617](https://arxiv.org/abs/2505.22617)) | their bounds, or the tokens that they pick, follow from all tokens of a step, of which a micro-batch sees its own; a loss here does not depend on how a step is divided |
| DPPO's top-K divergence | vLLM would have to return the log-probabilities of K tokens at each place; the paper's two-outcome forms are there |
| BNPO's normalizer of TRL (`loss_type: bnpo`) | it divides by the tokens of the micro-batch; `token_mean` divides by those of the step |
| GFPO, PAPO, the replay buffer of TRL's `experimental` | GFPO selects completions by length, which an advantage of one's own can do (`lengths`, 0 for the others); PAPO is about images; a replay is not on-policy, and `--uninformative_keep_prob` revisits what still teaches |
| a critic | every advantage here is computed from rewards |
"""  # noqa: E501


def algorithms_page() -> str:
    """The page: a table per axis, the presets, and what is not there."""
    told = read_yaml(SOURCE)
    parts = [INTRODUCTION]
    for axis, (purpose, members) in AXES.items():
        rows = [_row(name, members, told[axis][name]) for name in members]
        table = "\n".join(markdown_table(("member", "formula", "source", "options", "in TRL 1.16", "in verl"), rows))
        parts.append(f"## {axis}\n\n{purpose}: `--{axis}`.\n\n{table}")
    rows = [_of_preset(name, preset) for name, preset in PRESETS.items()]
    header = ("preset", "advantage", "policy loss", "aggregation", "further settings")
    parts.append(
        "## Presets\n\n`--preset`; an axis or a setting given next to it wins.\n\n"
        + "\n".join(markdown_table(header, rows))
    )
    return "\n".join([*(part.rstrip("\n") + "\n" for part in parts), REFUSED])


def _row(name: str, members: Registry, told: dict[str, str]) -> tuple[str, ...]:
    function = members[name]
    options = ", ".join(f"`{option}={default}`" for option, default in members.options(name).items())
    asked = ", ".join(f"`{needed}`" for needed in members.inputs_of(function))
    if asked:
        options = "; ".join(filter(None, (options, f"asks for {asked}")))
    formula = told["formula"].replace("|", r"\|")
    return (
        f"`{name}`", f"${formula}$", _papers(function), options,
        told["trl"], told["verl"],
    )  # fmt: skip


def _papers(function: Callable[..., Any]) -> str:
    found = re.findall(r"arXiv:(\d{4}\.\d{5})", inspect.getdoc(function) or "")
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(found))


def _of_preset(name: str, preset: Preset) -> tuple[str, ...]:
    axes = [
        (getattr(preset, axis), getattr(preset, f"{axis}_options"))
        for axis in ("advantage", "policy_loss", "aggregation")
    ]
    cells = [f"`{member}`" + "".join(f", `{k}={v}`" for k, v in options.items()) for member, options in axes]
    return (f"`{name}`", *cells, ", ".join(f"`{k}: {v}`" for k, v in preset.settings.items()))
