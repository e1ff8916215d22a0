"""A run's figures -> a table, a curve and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.evaluator import OUTCOMES, Report
from trl_ext.evaluation.statistics import mean_interval
from trl_ext.plots import figure, plot_accuracy
from trl_ext.runs.summary import Selection, ValidationEntry

_REWARDS_OF = {"correct": (1, 1), "format_only": (1, 0), "neither": (0, 0)}  # format, answer: the handout's rewards


def before_after_table(before: ValidationEntry, after: ValidationEntry) -> str:
    """Accuracy before and after training by level, and the fraction of each outcome, from two `Report.summary()`."""
    lines = [
        f"{'':<26}{'before':>8}{'after':>8}",
        f"{'accuracy':<26}{before['accuracy']:>8.3f}{after['accuracy']:>8.3f}",
    ]
    levels, later = before["by_level"], after["by_level"]
    known = [level for level in levels if level not in ("", "0", "None")]
    lines += [f"  level {level:<18}{levels[level]:>8.3f}{later[level]:>8.3f}" for level in known]
    was, now = before["outcomes"], after["outcomes"]
    lines += [f"{label:<26}{was[name]:>8.3f}{now[name]:>8.3f}" for name, label in OUTCOMES.items()]
    return "\n".join(lines)


def selection_note(selection: Selection | None, problems: int) -> str | None:
    """How far a validation's accuracy is one that its weights were chosen by; None where nothing was chosen."""
    if selection is None:
        return None
    shared, others = selection["problems_that_chose"], selection["accuracy_on_others"]
    if others is None:
        where = f"all {problems} problems also chose the weights"
    else:
        where = f"{shared} of the {problems} problems also chose the weights; on the others it is {others:.3f}"
    if selection["fresh_samples"]:
        return f"Measured with fresh samples; {where}, so it may be a little too high."
    return f"Greedy responses are those that the weights were chosen by; {where}, so it is too high."


def write_curve(
    path: Path,
    histories: Mapping[str, Sequence[ValidationEntry]],
    title: str,
    seconds: float | None = None,
    levels: Mapping[str, float] | None = None,
) -> None:
    """Validation accuracy of labeled runs against optimizer steps and wall-clock (up to `seconds`), as a PNG.

    Args:
        levels: accuracies to draw as labeled lines.
    """
    with figure(path, (10, 4), (1, 2), title, sharey=True) as panels:
        axes = (("step", "optimizer steps"), ("wall_clock_s", "wall-clock, s"))
        for panel, (key, label) in zip(panels, axes, strict=True):
            for run, history in histories.items():
                plot_accuracy(panel, history, key, marker="o", markersize=4, label=run)
            panel.set_xlabel(label)
            for name, level in (levels or {}).items():
                panel.axhline(level, color="gray", linestyle="--", linewidth=1, label=name)
        panels[0].set(ylabel="validation accuracy", ylim=(0, 1))
        if seconds is not None:
            panels[1].set_xlim(0, seconds)
        if len(histories) > 1 or levels:
            panels[0].legend(loc="lower right")


def evaluation_summary(report: Report) -> dict[str, Any]:
    """The figures of an evaluation: accuracy with its 95 % interval, the outcomes' counts, and what `Report` says."""
    scores = report.per_problem()
    low, high = mean_interval(list(scores.values()))
    counts = Counter(row["outcome"] for row in report.rows)
    return {
        **report.summary(),
        "problems": len(scores),
        "samples": len(report.rows),
        "accuracy_low": low,
        "accuracy_high": high,
        "counts": {name: counts[name] for name in OUTCOMES},
    }


