"""A run's report.md and score.png: the score over time, what was spent, who wrote what. And lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.endpoint.budget import Budget
from trl_ext.io import fenced, markdown_table, write_text
from trl_ext.plots import figure
from trl_ext.tools.discovery.archive import Attempt, best_valid
from trl_ext.tools.discovery.problem import Problem, Score, Verdict, shown_score

_OUTCOMES = {
    "valid": "valid",
    "invalid": "a result, but not a valid one",
    "no result": "the program gave no result",
    "no program": "no program in the answer",
    "no answer": "no answer from the endpoint",
    "not judged": "answered, not judged yet",
}
HEADER = f"{'attempt':>7} {'time':>8} {'tokens':>7} {'group':>5}  {'score':<16} verdict"


def outcome(attempt: Attempt) -> str:
    """The outcome of an attempt, one of the keys of `_OUTCOMES`."""
    verdict = attempt.best_verdict
    if attempt.error:
        return "no answer"
    if verdict is None:
        return "not judged"
    if attempt.program is None:
        return "no program"
    return "valid" if verdict.valid else ("invalid" if verdict.score else "no result")


def row(attempt: Attempt) -> str:
    """An attempt as one line on a terminal."""
    verdict = attempt.best_verdict
    message = attempt.error or (verdict.message if verdict else "")
    by = " (polished)" if attempt.polished is not None and verdict is attempt.polished else ""
    return (
        f"{attempt.id:>7} {attempt.second:>6.1f} s {attempt.tokens:>7} {attempt.group:>5}  "
        f"{shown_score(attempt.score):<16} {outcome(attempt)}{by}: {one_line(message, 100)}"
    )


def status(best: Verdict | None, budget: Budget, asking: int, judging: int) -> str:
    """The totals as one line on a terminal."""
    used = ((budget.used_calls, budget.calls), (budget.used_tokens, budget.tokens))
    calls, tokens, seconds = (
        f"{count:.0f}{'' if limit is None else f'/{limit:g}'}"
        for count, limit in (*used, (budget.used_seconds(), budget.seconds))
    )
    return (
        f"best valid: {shown_score(best.score) if best else 'none'} | in flight: {asking} requests, {judging} programs"
        f" | {calls} calls, {tokens} tokens, {seconds} s"
    )


def one_line(text: str, most: int) -> str:
    """The text on one line, printable; its middle is cut if it is long, since an exception's message is at its end."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= most else f"{flat[: most // 2 - 2]} ... {flat[-(most // 2 - 3) :]}"


def write_report(
    folder: Path, problem: Problem, header: Mapping[str, Any], attempts: Sequence[Attempt], budget: Budget, end: str
) -> None:
    """Write `report.md` and `score.png` into the run's folder."""
    _write_plot(folder / "score.png", problem, attempts)
    counts = Counter(outcome(attempt) for attempt in attempts)
    columns = ("attempt", "second", "score", "valid", "made by", "shown to the model", "verdict")
    lines = [
        f"# Discovery: {problem.name}",
        "",
        *([header["note"], ""] if header.get("note") else []),
        f"Model `{header['model']}`, strategy `{header['strategy']}` {_options(header['options'])}, seed "
        f"{header['seed']}, temperature {header['temperature']:g}. The run ended because of: {_cell(end)}.",
        "",
        _best_line(problem, attempts),
        "",
        *markdown_table(("spent", "used", "limit"), _spent(budget)),
        "",
        *markdown_table(("outcome", "attempts"), [(label, f"{counts[name]}") for name, label in _OUTCOMES.items()]),
        "",
        "## Score over time",
        "",
        "![score over time](score.png)",
        "",
        *markdown_table(columns, _improvements(attempts)),
        "",
        "Each row is an attempt with a better score than all before it. Every message and verdict: "
        "[conversation_log.json](conversation_log.json).",
        "",
        *_process(attempts),
        "## Reflection",
        "",
        *_reflection(attempts, header),
        "",
    ]
    write_text(folder / "report.md", "\n".join(lines))


def _spent(budget: Budget) -> list[tuple[str, str, str]]:
    return [
        ("calls", f"{budget.used_calls}", f"{budget.calls or 'none'}"),
        ("tokens", f"{budget.used_tokens}", f"{budget.tokens or 'none'}"),
        ("seconds", f"{budget.used_seconds():.0f}", f"{budget.seconds or 'none'}"),
    ]


