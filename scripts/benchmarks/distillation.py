"""What the lab `distillation` starts from: three teachers and a teacher's samples, in runs/distillation.

    python -m scripts.benchmarks.distillation
    python recipes/lab.py all --lab distillation --jobs 2

The teacher is the base policy after the GRPO of recipes/grpo_math.yaml. One of another seed was pretrained with seed 1
on other texts, with the base policy's tokenizer, before the same GRPO. The wrong one has learned another task from the
base policy: arithmetic in several steps. What is there is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from trl_ext.generation.prompts import load_prompt
from trl_ext.mini.arithmetic import arithmetic
from trl_ext.mini.policy import make_base_policy, pretrain
from trl_ext.mini.task import BasePolicyConfig

FOLDER = Path("runs/distillation")
STEPS, ROWS = 40, 128  # of the lab's runs: as many samples of the teacher as they sample themselves
OTHER_PROBLEMS = 2048


def main() -> None:
    """Make what is not there."""
    teacher, wrong = FOLDER / "teacher", FOLDER / "wrong"
    if not (teacher / "summary.json").exists():
        run("grpo_math.py", base_policy_seed=0, output_dir=teacher)
    if not (FOLDER / "other_seed" / "summary.json").exists():
        run("grpo_math.py", model_name_or_path=base_of_another_seed(), output_dir=FOLDER / "other_seed")
    if not (FOLDER / "traces.jsonl").exists():
        samples = FOLDER / "samples"
        sampled = {"model_name_or_path": teacher, "split": "train", "problems": STEPS * ROWS, "temperature": 1.0}
        run("evaluate.py", **sampled, output_dir=samples)
        rows = [json.loads(line) for line in (samples / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
        write(FOLDER / "traces.jsonl", [{name: row[name] for name in ("prompt", "response")} for row in rows])
    if not (wrong / "summary.json").exists():
        write(FOLDER / "other_task.jsonl", other_task())
        run("sft_math.py", base_policy_seed=0, traces=FOLDER / "other_task.jsonl", output_dir=wrong)


def base_of_another_seed() -> Path:
    """Another base policy that has the tokenizer of seed 0."""
    folder = FOLDER / "other_base"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(make_base_policy(0))
        pretrain(tokenizer, BasePolicyConfig(), seed=1, progress=False).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def run(recipe: str, **settings: object) -> None:
    """A recipe of the project with these settings."""
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, f"recipes/{recipe}", *flags], check=True)


def other_task() -> list[dict[str, str]]:
    """Worked solutions of another task, as the base policy's prompt asks for them."""
    task, prompt, rng = arithmetic(), load_prompt("r1_zero"), Random(0)
    rows = []
    for row in islice(task.problems("train", 0), OTHER_PROBLEMS):
        working, answer = task.work(row, rng)
        response = f" {working} </think> <answer> {answer} </answer>"
        rows.append({"prompt": prompt.replace("{question}", row["problem"]), "response": response})
    return rows


def write(file: Path, rows: list[dict[str, str]]) -> None:
    """Rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
