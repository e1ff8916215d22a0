"""An evaluation as tasks of lm-eval, lighteval and inspect: one folder, with problems, prompts and settings as here.

Their engines sample; our grader grades, in its workers, through `trl_ext.evaluation.exported`, which the written files
import.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import InputError
from trl_ext.generation.completion import Sampling
from trl_ext.io import write_json, write_jsonl, write_text

DATA, TASK = "data/test.jsonl", "task.json"
COLUMNS = ("prompt", "answer", "problem", "level", "subject", "row")


@dataclass(frozen=True)
class ExportedTask:
    """What decides an evaluation's figures, next to the problems and the model."""

    name: str
    grader: str  # a name of `GRADERS`, or file.py:function
    options: dict[str, Any]
    samples: int
    sampling: Sampling

    @property
    def task_name(self) -> str:
        """A name that every harness takes."""
        return f"trl_ext_{re.sub(r'[^a-z0-9]+', '_', self.name.lower()).strip('_')}"


def write_tasks(folder: Path, task: ExportedTask, problems: Sequence[Mapping[str, Any]], model: str | None) -> str:
    """Write the files, and return what they are run with.

    Raises:
        InputError: the folder is there and not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"export: {str(folder)!r} is there and not empty; name a new folder")
    (folder / "lm_eval").mkdir(parents=True)
    (folder / "data").mkdir()
    grader, _, function = task.grader.partition(":")
    if grader.endswith(".py"):
        shutil.copy(grader, folder / Path(grader).name)
        task = dataclasses.replace(task, grader=f"{Path(grader).name}:{function}")
    write_jsonl(folder / DATA, [{name: row[name] for name in COLUMNS if name in row} for row in problems])
    write_json(folder / TASK, dataclasses.asdict(task), indent=2)
    write_text(folder / "lm_eval" / f"{task.task_name}.yaml", _lm_eval(task))
    write_text(folder / "lm_eval" / "utils.py", LM_EVAL_UTILS)
    write_text(folder / "lighteval_task.py", _filled(LIGHTEVAL, task))
    write_text(folder / "inspect_task.py", _filled(INSPECT, task))
    readme = _readme(task, model or "MODEL", folder.name)
    write_text(folder / "README.md", readme)
    return f"{readme}\n{len(problems)} problems and the tasks are in {folder}"


def _lm_eval(task: ExportedTask) -> str:
    """lm-eval's YAML; its `!function` is a tag that a dumper would quote."""
    drawn, functions = task.sampling, ("custom_dataset", "process_results")
    generation = {"until": list(drawn.stop), "max_gen_toks": drawn.max_tokens, "do_sample": drawn.temperature > 0}
    if drawn.temperature > 0:
        generation |= {"temperature": drawn.temperature, "top_p": drawn.top_p}
    metric = {"aggregation": "mean", "higher_is_better": True}
    keep = [{"function": "take_first_k", "k": task.samples}]
    settings = {
        "task": task.task_name,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "num_fewshot": 0,
        "generation_kwargs": generation,
        "repeats": task.samples,
        "filter_list": [{"name": "all", "filter": keep}],
        "metric_list": [{"metric": name, **metric} for name in ("accuracy", "format")],
    }
    lines = [f"{name}: !function utils.{name}" for name in functions]
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) + "\n".join(lines) + "\n"


def _filled(template: str, task: ExportedTask) -> str:
    drawn = task.sampling
    generation = {"max_tokens": drawn.max_tokens, "temperature": drawn.temperature, "seed": drawn.seed}
    if drawn.temperature > 0:
        generation["top_p"] = drawn.top_p
    values = {
        "NAME": task.task_name,
        "STOP": repr(list(drawn.stop)),
        "MAX_TOKENS": str(drawn.max_tokens),
        "SAMPLES": str(task.samples),
        "GENERATION": ", ".join(f"{name}={value!r}" for name, value in generation.items()),
    }
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], template)


def _readme(task: ExportedTask, model: str, folder: str) -> str:
    drawn = task.sampling
    least = f" min_tokens={drawn.min_tokens} (its HF engine: min_new_tokens={drawn.min_tokens})"
    minimum = (
        f"\nlm-eval's engines name the least length differently: --gen_kwargs{least}.\n" if drawn.min_tokens else ""
    )
    # Given max_new_tokens, it cuts prompts to as many tokens (0.13.0); the length is the task's generation_size.
    sampled = f"temperature:{drawn.temperature},top_p:{drawn.top_p}"
    # Its default is to render the tokenizer's chat template, around prompts that are rendered already.
    lighteval = f"model_name={model},override_chat_template=false,generation_parameters={{{sampled}}}"
    return README.format(
        name=task.task_name, model=model, folder=folder, grader=task.grader, minimum=minimum,
        length=drawn.max_tokens, stop=", ".join(map(repr, drawn.stop)) or "none", first_stop=(*drawn.stop, "")[0],
        lighteval=lighteval,
        greedy="" if drawn.temperature > 0 else " -M do_sample=false",  # inspect's HF engine samples unless told
    )  # fmt: skip


