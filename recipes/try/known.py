"""Losses of which it is known what `python recipes/lab.py try` should say of them, to check it with.

python recipes/lab.py try recipes/try/known.py:doubled --against grpo_clip
python recipes/lab.py try recipes/try/known.py:unsigned --against grpo_clip
"""

import torch

from trl_ext import POLICY_LOSSES, LossInputs, TokenLoss


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def doubled(x: LossInputs) -> TokenLoss:
    """Twice `ppo_clip`, which changes nothing but rounding: Adam divides a gradient by its size."""
    loss = POLICY_LOSSES["ppo_clip"](x)
    return TokenLoss(2 * loss.loss, loss.metrics)


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def unsigned(x: LossInputs) -> TokenLoss:
    """-r |A|: the mistake of losing the advantage's sign makes incorrect responses as likely as correct ones."""
    return TokenLoss(-torch.exp(x.logp - x.old_logp) * x.advantage.abs(), {})
