"""Your own advantage: `--advantage recipes/my_advantage.py:sign_rank`.

It gets the rewards of a rollout, (P, G) with one row per prompt, and returns advantages of that shape. A reward of NaN
marks a completion that no reward function scored. The tests hold this file against its formula.
"""

import torch

from trl_ext import ADVANTAGES


@ADVANTAGES.register
def sign_rank(reward: torch.Tensor) -> torch.Tensor:
    """A_i = mean over j of sign(r_i - r_j): how many of its group a completion beats, less how many beat it."""
    lead = reward[:, :, None] - reward[:, None, :]  # (P, G, G)
    return torch.where(lead.isnan(), lead, lead.sign()).nanmean(dim=2)  # the sign of NaN would be 0
