"""A policy loss of your own: one function in a file of your own, named on the command line.

accelerate launch recipes/grpo_math.py --policy_loss recipes/my_loss.py:soft_clip
accelerate launch recipes/grpo_math.py --policy_loss recipes/my_loss.py:soft_clip --policy_loss_options width=0.5
"""

import torch

from trl_ext import POLICY_LOSSES, LossInputs, TokenLoss


@POLICY_LOSSES.register(zero_advantage_is_noop=True)  # steps skip rows with advantage 0
def soft_clip(x: LossInputs, *, width: float = 0.2) -> TokenLoss:
    """-(1 + width tanh((r - 1) / width)) A: the ratio r, bent into 1 - width .. 1 + width.

    Its gradient is that of -r A at r = 1 and fades smoothly where `ppo_clip` cuts it off.
    """
    ratio = torch.exp(x.logp - x.old_logp)  # (B, T)
    bent = 1 + width * torch.tanh((ratio - 1) / width)
    return TokenLoss(-bent * x.advantage, {"soft_clip/bent": (ratio - bent).abs() * (x.advantage != 0)})
