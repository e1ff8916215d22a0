"""Hostile, mutated and random answers against both graders: nothing may be executed, raise or hang.

Every answer goes through the workers that training uses. The worst time of a comparison is measured inside the worker;
memory is the peak of each worker's resident set (Linux). A folder that a successful attack would write to stays empty.

    python scripts/fuzz_grader.py                   # 100,000 answers
    python scripts/fuzz_grader.py --answers 2000 --seed 7
    python scripts/fuzz_grader.py --json docs/results/grader_fuzz.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trl_ext.rewards.workers.comparison import compare
from trl_ext.rewards.workers.pool import Failure, Pool
from trl_ext.runs.provenance import provenance

PARITY = Path(__file__).parents[1] / "tests" / "data" / "grader_parity.jsonl"
RULES = ("strict", "compatible")
BATCH = 2_000


def timed(rule: str, answer: str, reference: str) -> tuple[bool, float]:
    """The verdict and its seconds; runs in a worker."""
    began = time.perf_counter()
    correct, _ = compare(f"trl_ext.rewards.{rule}:compare", {}, answer, reference)
    return correct, time.perf_counter() - began


# Answers that a language model might write if they earned a reward.

_ATOMS = [
    "x", "y", "n", "a", "m", "s", "1", "2", "10", "0.5", "-3", "99999999", r"\pi", "e", "i", r"\infty", "(", ")", "[", "]",
    ",", "=", r"\le", "|", "%", r"\%", r"\$", r"\text{km}", r"\text{ or }", "and", r"\pm", ";", "'", '"',
]  # fmt: skip
_OPERATORS = ["+", "-", "*", "/", "^", "**", "!", r"\cdot", r"\times", r"\div", "_", "&", ">>", "<<", "//", "~", "@"]
_WRAPPERS = [
    r"\frac{{{}}}{{{}}}", r"\sqrt{{{}}}", r"\sqrt[{}]{{{}}}", "({})", "{}^{{{}}}", r"\left({},{}\right)", r"\{{{}\}}",
    r"\begin{{pmatrix}}{}&{}\\{}&{}\end{{pmatrix}}", r"\binom{{{}}}{{{}}}", r"\boxed{{{}}}", r"\text{{{}}}", "{}!",
    r"\log_{{{}}}{{{}}}", r"|{}|", r"{} \text{{ or }} {}", r"\mbox{{{}}}", "sqrt({})", "factorial({})", "Matrix([[{}]])",
]  # fmt: skip


def from_grammar(draw: random.Random, depth: int = 0) -> str:
    """A random answer that is nearly LaTeX."""
    if depth > 4 or draw.random() < 0.3:
        return draw.choice(_ATOMS)
    if draw.random() < 0.5:
        return from_grammar(draw, depth + 1) + draw.choice(_OPERATORS) + from_grammar(draw, depth + 1)
    wrapper = draw.choice(_WRAPPERS)
    return wrapper.format(*(from_grammar(draw, depth + 1) for _ in range(wrapper.count("{}"))))


def mutated(draw: random.Random, answers: list[str]) -> str:
    """A real answer with a few characters deleted, doubled, replaced or taken from another one."""
    text = list(draw.choice(answers))
    for _ in range(draw.randint(1, 6)):
        at = draw.randint(0, len(text))
        change = draw.randint(0, 3)
        if change == 0:
            del text[at : at + draw.randint(1, 4)]
        elif change == 1:
            text[at:at] = text[max(0, at - draw.randint(1, 9)) : at] * draw.randint(1, 3)
        elif change == 2:
            text[at:at] = chr(draw.choice([draw.randint(0, 127), draw.randint(0, 0x2FFF), 0x2212, 0xD800]))
        else:
            other = draw.choice(answers)
            start = draw.randint(0, len(other))
            text[at:at] = other[start : start + draw.randint(1, 12)]
    return "".join(text)


def hostile(draw: random.Random, canary: str) -> str:
    """An answer written to execute code, to run forever or to fill the memory."""
    n = draw.choice([3, 9, 50, 999, 10**5, 10**9])
    code = f"open({canary!r},'w')"
    octal = "".join(rf"\textbackslash {ord(c):03o}" for c in code)
    many = draw.choice([50, 1_000, 20_000, 100_000])
    return draw.choice(
        [
            f"{n}**{n}**{n}", f"{n}^{{{n}^{{{n}}}}}", f"{n}!", f"(({n}!)!)!", f"1e{n}", f"0.{'0' * min(n, 10**5)}1",
            f"2**(3**(4**{n}))", f"(x+y)**{n}/(x-y)**{n}", f"({n},{n}**{n}**{n})", rf"\sqrt[{n}]{{{n}}}",
            "(" * many, ")" * many, "{" * many, r"\frac{" * many, r"\sqrt{" * many, r"\text{" * many, "-" * many,
            "x" * many, "1," * many, "9" * many, "1+" * many + "1", "x^" * many + "2", "!" * many, r"\left(" * many,
            r"\boxed{" * many, "|" * many, "$" * many, " " * many, "\n" * many, r"\\" * many, "&" * many, "e^" * many + "x",
            code, f"__import__('os').system('touch {canary}')", f"eval({code!r})", f"re('{octal}')", f"S('{octal}')",
            f"lambdify(x,{code})", f"().__class__.__bases__[0].__subclasses__()[{n}]", "re('\\157\\160\\145\\156')",
            f"\\u006f\\u0070en('{canary}','w')", "0)&(0", f"0)>>({n}", "0)-(x", "oo", "zoo", "nan", "E", "I", "S", "Q", "N",
            "beta(1,1)", "gamma(9**9)", f"Integral(x**x,(x,0,{n}))", f"summation(1/x,(x,1,{n}))", f"factorint({n}**{n})",
            f"\\sum_{{k=1}}^{{{n}}} k!", f"\\prod_{{k=1}}^{{{n}}} k", f"\\int_0^{{{n}}} x^x dx", rf"\binom{{{n}}}{{{n // 2}}}",
            rf"\begin{{pmatrix}}{'1&' * many}1\end{{pmatrix}}", f"{{{n}}}_{{{n}}}", "\x00" * many, "\ud800", "\u202e12",
            rf"{n}\%" * 50, rf"\log_{{{n}}}({n}^{{{n}}})", f"\\cos({n}^{{{n}}})", f"10^{{10^{{{n}}}}}", f"{n}" * 300 + "!",
        ]
    )  # fmt: skip


def answers_and_truths(path: Path) -> tuple[list[str], list[str]]:
    """The texts of the parity rows."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    references = [row["ground_truth"] for row in rows if isinstance(row["ground_truth"], str)]
    return [row["response"].rpartition("<answer>")[2].removesuffix("</answer>") for row in rows], references


