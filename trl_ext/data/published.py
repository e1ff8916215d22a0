"""Published datasets and benchmarks by name: where they are, how their rows are laid out, and what is known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trl_ext.data.files import READERS
from trl_ext.data.formats import Columns, Row, value_at
from trl_ext.data.load import read_table, refuse_missing_columns
from trl_ext.data.sample import Table
from trl_ext.registry import unknown


@dataclass(frozen=True)
class Mirror:
    """A dataset's copy on the Hub.

    Attributes:
        config: its configuration; several, separated by commas, are read one after the other.
        held_out: the split to validate on, which `validation` names too.
        columns: None where the table's columns say how it is laid out.
        revision: the commit that was looked at, where one is known.
    """

    hub_id: str
    config: str | None = None
    held_out: str | None = None
    columns: Columns | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """What is known of the held-out rows of a published dataset, on which papers report accuracies.

    Attributes:
        rows: how many there are.
        license: as the dataset's card says.
        answers: of what kind they are.
        samples: drawn of each problem by default, at a temperature above 0: the k of the avg@k that papers report.
        grading: options of the strict grader that follow how the benchmark's authors grade.
        digest: `digest_of_problems` of the rows that were looked at; None where they were not at hand.
    """

    rows: int
    license: str
    answers: str
    samples: int = 1
    grading: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None


@dataclass(frozen=True)
class Published:
    """A dataset by its copies, the first of which is the one to read; the others are for when it cannot be."""

    mirrors: tuple[Mirror, ...]
    benchmark: Benchmark | None = None

    @property
    def held_out(self) -> str | None:
        """The split to validate on, as the first copy calls it."""
        return self.mirrors[0].held_out


_EQUAL_VALUE: dict[str, Any] = {"worked_out": False}  # graders of benchmarks compare values and ask for no form
_ONE_IN_A_HUNDRED_THOUSAND = _EQUAL_VALUE | {"numeric_tolerance": 1e-5}  # numpy.isclose's relative tolerance
_SUBJECTS = "algebra,counting_and_probability,geometry,intermediate_algebra,number_theory,prealgebra,precalculus"
_LARGER_ERROR = 1.01  # than the column says is accepted by the authors' judge
_WHOLE = "a whole number"


def _olympiad(row: Row) -> dict[str, Any]:
    """OlympiadBench's row: several answers are one text with commas, and `error` is an absolute error of a number."""
    context = str(row.get("context") or "").strip()
    stated = row["final_answer"]
    answers = [str(answer).replace("$", "").strip() for answer in ([stated] if isinstance(stated, str) else stated)]
    return {
        "problem": "\n".join(filter(None, [context, row["question"]])),
        "answer": ", ".join(answers),
        "tolerance": _relative_tolerance(row, ",".join(answers).split(",")),
    }


def _relative_tolerance(row: Row, answers: Sequence[str]) -> float:
    """The relative error that the column `error` amounts to; 0 where it is empty, or the answers are not numbers.

    The authors' judge accepts 1.01 times the column's absolute error, and no error of tuples.
    """
    stated = [part for part in str(row.get("error") or "").split(",") if part.strip() not in ("", "nan", "None")]
    if not stated or "Tuple" in str(row.get("answer_type")):
        return 0.0
    try:
        largest, smallest = max(map(float, stated)), min(abs(float(answer)) for answer in answers)
    except ValueError:
        return 0.0
    return _LARGER_ERROR * largest / smallest if smallest else 0.0


def _columns(problem: str, answer: str, source: str = "as_is") -> Columns:
    return Columns(problem, answer, source, (problem, answer))


_OLYMPIAD = Columns("problem", "answer", "as_is", ("question", "final_answer"), _olympiad)
_AIME = _columns("problem", "answer", "whole_number")

