"""The page in Chromium: hostile rollouts stay text, keys reach everything, views show what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.chromium import PROGRAM, Page, chromium
from tests.support.hostile_rollouts import ATTACKS, OWN, ROWS
from trl_ext.browse.page import write_page
from trl_ext.browse.rows import Source, plain_row

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture(autouse=True)
def forget(tab: Page) -> None:
    tab.complaints.clear()


def page_of(path: Path, rows: list[dict[str, Any]], title: str = "t") -> Path:
    write_page(path, title, [plain_row(row, Source(Path("x"), str(row.get("from", "x")))) for row in rows])
    return path


def problem_rows() -> list[dict[str, Any]]:
    """Two problems at steps 1 and 2, groups of 2; of each group the second is correct, and step 2 has token values."""
    values = {"text": ["un", "certain"], "logp": [-1.0, -2.0], "sampled_logp": [-1.0, -1.0], "entropy": [0.2, 0.8]}
    return [
        {"step": step, "prompt": f"problem {name}", "response": f"{name}{step}{n}", "reward": float(n), "tokens": 2,
         "outcome": "correct" if n else "format_only", "finish_reason": "stop" if n else "length", "advantage": n - 0.5,
         **({"per_token": {**values, "advantage": n - 0.5}} if step == 2 else {})}
        for step in (1, 2) for name in "AB" for n in (0, 1)
    ]  # fmt: skip


def cards(tab: Page) -> list[str]:
    found: list[str] = tab.value("[...document.querySelectorAll('.response')].map((box) => box.textContent)")
    return found


def settle(tab: Page) -> None:
    tab.value("new Promise((go) => setTimeout(go, 150))")


def test_hostile_rollouts_stay_text_in_every_view(tab: Page, tmp_path: Path) -> None:
    page = page_of(tmp_path / "a.html", [row | {"from": row["prompt"]} for row in ROWS], ATTACKS[0])
    count = (
        "document.querySelectorAll('img, svg, iframe, form, link, base, object, embed, a, [onload], [onerror]').length"
    )
    before = "document.querySelectorAll('script, style, meta').length"
    for state in ("view=group&color=entropy", "view=steps&color=ratio", "color=advantage"):
        tab.open(page, state)
        elements = tab.value(before)
        for number, attack in enumerate(ATTACKS):
            tab.value(f"choose({number})")
            tab.wait_for(f"document.documentElement.dataset.drawn === '{number}'")
            assert tab.value("document.querySelector('.prompt').textContent") == tab.value(as_javascript(attack))
            assert tab.value(count) == 0
        assert tab.value(before) == elements
        assert tab.value("document.title") == f"Rollouts: {ATTACKS[0]}"
        assert tab.value("document.documentElement.dataset.owned") is None
    asked = [text for text in tab.complaints if '"request"' in text and "a.html" not in text and "about:" not in text]
    assert not asked
    assert not [text for text in tab.complaints if "exceptionDetails" in text]


def as_javascript(text: str) -> str:
    """An expression of a text, which may hold half a character."""
    return f"JSON.parse({json.dumps(json.dumps(text))})"


def test_policy_refuses_a_script_that_gets_into_the_file_anyway(tab: Page, tmp_path: Path) -> None:
    page = page_of(tmp_path / "a.html", problem_rows())
    smuggled = f"<script>{OWN}</script><img src=x onerror={OWN}><main>"
    page.write_text(page.read_text().replace("<main>", smuggled))
    tab.open(page)
    assert tab.value("document.documentElement.dataset.owned") is None
    assert any("Content Security Policy" in text for text in tab.complaints)
    unguarded = tmp_path / "b.html"
    unguarded.write_text(page.read_text().replace("Content-Security-Policy", "x-nothing"))
    tab.open(unguarded)
    assert tab.value("document.documentElement.dataset.owned") == "1"  # so the policy is what refused it


def test_group_and_steps_stand_side_by_side(tab: Page, tmp_path: Path) -> None:
    page = page_of(tmp_path / "a.html", problem_rows())
    tab.open(page, "row=2&view=group")
    assert cards(tab) == ["B10", "B11"]
    tab.open(page, "row=2&view=steps&other=2")
    assert cards(tab) == ["B10", "uncertain", "uncertain"]
    tab.open(page, "row=2")
    assert cards(tab) == ["B10"]


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("show=format_only", [0, 2, 4, 6]),
        ("show=cut&step=1", [0, 2]),
        ("show=tokens", [4, 5, 6, 7]),
        ("show=disagree", []),
        ("problem=1", [2, 3, 6, 7]),
        ("search=b1", [2, 3]),
        ("search=PROBLEM+a&show=correct", [1, 5]),
    ],
)
def test_filters_and_search_show_the_rows_that_pass(tab: Page, tmp_path: Path, state: str, shown: list[int]) -> None:
    tab.open(page_of(tmp_path / "a.html", problem_rows()), state)
    assert tab.value("shown") == shown
    assert tab.value("document.getElementById('count').textContent") == f"{len(shown)} of 8 rollouts"


def test_tokens_have_the_color_of_their_value(tab: Page, tmp_path: Path) -> None:
    page = page_of(tmp_path / "a.html", problem_rows())
    found = "[...document.querySelectorAll('.tok')].map((t) => [t.className, t.style.getPropertyValue('--part')])"
    for color, tokens in {
        "advantage": [["tok lower", "1"], ["tok lower", "1"]],
        "ratio": [["tok higher", "0"], ["tok lower", "1"]],
        "entropy": [["tok higher", "0.25"], ["tok higher", "1"]],
    }.items():
        tab.open(page, f"row=4&color={color}")
        assert tab.value(found) == tokens
    back = "getComputedStyle(document.querySelectorAll('.tok')[1]).backgroundColor"
    assert tab.value(back) not in ("rgba(0, 0, 0, 0)", "transparent")  # the policy lets the script set it


def test_what_a_tool_has_said_stands_apart_between_the_tokens(tab: Page, tmp_path: Path) -> None:
    told = {"role": "tool", "text": "[6]", "tokens": 3, "tool": ["calculator"], "outcome": ["failed"]}
    turns = [
        {"role": "assistant", "text": "un", "tokens": 1},
        told,
        {"role": "assistant", "text": "certain", "tokens": 1},
    ]
    rows = [{**row, "turns": turns} for row in problem_rows()]
    page = page_of(tmp_path / "a.html", rows)
    for state in ("row=4&color=advantage", "row=4", "row=0"):  # the last has no values of tokens
        tab.open(page, state)
        assert cards(tab) == ["un[6]certain"]
        found = "[...document.querySelectorAll('.told')].map((t) => [t.textContent, t.className, t.title])"
        assert tab.value(found) == [["[6]", "told failed", "calculator: failed"]]
    tab.open(page, "row=4&color=advantage")
    assert tab.value("document.querySelectorAll('.tok').length") == 2


def test_the_keyboard_reaches_everything(tab: Page, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path / "a.html", problem_rows()), "row=4")
    focused = "document.activeElement.id || document.activeElement.className"
    assert tab.value(focused) == "list"
    for keys, chosen in (
        (["j"], 5),
        (["k", "k"], 3),
        (["ArrowDown"], 4),
        (["ArrowUp"], 3),
        (["End"], 7),
        (["Home"], 0),
    ):
        tab.press(*keys)
        assert tab.value("chosen") == chosen
    assert tab.value("document.querySelector('[aria-selected=true]').id") == "row-0"
    tab.press("v")
    settle(tab)
    assert cards(tab) == ["A10", "A11"]
    tab.press("/")
    assert tab.value(focused) == "search"
    tab.press("j")  # is a letter there
    assert tab.value("document.getElementById('search').value") == "j"
    tab.press("Escape")
    assert tab.value(focused) == "list"
    reached = set()
    for _ in range(14):
        tab.press("Tab")
        reached.add(tab.value(focused))
        outline = tab.value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or tab.value("document.activeElement === document.body")  # between end and beginning
    assert {"view", "color", "source", "step", "show", "problem", "search"} <= reached


def test_arrow_keys_tell_a_responses_tokens(tab: Page, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path / "a.html", problem_rows()), "row=4")
    tab.value("document.querySelector('.response').focus()")
    tab.press("ArrowRight", "ArrowRight")
    said = tab.value("document.getElementById('token').textContent")
    assert (
        said == 'token 2 of 2 "certain"  ·  advantage -0.5  ·  probability 0.1353  ·  ratio 0.3679  ·  entropy 0.8 nats'
    )
    tab.press("ArrowLeft")
    assert "token 1 of 2" in tab.value("document.getElementById('token').textContent")


def test_the_list_holds_only_the_rows_in_view(tab: Page, tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": str(n), "response": f"r{n}"} for n in range(3000)]
    tab.open(page_of(tmp_path / "a.html", rows))
    tab.press("End")
    assert tab.value("chosen") == 2999
    assert 0 < tab.value("document.querySelectorAll('.row').length") < 100
    last = "document.querySelector('#row-2999 > :last-child').textContent"
    assert tab.wait_for(last, 5) == "r2999"
    assert tab.value("chunks.size") < 24  # of 3000 / 128


def test_another_step_stays_within_the_rollouts_source(tab: Page, tmp_path: Path) -> None:
    rows = [
        {**row, "from": name, "response": f"{name}-{row['response']}"} for name in "xy" for row in problem_rows()[:4]
    ]
    rows += [{**row, "from": "y"} for row in problem_rows()[4:]]
    page = page_of(tmp_path / "a.html", rows)
    tab.open(page, "row=0&view=steps")
    assert cards(tab) == ["x-A10"]
    tab.open(page, "row=4&view=steps")
    assert cards(tab) == ["y-A10", "uncertain", "uncertain"]


def test_a_held_key_changes_the_address_once_and_keeps_the_step(tab: Page, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path / "a.html", problem_rows()), "row=2&view=steps&other=2")
    settle(tab)
    settle(tab)
    assert "other=2" in tab.value("location.hash")
    tab.value("window.calls = 0; history.replaceState = () => { window.calls += 1; }")
    tab.press(*"jkjkjkjk")
    settle(tab)
    settle(tab)
    assert tab.value("window.calls") == 1


def test_numbers_and_format_characters_are_told_as_they_are(tab: Page, tmp_path: Path) -> None:
    tab.open(page_of(tmp_path / "a.html", problem_rows()))
    assert tab.value("[12345, 0.123456, 1e21].map(number)") == ["12345", "0.1235", "1e+21"]
    assert tab.value("quoted('a\\u202eb')") == '"a\\u{202e}b"'


def test_arrows_bring_tokens_into_view(tab: Page, tmp_path: Path) -> None:
    row = problem_rows()[4] | {"per_token": {"text": ["long\n"] * 300, "advantage": 1.0}}
    tab.open(page_of(tmp_path / "a.html", [row]))
    tab.value("document.querySelector('.response').focus()")
    tab.press(*["ArrowRight"] * 150)
    seen = "(() => { const t = document.querySelector('.tok.at').getBoundingClientRect(); "
    seen += "return t.top >= 0 && t.bottom <= innerHeight; })()"
    assert tab.value(seen)
    active = "document.getElementById('list').getAttribute('aria-activedescendant')"
    assert tab.value(active) == "row-0"
    tab.open(tmp_path / "a.html", "row=0")
    tab.value("byId('problem').value = '9'; refilter(null)")
    settle(tab)
    assert tab.value(active) is None


@pytest.mark.parametrize("width", [360, 800])
def test_a_narrow_window_holds_everything_in_its_width(tab: Page, tmp_path: Path, width: int) -> None:
    tab.open(page_of(tmp_path / "a.html", problem_rows()), "row=4&view=group&color=advantage")
    tab.screenshot(tmp_path / "narrow.png", width, 700, "light")
    beyond = f"[...document.querySelectorAll('header *, main > *, footer, .row > :last-child, .prompt')].filter((e) => e.getBoundingClientRect().right > {width})"
    assert tab.value(f"{beyond}.map((e) => e.id || e.className || e.tagName)") == []
    assert tab.value("document.querySelector('.row > :last-child').getBoundingClientRect().width") > 40
