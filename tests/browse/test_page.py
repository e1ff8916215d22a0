"""The file itself: nothing of a rollout is in it as text, and its policy allows its own script and style only."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile_rollouts import ATTACKS, ROWS
from trl_ext.browse.page import CHUNK, VERDICTS, packed, policy, write_page
from trl_ext.browse.rows import Source, plain_row


class Elements(HTMLParser):
    """The page's elements in order, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.raw.append((self.tags[-1][0], data))


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [plain_row(row, Source(Path("x"), row["prompt"])) for row in rows]


def written(path: Path, rows: list[dict[str, Any]], title: str = "t") -> str:
    write_page(path, title, rows)
    return path.read_text(encoding="utf-8")


def unpacked(text: str, name: str) -> Any:
    found = re.search(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]+)</script>', text)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_hostile_rollouts_add_no_element_and_no_text(tmp_path: Path) -> None:
    harmless = Elements(written(tmp_path / "a.html", plain([{"prompt": "p", "response": "r"}])))
    text = written(tmp_path / "b.html", plain(ROWS), ATTACKS[0])
    hostile = Elements(text)
    own = [(tag, names) for tag, names in harmless.tags if tag != "script" or "id" not in names]
    assert [(tag, names) for tag, names in hostile.tags if tag != "script" or "id" not in names] == own
    assert "owned" not in text
    assert "example.invalid" not in text
    for _, data in hostile.raw[1:-1]:
        assert re.fullmatch(r"[A-Za-z0-9+/=]+", data)


@pytest.mark.parametrize("attack", ATTACKS)
def test_packed_text_has_no_markup_and_comes_back_whole(attack: str) -> None:
    text = packed({attack: [attack]})
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert json.loads(gzip.decompress(base64.b64decode(text))) == {attack: [attack]}


def test_the_policy_names_the_script_and_style_that_are_there(tmp_path: Path) -> None:
    page = Elements(written(tmp_path / "a.html", plain(ROWS)))
    (allowed,) = [names["content"] for tag, names in page.tags if "http-equiv" in names]
    script, style = page.raw[-1][1], page.raw[0][1]
    assert (page.raw[-1][0], page.raw[0][0]) == ("script", "style")
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert allowed == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert allowed == policy(script, style)
    place = [tag for tag, names in page.tags].index("meta")
    assert not [tag for tag, _ in page.tags[:place] if tag in ("script", "style", "link")]  # a policy holds from there


def test_the_script_has_no_way_to_turn_text_into_markup(tmp_path: Path) -> None:
    script = Elements(written(tmp_path / "a.html", plain(ROWS))).raw[-1][1]
    for way in "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( DOMParser setHTML srcdoc".split():
        assert way not in script, way
    assert "</" not in script
    assert "textContent" in script


def test_every_row_is_in_its_chunk_and_in_the_index(tmp_path: Path) -> None:
    rows = [
        {"step": n // 4, "prompt": f"problem {n % 3}", "response": f"r{n}", "reward": 0.5, "outcome": "correct",
         "tokens": n, "finish_reason": "length" if n == 1 else "stop"}
        for n in range(CHUNK + 5)
    ]  # fmt: skip
    given = plain(rows)
    given[2]["graders"] = {"strict": [True, ""], "compatible": [False, ""]}
    given[3]["per_token"] = {"text": ["a"]}
    text = written(tmp_path / "a.html", given, "a <run>")
    index = unpacked(text, "index")
    assert [row["response"] for number in (0, 1) for row in unpacked(text, f"rows-{number}")] == [
        row["response"] for row in rows
    ]
    assert len(unpacked(text, "rows-0")) == index["chunk"] == CHUNK
    assert index["title"] == "a <run>"
    assert index["problem"][:4] == [0, 1, 2, 0]
    assert index["step"] == [row["step"] for row in rows]
    assert index["flags"][:5] == [0, 1, 2, 4, 0]
    assert {index["verdicts"][n] for n in index["verdict"]} == {"correct"}
    assert index["verdicts"] == list(VERDICTS)
    assert (len(index["reward"]), len(index["tokens"])) == (len(rows), len(rows))


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    assert written(tmp_path / "a.html", plain(ROWS)) == written(tmp_path / "b.html", plain(ROWS))
