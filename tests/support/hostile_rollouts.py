"""Rollouts whose every text tries to become markup or script: if one does, the page's root has `data-owned`."""

from __future__ import annotations

from typing import Any

OWN = "document.documentElement.dataset.owned=1"
ATTACKS = (
    f"</script><script>{OWN}</script>",
    f"<img src=x onerror={OWN}>",
    f"<svg/onload={OWN}>",
    f"</title><script>{OWN}</script>",
    f"<!--<script>{OWN}//",
    f"]]><script>{OWN}</script>",
    f'"><script>{OWN}</script>',
    f"' onmouseover='{OWN}' autofocus onfocus='{OWN}",
    f"javascript:{OWN}",
    f"\u2028{OWN}\u2029",
    f"${{{OWN}}}`;{OWN};`",
    f'<iframe srcdoc="<script>parent.{OWN}</script>">',
    "<meta http-equiv=refresh content='0;url=https://example.invalid/'>",
    "<style>*{display:none}</style><link rel=stylesheet href=https://example.invalid/>",
    "<form action=https://example.invalid/><input autofocus></form>",
    "\ud800 half a character, \x00, \x1b[31m, \u202e turned around",
    "__proto__",
)


def hostile_row(attack: str, step: int) -> dict[str, Any]:
    """A row as a file has it, with the attack in every field that a model, a dataset or a reward can write."""
    per_token = {name: [0.5, -1.0] for name in ("advantage", "logp", "sampled_logp", "entropy")}
    return {
        "step": step, "prompt": attack, "response": attack, "ground_truth": attack, "reward": 0.0, "tokens": 2,
        "rewards": {attack: 0.0, "format_reward": 1.0, "answer_reward": 0.0}, "extracted": attack, "reason": attack,
        "finish_reason": attack, "outcome": attack, attack: attack, "nested": {attack: [attack]},
        "per_token": {"text": [attack, attack], **per_token},
    }  # fmt: skip


ROWS = [hostile_row(attack, step) for step, attack in enumerate(ATTACKS)]
