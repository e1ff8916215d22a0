"""The answers of lm-eval, lighteval and inspect next to ours: which differ, where first, and which verdicts.

    python -m scripts.compare_harnesses build/harnesses/mini

The folder is what `scripts/harnesses.sh` leaves: `ours/` with `samples.jsonl`, and logs in `lm_eval/`, `lm_eval_vllm/`,
`lighteval/` and `inspect/`, of which any may be missing. lm-eval's vLLM is compared with our vLLM, and that with our HF
generate. With `--model` every first difference is explained: how far apart the logits of the two tokens are there, of
the model in its own dtype (or `--dtype`) and in float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.io import markdown_table, read_json, read_jsonl, write_json

SHOWN = 40  # characters around a first difference


@dataclass(frozen=True)
class Answer:
    """What a harness says of a problem."""

    prompt: str
    response: str
    correct: bool


@dataclass(frozen=True)
class Difference:
    """A problem on which a harness's answer is not ours; `at` is the first other character of the response."""

    problem: int
    at: int | None  # None: only the verdict differs
    ours: str
    theirs: str
    verdicts: tuple[bool, bool]


@dataclass(frozen=True)
class Comparison:
    """A harness's answers next to ours."""

    baseline: str  # which of ours
    problems: int
    other_prompts: int
    same_as_drawn: int  # the same with the stop string where it is
    same: int  # the same up to the stop string
    same_verdicts: int
    accuracies: tuple[float, float]
    differences: list[Difference]


def until_stop(response: str, stop: Sequence[str]) -> str:
    """The response without its first stop string and what follows it, which some harnesses take away."""
    return response[: min((at for at in map(response.find, stop) if at >= 0), default=len(response))]


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first place, a character or a token, that is not the same in both, or None."""
    if one == other:
        return None
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def compare(
    ours: Sequence[Answer], theirs: Sequence[Answer], stop: Sequence[str], baseline: str = "ours"
) -> Comparison:
    """Both by the problems' order.

    Raises:
        InputError: they are not of as many problems.
    """
    if len(ours) != len(theirs) or not ours:
        raise InputError(f"{len(ours)} problems of ours and {len(theirs)} of theirs: run both on the same rows")
    pairs = list(zip(ours, theirs, strict=True))
    differences = [found for number, pair in enumerate(pairs) if (found := _difference(number, *pair, stop))]
    return Comparison(
        baseline=baseline,
        problems=len(pairs),
        other_prompts=sum(a.prompt != b.prompt for a, b in pairs),
        same_as_drawn=sum(a.response == b.response for a, b in pairs),
        same=len(pairs) - sum(one.at is not None for one in differences),
        same_verdicts=sum(a.correct == b.correct for a, b in pairs),
        accuracies=(sum(a.correct for a in ours) / len(pairs), sum(b.correct for b in theirs) / len(pairs)),
        differences=differences,
    )


def _difference(number: int, ours: Answer, theirs: Answer, stop: Sequence[str]) -> Difference | None:
    texts = until_stop(ours.response, stop), until_stop(theirs.response, stop)
    at = first_difference(*texts)
    if at is None and ours.correct == theirs.correct:
        return None
    return Difference(number, at, *texts, (ours.correct, theirs.correct))


def table(compared: Mapping[str, Comparison]) -> list[str]:
    """One row per harness, as Markdown."""
    heads = (
        "harness",
        "compared with",
        "problems",
        "same prompts",
        "same responses",
        "with stop string",
        "same verdicts",
        "ours",
        "theirs",
    )
    return markdown_table(heads, [
        [
            name, one.baseline, str(one.problems), str(one.problems - one.other_prompts), str(one.same),
            str(one.same_as_drawn), str(one.same_verdicts), *(f"{accuracy:.3f}" for accuracy in one.accuracies),
        ]
        for name, one in compared.items()
    ])  # fmt: skip


def shown(one: Difference) -> str:
    """A difference as a person reads it, in one line."""
    ours, theirs = ("correct" if verdict else "incorrect" for verdict in one.verdicts)
    if one.at is None:
        return f"problem {one.problem}: the same response, ours {ours}, theirs {theirs}: ...{one.ours[-SHOWN:]!r}"
    start = max(0, one.at - SHOWN // 2)
    both = f"ours ...{one.ours[start : one.at + SHOWN]!r}, theirs ...{one.theirs[start : one.at + SHOWN]!r}"
    return f"problem {one.problem}: from character {one.at}, {both} ({ours}, {theirs})"


# --- the logs --------------------------------------------------------------------------------------------------------


def ours(folder: Path) -> list[Answer]:
    """Of an evaluation's `samples.jsonl`."""
    rows = sorted(read_jsonl(folder / "samples.jsonl"), key=lambda row: row["number"])
    return [Answer(row["prompt"], row["response"], row["outcome"] == "correct") for row in rows]


def lm_eval(folder: Path) -> list[Answer]:
    """Of `--log_samples`."""
    rows = sorted(read_jsonl(_newest(folder, "samples_*.jsonl"), any_text=True), key=lambda row: row["doc_id"])
    return [Answer(row["arguments"]["gen_args_0"]["arg_0"], row["resps"][0][0], row["accuracy"] == 1) for row in rows]