def evaluation_table(report: Report) -> str:
    """An evaluation as a person reads it: the handout's three categories, then accuracy by level and subject."""
    figures = evaluation_summary(report)
    lines = [
        f"{'format':>6} {'answer':>6}   samples fraction",
        *(
            f"{format_reward:>6} {answer_reward:>6} {figures['counts'][name]:>9} {figures['outcomes'][name]:>8.3f}"
            for name, (format_reward, answer_reward) in _REWARDS_OF.items()
        ),
        "",
        f"accuracy {figures['accuracy']:.3f}, 95 % interval {figures['accuracy_low']:.3f} to "
        f"{figures['accuracy_high']:.3f}; {figures['problems']} problems, {figures['samples']} samples"
        + ("" if figures["mean_tokens"] is None else f", {figures['mean_tokens']:.0f} tokens on average")
        + ("" if figures["truncated"] is None else f", {figures['truncated']:.3f} cut off"),
    ]
    if tools := figures.get("tools"):
        lines.append("tools: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in tools.items()))
    for kind, values in (("level", figures["by_level"]), ("subject", figures["by_subject"])):
        known = {name: accuracy for name, accuracy in values.items() if name not in ("", "0")}
        lines += [f"  {kind + ' ' + name:<30} {accuracy:.3f}" for name, accuracy in known.items()]
    return "\n".join(lines)


def examples(report: Report, n: int, category: str | None) -> list[str]:
    """The first n samples of a category (None: of all), to judge the parser against the model."""
    chosen = [row for row in report.rows if category in (None, row["outcome"])][:n]
    return [
        f"\n--- problem {row['problem_id']}, sample {row['sample']}: {row['outcome']} ({row['reason']})\n"
        f"{row['problem']}\nresponse: {_with_tools(row)}\n"
        f"extracted: {row['extracted']!r}   reference answer: {row['answer']!r}"
        for row in chosen
    ]


def _with_tools(row: Mapping[str, Any]) -> str:
    """The response; where tools answered in it, what they said stands in brackets."""
    turns = row.get("turns") or []
    if len(turns) < 2:
        return str(row["response"])
    return "".join(
        turn["text"]
        if turn["role"] != "tool"
        else f"[{', '.join(map(': '.join, zip(turn['tool'], turn['outcome'], strict=True)))}|{turn['text']}]"
        for turn in turns
    )


def write_steps_plot(
    path: Path, steps: Sequence[Mapping[str, Any]], of_kept: Sequence[tuple[int, float]], title: str
) -> None:
    """Expert iteration: fraction of correct rollouts and lengths by step, entropy by optimizer step, as a PNG.

    Args:
        of_kept: optimizer step and the entropy over the kept rows' tokens, while they are trained on.
    """
    number = [step["step"] for step in steps]
    with figure(path, (13, 4), (1, 3), title) as (shares, lengths, entropies):
        correct = [step["correct"] / max(step["rollouts"], 1) for step in steps]
        solved = [step["questions_with_a_right_answer"] / max(step["questions"], 1) for step in steps]
        shares.plot(number, correct, marker="o", label="rollouts")
        shares.plot(number, solved, marker="s", label="questions, by any rollout")
        shares.set(ylim=(0, 1), ylabel="fraction correct")
        for name, label in (("tokens", "all"), ("tokens_correct", "correct"), ("tokens_incorrect", "incorrect")):
            values = [step[name] if step[name] is not None else float("nan") for step in steps]
            lengths.plot(number, values, marker="o", label=f"{label} rollouts")
        lengths.set_ylabel("tokens per rollout")
        sampled = [(step["optimizer_step"], step.get("entropy_estimate")) for step in steps]
        for points, label in ((sampled, "all sampled tokens, estimate"), (of_kept, "kept tokens, in training")):
            known = [(step, value) for step, value in points if value is not None]
            entropies.plot([step for step, _ in known], [value for _, value in known], label=label)
        entropies.set_ylabel("entropy, nats per token")
        for panel, axis in ((shares, "expert-iteration step"), (lengths, "expert-iteration step"),
                            (entropies, "optimizer steps")):  # fmt: skip
            panel.set_xlabel(axis)
            panel.legend()
