"""`docs/reference/benchmarks.md`: what is known of each benchmark, from `trl_ext.data.published`."""

from __future__ import annotations

from trl_ext.data.published import BENCHMARKS, PUBLISHED, Benchmark, Mirror
from trl_ext.io import markdown_table

INTRODUCTION = """\
# Benchmarks

```bash
trl-ext evaluate --model_name_or_path smollm2 --benchmark gsm8k,math500 --problems 64
trl-ext best_of_n --model_name_or_path Qwen/Qwen3-0.6B --benchmark aime24,amc23 --max_tokens 16384
trl-ext compare runs/before runs/after --benchmark math500,aime24
accelerate launch recipes/grpo_math.py --validation_benchmarks math500:problems=100 aime24:samples=8,every=100
```

Each benchmark has a folder with its samples and its summary; `benchmarks.json`, `.csv`, `.md`, `.tex` and `.png` have the
table. All inputs are checked before an engine starts, and there is one engine for all. What nobody gives is as is usual:
the model's chat template where it has one, the strict grader, and k samples of each problem of small benchmarks (`best_of_n` draws its own 16).

| figure | what |
|---|---|
| avg@k | mean over problems of the fraction of k samples that is correct. Its interval is over problems, since the samples of one are correlated: Wilson's with the number of problems that would have that standard error, and Student's t. In simulations of 30 to 500 problems it covers in 93 to 97 %; with 30 problems and an accuracy below 0.1 less (85 to 93 %) |
| pass@k | fraction of problems with a correct sample, unbiased where more were drawn |
| maj@k | the most frequent answer, as written; of equally frequent ones each with the same chance |
| cons@k | the same, where answers that mean the same to the grader are one vote |

A copy on the Hub that cannot be read, lacks a column or has another number of rows is passed over for the next, with a
line. `--benchmark_dir FOLDER` reads `NAME.jsonl` or `NAME/test.jsonl` in any of these layouts; with other rows than were
published, the line and the summary say that the figure is not the benchmark's.

Revisions are of the copies as public code pins them, not looked at by us where no network was; the digests of GSM8K and
MATH are of the authors' files.

"""
GRADING = """
## How answers are graded

By default the strict grader compares values exactly and asks for no form, and `--grader compatible` is the course's.
What differs from the benchmarks' authors and from other harnesses:

| benchmark | its authors | here | others |
|---|---|---|---|
| gsm8k | the text after `####`, without commas, has to be the same | equal numbers | lm-eval: the same text, or the last number of the response |
| math, math500 | normalized texts (Hendrycks); PRM800K's grader adds equality by sympy, and wants reduced fractions | equal values in any form: an unreduced fraction is correct | lm-eval: sympy within 5 s, or math-verify; Qwen2.5-Math: numbers within 1e-4 |
| aime24, aime25, amc23 | a whole number | the same; `025`, `27.0` and `336^\\circ` in copies are read as numbers | lm-eval's AIME compares texts: `025` is not `25` |
| minerva | numbers by `numpy.isclose`, 1e-5 relative (copies of the paper's code; the paper itself was not at hand), expressions by sympy | 1e-5 relative (`--numeric_tolerance`), `2.5e6` is `2.5\\times10^6`; expressions exactly | Qwen2.5-Math: 1e-4. lm-eval's `minerva_math` is MATH |
| olympiadbench | several answers in any order, `\\pm` is two, numbers within 1.01 times the column `error` (absolute), no units in the box | the same, by one relative tolerance for a row's numbers; a unit in the box may be left out or has to be right | Qwen2.5-Math takes several answers in one order and ignores `error`; some copies have 675 rows |

Of minerva some reference answers are code or prose (`np.arcsin(10/13)`), which only the same text matches; the check before
the run lists them.

## What is known

"""


def benchmarks_page() -> str:
    """The page."""
    heads = ("name", "rows", "k", "answers", "license, as the card says", "copies on the Hub, in this order")
    rows = [[name, *_facts(one), _copies(PUBLISHED[name].mirrors)] for name, one in BENCHMARKS.items()]
    return INTRODUCTION.rstrip() + "\n" + GRADING + "\n".join(markdown_table(heads, rows)) + "\n"


def _facts(benchmark: Benchmark) -> list[str]:
    return [f"{benchmark.rows:,}", str(benchmark.samples), benchmark.answers, benchmark.license]


def _copies(mirrors: tuple[Mirror, ...]) -> str:
    return "; ".join(
        f"`{mirror.hub_id}`{f' ({mirror.config})' if mirror.config else ''}, {mirror.held_out}"
        f"{f', at `{mirror.revision[:8]}`' if mirror.revision else ''}"
        for mirror in mirrors
    )