def lighteval(folder: Path) -> list[Answer]:
    """Of `--save-details`, which are in the order of the documents."""
    from datasets import Dataset

    rows = Dataset.from_parquet(str(_newest(folder, "details_*.parquet"))).to_list()
    return [
        Answer(row["doc"]["query"], str(row["model_response"]["text"][0]), row["metric"]["accuracy"] == 1)
        for row in sorted(rows, key=lambda row: int(row["doc"]["id"]))
    ]


def inspect(folder: Path) -> list[Answer]:
    """Of `--log-format json`."""
    samples = sorted(read_json(_newest(folder, "*.json"))["samples"], key=lambda row: row["id"])
    return [
        Answer(
            row["input"],
            row["output"]["choices"][0]["message"]["content"],
            row["scores"]["graded"]["value"] == "C",
        )
        for row in samples
    ]


READERS: dict[str, Callable[[Path], list[Answer]]] = {
    "lm_eval": lm_eval, "lm_eval_vllm": lm_eval, "lighteval": lighteval, "inspect": inspect, "ours_vllm": ours,
}  # fmt: skip
BASELINES = {"lm_eval_vllm": "ours_vllm"}  # the others: "ours"


def _newest(folder: Path, pattern: str) -> Path:
    """The file of the last run; their names and folders have its time."""
    found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f"{str(folder)!r} has no {pattern}: run scripts/harnesses.sh first")
    return found[-1]


# --- why -------------------------------------------------------------------------------------------------------------


def gaps(model: str, pairs: Sequence[tuple[str, Difference]], dtype: str = "auto") -> list[dict[str, Any]]:
    """Of each prompt and difference, the first tokens that differ and their logits, ours minus theirs.

    Args:
        model: its folder.
        pairs: prompts, and differences of responses to them.
        dtype: that the responses were drawn in, for "as run"; "auto" is the model's own.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not pairs:
        return []
    tokenizer = AutoTokenizer.from_pretrained(model)
    places = [_place(tokenizer, prompt, one) for prompt, one in pairs]
    found: list[dict[str, Any]] = [
        {"problem": one.problem, "token": at, "tokens": [tokenizer.decode([token]) for token in tokens]}
        for (_, one), (_, at, tokens) in zip(pairs, places, strict=True)
    ]
    for name, of_weights in (("as run", dtype), ("float64", "float64")):
        network = AutoModelForCausalLM.from_pretrained(model, dtype=of_weights).eval()
        for row, (before, _, (ours_, theirs)) in zip(found, places, strict=True):
            with torch.no_grad():
                logits = network(torch.tensor([before])).logits[0, -1].double()
            row[name] = float(logits[ours_] - logits[theirs])
    return found


def _place(tokenizer: Any, prompt: str, one: Difference) -> tuple[list[int], int, tuple[int, int]]:
    """The tokens before the first difference, how many of them are the response's, and the two that differ."""
    before = tokenizer(prompt)["input_ids"]
    first, second = (
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for text in (one.ours, one.theirs)
    )
    at = first_difference(first, second)
    assert at is not None  # the texts differ, and so do their tokens
    at = min(at, len(first) - 1, len(second) - 1)
    return before + first[:at], at, (first[at], second[at])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and the differences, and write them into the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with ours/ and the harnesses' logs")
    parser.add_argument("--problems", type=int, help="compare the first of them alone, where a harness has no more")
    parser.add_argument("--model", help="explain first differences by this model's logits")
    parser.add_argument("--dtype", default="auto", help="of the weights that answered (the model's own)")
    parser.add_argument("--show", type=int, default=5, help="differences to print of each harness (5)")
    args = parser.parse_args(argv)
    try:
        compared = _compared(args.folder, args.problems)
        explained = _explained(compared, args) if args.model else {}
    except (InputError, OSError, KeyError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(table(compared)))
    for name, one in compared.items():
        print(f"\n{name}: {len(one.differences)} differences")
        for line in (*map(shown, one.differences[: args.show]), *explained.get(name, [])[: args.show]):
            print(line)
        if own := explained.get(name):
            largest = {dtype: max(abs(gap[dtype]) for gap in own) for dtype in ("as run", "float64")}
            print(f"the two logits of all {len(own)} are at most apart by {largest}")
    content = {name: {**asdict(one), "gaps": explained.get(name, [])} for name, one in compared.items()}
    write_json(args.folder / "compared.json", content)


def _compared(folder: Path, first: int | None) -> dict[str, Comparison]:
    there = {name: read(folder / name)[:first] for name, read in READERS.items() if (folder / name).is_dir()}
    if not there:
        raise InputError(f"{str(folder)!r} has no harness's logs: run scripts/harnesses.sh first")
    stop = read_json(folder / "ours" / "summary.json")["settings"]["stop"]
    own = {"ours": ours(folder / "ours")[:first], **there}
    baselines = {name: one for name, one in BASELINES.items() if one in own}
    return {
        name: compare(own[base := baselines.get(name, "ours")], theirs, stop, base) for name, theirs in there.items()
    }


def _explained(compared: Mapping[str, Comparison], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    prompts = [answer.prompt for answer in ours(args.folder / "ours")]
    pairs = [
        [(prompts[found.problem], found) for found in one.differences if found.at is not None]
        for one in compared.values()
    ]
    explained = iter(gaps(args.model, [pair for of_one in pairs for pair in of_one], args.dtype))
    return {name: [next(explained) for _ in of_one] for name, of_one in zip(compared, pairs, strict=True)}


if __name__ == "__main__":
    main()
