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
from trl_ext.algorithms.distillation import DISTILLATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS, Preset
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.grpo.distillation_settings import fits_loss
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
    "rollout_selection": (
        "Which completions of a rollout are trained on, `(P, G)` bool; the others have no advantage and are in no "
        "statistic of their group. With `--dynamic_sampling_tries`, groups of which none is kept are sampled again, by "
        "`mixed_groups` if nothing is chosen",
        SELECTIONS,
    ),
    "distillation": (
        "What a teacher, `--teacher`, adds: an advantage per token, of the sampled token's log-probabilities, or a "
        "divergence per token, of its `--teacher_top_k` most probable tokens and all others together",
        DISTILLATIONS,
    ),
}
INTRODUCTION = """\
# Algorithms

An algorithm is one member of each axis, by its flag. Options stand with their defaults, and are set as
`--policy_loss_options eps_high=0.28`. A member's docstring, in the [package](../packages/algorithms.md), says more;
`tests/algorithms/test_papers*.py` hold each against its paper in float64. All since 0.1. PODS, GFPO, KL-Cov, Clip-Cov,
BAPO and Kimi's length reward were transcribed from abstracts, their authors' or TRL's code and others' accounts, so
there the numbers of sections and equations are unchecked.

| letter | |
|---|---|
| $r$, $\\bar r$, $s$ | rewards, their mean and standard deviation over the group; with $B$ over the batch |
| $l$ | length of a response in tokens |
| $A$ | advantage |
| $N$, $\\bar A$ | tokens of the optimizer step, mean over them |
| $\\pi$, $\\pi_{old}$, $\\mu$ | probability of a sampled token, under the old policy, under the engine that sampled |
| $\\rho$, $w$ | ratios $\\pi / \\pi_{old}$ and $\\pi_{old} / \\mu$ |
| $\\text{sg}$ | without gradient |

Written by `python -m scripts.docs_pages` from the registries and `docs/site/algorithms.yaml`.
"""
REMOVED = """\
## What TRL removed

Methods that were in `trl.experimental` before TRL 1.16, and the line that trains with them here.

| there | here |
|---|---|
| `dppo` | `--preset dppo`, or `--policy_loss dppo_kl` for its other divergence |
| `gspo_token` | `--preset gspo_token` |
| `gfpo` | `--rollout_selection shortest --rollout_selection_options keep=4`, or `token_efficiency`; a measure of your own is a function like them |
| `grpo_with_replay_buffer` | `--dynamic_sampling_tries 4`: groups without reward variance are replaced by new ones, which are on-policy, instead of by earlier ones |
| `papo` | none: its perception loss compares the answers to an image and to a masked one |

## By the name in the paper

Methods that are an option of a member, or settings.

| method | line |
|---|---|
| GPPO ([2508.07629](https://arxiv.org/abs/2508.07629)) | `--preset ce_gppo --policy_loss_options beta1=1,beta2=1` |
| token-level truncated importance sampling (TIS) | `--sampler_weight token`; of the sequence, `sequence` |
| decoupled PPO, AReaL ([2505.24298](https://arxiv.org/abs/2505.24298)) | the default, `--old_log_probs policy`, with the weight `token` |
| PPO whose ratio is to the engine that sampled | `--old_log_probs sampler` |
| IcePop's two-sided mask | `--sampler_rejection token_ratio` |
| PODS ([2504.13818](https://arxiv.org/abs/2504.13818)) | `--rollout_selection max_variance` |
| Kimi k1.5's length reward ([2501.12599](https://arxiv.org/abs/2501.12599)) | `--advantage length_reward`; DAPO's penalty of overlong responses is `--overlong_buffer` |
| DAPO's dynamic sampling and overlong reward shaping ([2503.14476](https://arxiv.org/abs/2503.14476)) | `--preset dapo_full`, or `--dynamic_sampling_tries 4` and `--overlong_buffer 0.2` |

## Next to the axes

Settings of TRL's that belong to a method and have no axis; each trains to TRL's weights here.

| method | line |
|---|---|
| entropy bonus with a fixed coefficient | `--entropy_coef 0.01` |
| entropy bonus with an adaptive coefficient ([2505.22312](https://arxiv.org/abs/2505.22312)) | `--use_adaptive_entropy true --entropy_target 0.2` |
| loss on the tokens of the highest entropy only ([2506.01939](https://arxiv.org/abs/2506.01939)) | `--top_entropy_quantile 0.2` |
| sequences of negative advantage masked that are far off-policy ([2512.02556](https://arxiv.org/abs/2512.02556)) | `--off_policy_mask_threshold 0.1` |
| KL penalty weighted to be unbiased (the same, section 3.1) | `--beta 0.01 --use_bias_correction_kl true` |
"""  # noqa: E501
REFUSED = """\
## Not here

| method | why |
|---|---|
| DPPO's top-K divergence | vLLM would have to return the log-probabilities of K tokens at each place; the paper's two-outcome forms are there |
| BNPO's normalizer of TRL (`loss_type: bnpo`) | it divides by the tokens of the micro-batch; `token_mean` divides by those of the step |
| replay of prompts that were solved once | `Curriculum` (`trl_ext/grpo/curriculum.py`) keeps whether a problem's last group had a gradient, not how many of it were correct: it would have to keep that number, and draw a part of a rollout's problems from those with one. `--uninformative_keep_prob` below 1 spends rollouts on problems with a gradient instead, `--dynamic_sampling_tries` fills a rollout with them |
| L1's length reward ([2503.04697](https://arxiv.org/abs/2503.04697)) | its target length is in the prompt and differs by problem, so it belongs to a dataset: a reward of your own, as in `recipes/my_reward.py`, gets the dataset's columns and `completion_ids`. `length_reward` and `--overlong_buffer` need no target |
| a critic | every advantage here is computed from rewards |
"""  # noqa: E501