def fuzz(n: int, seed: int, canary: str) -> dict[str, Any]:
    """Figures of `n` answers, half of them for each rule."""
    draw = random.Random(seed)
    real, references = answers_and_truths(PARITY)
    makers: list[Callable[[], str]] = [
        lambda: from_grammar(draw),
        lambda: mutated(draw, real),
        lambda: hostile(draw, canary),
    ]
    counts: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    failures: list[str] = []
    with Pool("fuzz_grader:timed") as pool, tqdm(total=n, desc="answers") as bar:
        for start in range(0, n, BATCH):
            size = min(BATCH, n - start)
            jobs = [(RULES[i % 2], makers[i // 2 % 3](), draw.choice(references)) for i in range(size)]
            for job, outcome in zip(jobs, pool.map(jobs), strict=True):
                if isinstance(outcome, Failure):
                    counts[outcome.kind] += 1
                    failures.append(f"{outcome.kind}: {outcome.detail[:160]}: {repr(job)[:160]}")
                else:
                    counts["right" if outcome[0] else "wrong"] += 1
                    slowest.append((outcome[1], repr(job)[:160]))
            slowest = sorted(slowest, reverse=True)[:10]
            bar.update(size)
        peak = max(map(peak_resident_mb, pool.pids()), default=0.0)
    figures = {"limit_s": pool.limits.seconds, "worker_peak_mb": round(peak, 1), "slowest": slowest}
    return {"answers": n, "seed": seed, "counts": dict(counts), **figures, "failures": failures[:20]}


def peak_resident_mb(pid: int) -> float:
    """VmHWM of a process in MB; 0 where the system does not report it."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def main() -> None:
    """Fuzz, print the figures, and exit with 1 unless they are clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000, help="number of answers (default: 100000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random answers (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with versions and hardware")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(args.answers, args.seed, f"{folder}/canary")
        result["code_executed"] = any(Path(folder).iterdir())
    for name, value in result.items():
        print(f"{name:>15}  " + (f"\n{'':>17}".join(map(str, value)) if isinstance(value, list) else str(value)))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**result, **provenance()}, indent=2) + "\n", encoding="utf-8")
    bad = {kind: result["counts"].get(kind, 0) for kind in ("error", "crash", "memory", "timeout")}
    if result["code_executed"] or any(bad.values()):
        sys.exit(f"not clean: code executed {result['code_executed']}, {bad}")


if __name__ == "__main__":
    main()
