"""Formulas between dollar signs become MathML when the site is built, so that a page needs no script from elsewhere."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by mkdocs with the text of each page; dollars of other pages are money."""
    if page.file.src_uri != "reference/algorithms.md":
        return markdown
    return re.sub(r"(?<![\\$`])\$([^$\n`]+)\$(?!\$)", lambda found: convert(found[1].replace(r"\|", "|")), markdown)