PUBLISHED: dict[str, Published] = {
    "gsm8k": Published(
        (Mirror("openai/gsm8k", "main", "test", None, "740312add88f781978c0658806c59bc2815b9866"),),
        Benchmark(
            1319, "MIT", _WHOLE, 1, _EQUAL_VALUE, "43bb1a1f34b3cf6ef37cd0c13de5eb5c93934597459eaf9531536fb525b6b81e"
        ),
    ),
    "math": Published(
        (
            Mirror(
                "DigitalLearningGmbH/MATH-lighteval", None, "test", None, "0530c78699ea5e8eb5530600900e1f328b48acad"
            ),
            Mirror("EleutherAI/hendrycks_math", _SUBJECTS, "test", None, "21a5633873b6a120296cce3e2df9d5550074f4a3"),
        ),
        Benchmark(
            5000,
            "MIT",
            "LaTeX: numbers, expressions, intervals, lists, words",
            1,
            _EQUAL_VALUE,
            "1b39b75b14dc1619045586294cfcd650aafb6f0c06652f9a36a6de5f27e808e5",
        ),
    ),
    "math500": Published(
        (
            Mirror(
                "HuggingFaceH4/MATH-500",
                None,
                "test",
                _columns("problem", "answer"),
                "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            ),
        ),
        Benchmark(500, "not stated; MATH's is MIT", "as MATH's", grading=_EQUAL_VALUE),
    ),
    "aime24": Published(
        (
            Mirror("HuggingFaceH4/aime_2024", None, "train", _AIME, "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
            Mirror(
                "Maxwell-Jia/AIME_2024",
                None,
                "train",
                _columns("Problem", "Answer", "whole_number"),
                "8d88b2876a82a080e2f172cc9b25d0d9d2cb4792",
            ),
            Mirror(
                "math-ai/aime24",
                None,
                "test",
                _columns("problem", "solution", "last_boxed"),
                "83a7f387baaa524a8bda0022eac0541582297103",
            ),
        ),
        Benchmark(30, "not stated", f"{_WHOLE} from 0 to 999", 32, _EQUAL_VALUE),
    ),
    "aime25": Published(
        (
            Mirror("math-ai/aime25", None, "test", _AIME, "563bb8404243c5f09de6ec262f2db674fe5bce9b"),
            Mirror("yentinglin/aime_2025", None, "train", _AIME, "6f71d77b0b89b9dabe07ab466c51df33f514df7f"),
            Mirror(
                "opencompass/AIME2025",
                "AIME2025-I,AIME2025-II",
                "test",
                _columns("question", "answer", "whole_number"),
                "a6ad95f611d72cf628a80b58bd0432ef6638f958",
            ),
        ),
        Benchmark(30, "Apache-2.0", f"{_WHOLE} from 0 to 999", 32, _EQUAL_VALUE),
    ),
    "amc23": Published(
        (
            Mirror(
                "math-ai/amc23",
                None,
                "test",
                _columns("question", "answer", "whole_number"),
                "80815d37005feb82cd7f8fbc6901d5d3eff43057",
            ),
            Mirror(
                "zwhe99/amc23",
                None,
                "test",
                _columns("question", "answer", "whole_number"),
                "f9810c0439cd3c670ec885d328a2f06a87f3694a",
            ),
        ),
        Benchmark(40, "not stated", _WHOLE, 32, _EQUAL_VALUE),
    ),
    "minerva": Published(
        (
            Mirror(
                "math-ai/minervamath",
                None,
                "test",
                _columns("question", "answer"),
                "ee46ddc498933b1977577953250ca5c66be64f96",
            ),
            Mirror("svc-huggingface/minerva-math", None, "test", _columns("problem", "solution", "last_boxed")),
        ),
        Benchmark(
            272,
            "not stated",
            "a number in the unit asked for, an expression, an equation",
            grading=_ONE_IN_A_HUNDRED_THOUSAND,
        ),
    ),
    "olympiadbench": Published(
        (
            Mirror(
                "Hothan/OlympiadBench",
                "OE_TO_maths_en_COMP",
                "train",
                _OLYMPIAD,
                "91184b52131e7fc9455fef848035173aea8cc01a",
            ),
            Mirror("math-ai/olympiadbench", None, "test", _OLYMPIAD, "4faaf1e6ec17d11a4218a9bf4c049ecaf954dd84"),
        ),
        Benchmark(674, "Apache-2.0", "a number, expression, interval or tuple, or several", grading=_EQUAL_VALUE),
    ),
    "countdown_tasks": Published((Mirror("Jiayi-Pan/Countdown-Tasks-3to4"),)),
    "tulu3_math": Published((Mirror("allenai/tulu-3-sft-personas-math"),)),
}
BENCHMARKS = {name: known.benchmark for name, known in PUBLISHED.items() if known.benchmark}


def names_of_benchmarks(given: Iterable[str]) -> list[str]:
    """Names that are separated by commas or in a list, each once.

    Raises:
        UnknownName: there is no such benchmark.
    """
    names = dict.fromkeys(name.strip() for text in given for name in text.split(",") if name.strip())
    for name in names:
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS)
    return list(names)


@dataclass(frozen=True)
class Copy:
    """The rows of a published dataset as they were read, and from where.

    Attributes:
        differs: in what they differ from what is known of the benchmark; empty where they do not.
        passed_over: copies before it, and why they could not be read.
    """

    table: Table
    dataset: str
    split: str
    columns: Columns | None
    differs: str = ""
    passed_over: tuple[str, ...] = ()


def read_published(name: str, split: str, config: str | None = None, folder: str | None = None) -> Copy:
    """A split of a published dataset: of a local copy, else of the first copy on the Hub that has the rows.

    Args:
        split: a name of the dataset's own, or `validation` for its held-out one, whatever its copies call it.
        config: of the Hub, in place of the one that is known.
        folder: with local copies, `NAME.jsonl` or `NAME/SPLIT.jsonl`, in the layout of any of the dataset's copies; or
            `.json`, `.csv`, `.parquet`.

    Raises:
        ValueError: no copy can be read; a line for each, and what a local copy would have to be.
    """
    known = PUBLISHED[name]
    if folder is not None:
        return _local(name, known, split, Path(folder))
    from datasets.exceptions import DatasetsError

    said: list[str] = []
    for mirror in known.mirrors:
        try:
            return replace(_from_hub(name, known, mirror, split, config), passed_over=tuple(said))
        except (ValueError, OSError, RuntimeError, DatasetsError) as error:
            said.append(f"{mirror.hub_id}: {' '.join(str(error).split())}")
            if isinstance(error.__cause__, ConnectionError):  # the others are at the same place
                break
    local = f"a local copy works as well: --benchmark_dir FOLDER with {name}.jsonl in it"
    raise ValueError(f"{name} cannot be read. {'; '.join(said)}; {local}")


def _from_hub(name: str, known: Published, mirror: Mirror, split: str, config: str | None) -> Copy:
    own = mirror.held_out if split in ("validation", known.held_out) and mirror.held_out else split
    table = read_table(mirror.hub_id, own, config or mirror.config, mirror.revision)
    if mirror.columns:
        refuse_missing_columns(mirror.hub_id, table, mirror.columns.needed)
    differs = _difference(name, table, mirror.columns) if own == mirror.held_out else ""
    if differs and name in BENCHMARKS and len(table) != BENCHMARKS[name].rows:
        raise ValueError(differs)
    return Copy(table, mirror.hub_id, own, mirror.columns, differs)


def _local(name: str, known: Published, split: str, folder: Path) -> Copy:
    splits = dict.fromkeys([split, *(mirror.held_out for mirror in known.mirrors if mirror.held_out)])
    is_held_out = split in ("validation", known.held_out)
    names = [name, *(f"{name}/{part}" for part in (splits if is_held_out else [split]))]
    paths = [folder / f"{stem}{suffix}" for stem in names for suffix in READERS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        listed = ", ".join(str(folder / f"{stem}.jsonl") for stem in names[:2])
        raise ValueError(f"benchmark_dir: no copy of {name} in {str(folder)!r}: {listed} (or {', '.join(READERS)})")
    table = read_table(str(path), split, None)
    columns = _layout(known, table)
    return Copy(table, str(path), split, columns, _difference(name, table, columns) if is_held_out else "")


def _layout(known: Published, table: Table) -> Columns | None:
    """The layout, among those of the dataset's copies, that the table has; None to recognize it by its columns."""
    first = table[0] if len(table) else {}
    layouts = [mirror.columns for mirror in known.mirrors if mirror.columns]
    return next((columns for columns in layouts if set(columns.needed) <= first.keys()), None)


def _difference(name: str, table: Table, columns: Columns | None) -> str:
    """In what a benchmark's rows differ from what is known of them."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        return ""
    if len(table) != benchmark.rows:
        return f"{len(table)} rows, and {name} has {benchmark.rows}"
    if benchmark.digest and digest_of_problems(_problems(table, columns)) != benchmark.digest:
        return f"its problems are not those of {name} as they were published"
    return ""


def _problems(table: Table, columns: Columns | None) -> Iterator[str]:
    for row in table:
        made = {**row, **columns.read(row)} if columns and columns.read else row
        yield str(value_at(made, columns.problem if columns else "problem" if "problem" in made else "question"))


def digest_of_problems(problems: Iterable[str]) -> str:
    """SHA-256 of the problems' texts, whatever their order and white space, so that all mirrors have the same."""
    texts = sorted(" ".join(problem.split()) for problem in problems)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