def _process(attempts: Sequence[Attempt]) -> list[str]:
    """The first prompt, and the prompt and the answer of the attempt with the best score."""
    asked = [attempt for attempt in attempts if attempt.messages]
    if not asked:
        return []
    scored = [attempt for attempt in asked if attempt.score and attempt.response is not None]
    lines = ["## Prompts", "", f"The first, of attempt {asked[0].id}:", "", *fenced(asked[0].messages[-1]["content"])]
    if scored:
        top = max(scored, key=lambda attempt: attempt.score)
        if top is not asked[0]:
            lines += [f"Before the best score, attempt {top.id}:", "", *fenced(top.messages[-1]["content"])]
        lines += ["The answer to it:", "", *fenced(str(top.response))]
    return lines


def _reflection(attempts: Sequence[Attempt], header: Mapping[str, Any]) -> list[str]:
    """What the run shows, in sentences: from where to where, by what, and what was lost."""
    judged = [attempt for attempt in attempts if attempt.best_verdict is not None]
    valid = [attempt for attempt in judged if outcome(attempt) == "valid"]
    cut = sum(attempt.finish_reason == "length" for attempt in attempts)
    lines = [f"{len(valid)} of {len(attempts)} attempts gave a valid result."]
    if valid:
        top = max(valid, key=lambda attempt: attempt.score)
        how = "shown the verdicts of earlier ones" if top.parents else "asked afresh"
        lines.append(
            f"The first valid score was {shown_score(valid[0].score)} (attempt {valid[0].id}), the best "
            f"{shown_score(top.score)} (attempt {top.id}, {how}{', polished' if _polishing_won(top) else ''})."
        )
        after = len(attempts) - 1 - attempts.index(top)
        lines.append(f"{after} more attempts after it brought nothing better." if after else "It was the last attempt.")
    if cut:
        lines.append(
            f"Answers cut off at --max_tokens {header['max_tokens']}: {cut}. Give a model that thinks more of them, or "
            "turn its thinking off with --extra_body."
        )
    if polished := sum(map(_polishing_won, valid)):
        lines.append(f"The numeric method improved {polished} of the valid results.")
    return lines


def _polishing_won(attempt: Attempt) -> bool:
    return attempt.polished is not None and attempt.best_verdict is attempt.polished


def _best_line(problem: Problem, attempts: Sequence[Attempt]) -> str:
    best = best_valid(attempts)
    if best is None:
        return "**No valid program was found.**"
    attempt, verdict = best
    return (
        f"**Best valid: {verdict.score[0]:g} {problem.score_name}**, attempt {attempt.id}, "
        f"made by {_author(attempt, verdict)}: [best.py](best.py)."
    )


def _author(attempt: Attempt, verdict: Verdict) -> str:
    return "the answer, then the numeric method" if verdict is attempt.polished else "the answer"


def _improvements(attempts: Sequence[Attempt]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    most: Score = ()
    for attempt in attempts:
        verdict = attempt.best_verdict
        if verdict is None or verdict.score <= most:
            continue
        most = verdict.score
        parents = ", ".join(map(str, attempt.parents)) or "-"
        made_by, valid = _author(attempt, verdict), "yes" if verdict.valid else "no"
        cells = (f"{attempt.id}", f"{attempt.second:.1f}", shown_score(most), valid, made_by, parents)
        rows.append((*cells, _cell(verdict.message)))
    return rows or [(*"------", "no program gave a result")]


def _options(options: Mapping[str, object]) -> str:
    return "(" + (", ".join(f"{name}={value}" for name, value in options.items()) or "no options") + ")"


def _cell(text: str) -> str:
    """Any text as a cell of a Markdown table: it cannot format anything or end the cell."""
    plain = one_line(text, 160)
    return "".join(f"\\{c}" if c in "\\|`*_[]<>#" else c for c in plain)


def _write_plot(path: Path, problem: Problem, attempts: Sequence[Attempt]) -> None:
    """Plot the score's first entry, of each attempt and of the best valid one so far, over attempts and seconds."""
    number, seconds = range(1, len(attempts) + 1), [attempt.second for attempt in attempts]
    best = [pair[1].score[0] if (pair := best_valid(attempts[:n])) else 0 for n in number]
    axes: tuple[tuple[str, Sequence[float]], ...] = (("attempts", number), ("seconds", seconds))
    with figure(path, (10, 4), (1, 2), problem.name, sharey=True) as panels:
        for panel, (label, x) in zip(panels, axes, strict=True):
            if any(best):
                panel.step(x, best, where="post", label="best valid so far")
            for wanted, marker in (("valid", "o"), ("invalid", "x")):
                chosen = [i for i, attempt in enumerate(attempts) if attempt.score and outcome(attempt) == wanted]
                scores = [attempts[i].score[0] for i in chosen]
                panel.scatter([x[i] for i in chosen], scores, marker=marker, s=16, label=wanted)
            panel.set_xlabel(label)
        panels[0].set_ylabel(problem.score_name)
        panels[0].legend()