LM_EVAL_UTILS = '''"""What the YAML file next to this one calls."""

from pathlib import Path

from trl_ext.evaluation.exported import Exported

EXPORTED = Exported.read(Path(__file__).parents[1])


def custom_dataset(**_):
    return {"test": EXPORTED.dataset()}


def process_results(doc, results):
    return EXPORTED.means(results, doc["answer"])
'''

LIGHTEVAL = '''"""A custom task of lighteval. Temperature and top_p are the model's arguments there."""

from pathlib import Path

import numpy as np
from lighteval.metrics.metrics_sample import SampleLevelComputation
from lighteval.metrics.utils.metric_utils import SampleLevelMetric
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc, SamplingMethod

from trl_ext.evaluation.exported import Exported

EXPORTED = Exported.read(Path(__file__).parent)


class Graded(SampleLevelComputation):
    def compute(self, doc, model_response, **_):
        return EXPORTED.means([model_response.text], doc.specific["answer"])["accuracy"]


def prompt(line, task_name=None):
    answer = line["answer"]
    choices = list(answer) if isinstance(answer, list) else [str(answer)]
    return Doc(task_name=task_name, query=line["prompt"], choices=choices, gold_index=0, specific={"answer": answer})


TASKS_TABLE = [
    LightevalTaskConfig(
        name="@NAME@",
        prompt_function=prompt,
        hf_repo=str(EXPORTED.folder / "data"),
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        generation_size=@MAX_TOKENS@,
        stop_sequence=@STOP@,
        num_samples=[@SAMPLES@],
        metrics=[
            SampleLevelMetric(
                metric_name="accuracy",
                higher_is_better=True,
                category=SamplingMethod.GENERATIVE,
                sample_level_fn=Graded(),
                corpus_level_fn=np.mean,
            )
        ],
    )
]
'''

INSPECT = '''"""A task of inspect: its values are C and I, and the explanation is our grader's reason."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr
from inspect_ai.solver import generate

from trl_ext.evaluation.exported import Exported

EXPORTED = Exported.read(Path(__file__).parent)


@scorer(metrics=[accuracy(), stderr()])
def graded():
    async def score(state, target):
        keeps_stop = state.model.api == "hf"  # nothing has to be put back there, and it never says "max_tokens"
        cut = keeps_stop or state.output.stop_reason == "max_tokens"
        grade = EXPORTED.grade(state.output.completion, state.metadata["answer"], cut=cut)
        return Score(value=CORRECT if grade.correct else INCORRECT, answer=grade.answer, explanation=grade.reason)

    return score


@task
def @NAME@():
    rows = EXPORTED.problems()
    samples = [Sample(input=row["prompt"], target=EXPORTED.accepted(row), metadata=row) for row in rows]
    return Task(
        dataset=MemoryDataset(samples),
        solver=generate(),
        scorer=graded(),
        epochs=@SAMPLES@,
        config=GenerateConfig(@GENERATION@, stop_seqs=@STOP@),
    )
'''

README = """# {name}

An evaluation of trl_ext as tasks of other harnesses: the prompts as they are, the sampling settings, and the grader
`{grader}`, which trl_ext has to be installed for where they run.

```bash
lm_eval run --model hf --model_args pretrained={model} --include_path {folder}/lm_eval --tasks {name} --log_samples \\
    --output_path lm_eval_logs
lighteval accelerate "{lighteval}" "{name}|0" \\
    --custom-tasks {folder}/lighteval_task.py
inspect eval {folder}/inspect_task.py --model hf/{model} -M "chat_template='{{{{ messages[0].content }}}}'"{greedy}
```
{minimum}
Generation stops at {stop}, or after {length} tokens. lm-eval and lighteval take the stop string away from the response,
so the task puts it back; they do not say whether a response was cut off, so one that ends by itself or by its length
within the answer is graded as if the answer were closed. inspect's HF engine leaves the stop string where it is, so
that there such a response is graded as here. All three give the prompts as they are, inspect by the chat template of
its command, without which it begins them with "user: ".

What was drawn can be graded here too, with lm-eval's verdict for comparison:

```bash
trl-ext evaluate --responses lm_eval_logs/.../samples_{name}_DATE.jsonl --output_dir runs/{name} \\
    --response_fields prompt=arguments.gen_args_0.arg_0 response=resps.0.0 truth=doc.answer verdict=accuracy \\
    --response_stop "{first_stop}"
```
"""
