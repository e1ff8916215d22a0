"""The table in `docs/two_gpus.md` of what `deterministic` covers, from `trl_ext.generation.determinism`."""

from __future__ import annotations

from trl_ext.generation.determinism import ATTENTION, FAMILIES, TABLE, Row
from trl_ext.io import markdown_table

HEAD = [
    "engine",
    "device",
    "its dtype",
    "model family",
    "two runs are the same",
    "whatever a response is sampled with",
    "known by",
]
_BEGIN = f"| {HEAD[0]} | {HEAD[1]} | {HEAD[2]} |"


def with_table(page: str) -> str:
    """The page with the table and what it refers to; all else in it is as it was."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition("\n\n**")
    families = ", ".join(f"`{family}`" for family in FAMILIES)
    attention = ", ".join(f"`{name}`" for name in ATTENTION)
    listed = f"Listed families (`model_type`): {families}. Attention of the policy on a GPU: {attention}."
    return "\n".join([*before.splitlines(), *markdown_table(HEAD, map(_cells, TABLE)), "", f"{listed}\n\n**{after}"])


def _cells(row: Row) -> list[str]:
    where = [", ".join(row.engines), ", ".join(row.devices)]
    if row.refused:
        return [*where, "", "", f"refused: {row.refused}", "", ""]
    families = "listed below" if row.families else "any"
    return [*where, " ".join(row.dtypes) or "any", families, "yes", row.whatever_batch, row.known_by]