def algorithms_page() -> str:
    """The page: a table per axis, the presets, what TRL removed, what has no axis, and what is not there."""
    told = read_yaml(SOURCE)
    parts = [INTRODUCTION]
    for axis, (purpose, members) in AXES.items():
        rows = [_row(name, members, told[axis][name]) for name in members]
        table = "\n".join(markdown_table(("member", "formula", "source", "options", "in TRL 1.16", "in verl"), rows))
        parts.append(f"## {axis}\n\n{purpose}: `--{axis}`.\n\n{table}")
    rows = [_of_preset(name, preset) for name, preset in PRESETS.items()]
    sources = [_source_of_preset(name, told["preset"][name]) for name in PRESETS]
    header = ("preset", "advantage", "policy loss", "aggregation", "further settings")
    parts.append(
        "## Presets\n\n`--preset`; an axis or a setting given next to it wins.\n\n"
        + "\n".join(markdown_table(header, rows))
        + "\n\nWhere each comes from, and where it differs from that on purpose, as of November 2026:\n\n"
        + "\n".join(markdown_table(("preset", "paper", "code", "differs"), sources))
    )
    parts.append(_teachers())
    return "\n".join([*(part.rstrip("\n") + "\n" for part in parts), REMOVED, REFUSED])


def _teachers() -> str:
    """Which presets refuse which distillation, by the check that refuses it."""
    refused = [
        (f"`{name}`", ", ".join(f"`{member}`" for member, of in DISTILLATIONS.items() if not fits_loss(of, loss)))
        for name, preset in PRESETS.items()
        for loss in [POLICY_LOSSES[preset.policy_loss]]
        if not all(fits_loss(of, loss) for of in DISTILLATIONS.values())
    ]
    return (
        "### A teacher next to a preset\n\n`--teacher` goes with every preset, and is learned from by `reverse_kl` "
        "unless `--distillation` says otherwise. A loss that has the ratio of a whole response would give each of its "
        "tokens the mean of their advantages, so it is refused:\n\n"
        + "\n".join(markdown_table(("preset", "refused next to it"), refused))
    )


def _source_of_preset(name: str, told: dict[str, str]) -> tuple[str, ...]:
    paper = re.sub(r"^(\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", told["paper"])
    return (f"`{name}`", paper, told["code"], told["differs"])


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
    numbers = re.findall(r"arXiv:(\d{4}\.\d{5})", inspect.getdoc(function) or "")
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(numbers))


def _of_preset(name: str, preset: Preset) -> tuple[str, ...]:
    axes = [
        (getattr(preset, axis), getattr(preset, f"{axis}_options"))
        for axis in ("advantage", "policy_loss", "aggregation")
    ]
    cells = [f"`{member}`" + "".join(f", `{k}={v}`" for k, v in options.items()) for member, options in axes]
    return (f"`{name}`", *cells, ", ".join(f"`{k}: {v}`" for k, v in preset.settings.items()))
