"""What is compared, on what, with how many seeds: all of it fixed, checked and written down before the first run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trl_ext.errors import InputError
from trl_ext.io import digest_of, plain, read_json, read_yaml, write_json
from trl_ext.redaction import redact
from trl_ext.registry import unknown
from trl_ext.tools.experiments.preflight import check_runs
from trl_ext.tools.experiments.runspec import GRPO, RunSpec, Settings, named_in_errors, read_experiment, refuse_taken
from trl_ext.tools.experiments.verdict.sequential import Design

PLAN = "plan.json"
VERDICTS = 2  # that a task gives: at equal samples and at equal wall-clock


@dataclass(frozen=True)
class TaskSpec:
    """Problems, a policy and a budget that every arm has: a YAML file of `recipes/try`, or your own."""

    name: str
    config: str  # GRPO's YAML file, relative to the task's
    settings: Settings = field(default_factory=dict)  # over that file's
    about: str = ""  # in words

    def __post_init__(self) -> None:
        refuse_taken(self.settings, "`try`", ("save_strategy",))


@dataclass(frozen=True)
class Arm:
    """One side of the comparison."""

    label: str
    settings: Settings  # over the task's


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison that can be run."""

    idea: Arm
    against: Arm
    tasks: tuple[TaskSpec, ...]
    design: Design
    margin: float  # differences below it are called equal
    more: tuple[str, ...] = ()  # arguments of all runs

    @property
    def arms(self) -> tuple[Arm, Arm]:
        """Both."""
        return self.idea, self.against

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.idea.label} against {self.against.label}"


def arm_of(text: str) -> Arm:
    """The arm that a preset, a loss, your own loss or `NAME=VALUE[,NAME=VALUE]` describes.

    Raises:
        InputError: it is none of them.
    """
    from trl_ext.algorithms.policy_losses import POLICY_LOSSES  # imports torch, which `--help` does not need
    from trl_ext.algorithms.presets import PRESETS

    if re.match(r"\w+=", text):
        settings = dict(pair.split("=", 1) for pair in re.split(r",(?=\w+=)", text))
    elif text in PRESETS:
        settings = {"preset": text}
    elif text in POLICY_LOSSES or ":" in text:
        settings = {"policy_loss": text}
    else:
        raise InputError(f"{unknown('preset or policy loss', text, {*PRESETS, *POLICY_LOSSES})}, or file.py:function")
    return Arm(re.sub(r"[^\w=.+-]", "_", text.rpartition(":")[2]), settings)


def arms_of(idea: str, against: str) -> tuple[Arm, Arm]:
    """Both arms; the idea's settings are over those that it is compared with, so that nothing else differs."""
    theirs, ours = arm_of(against), arm_of(idea)
    label = ours.label if ours.label != theirs.label else f"{ours.label}-2"
    return Arm(label, {**theirs.settings, **ours.settings}), theirs


def read_tasks(given: Sequence[str], shipped: Path) -> tuple[TaskSpec, ...]:
    """Tasks from YAML files, folders of them, or names of shipped ones; all shipped ones where none is given.

    Raises:
        InputError: there is no such file, it does not describe a task, or two have the same name.
    """
    known = {path.stem: path for path in sorted(shipped.glob("*.yaml"))}
    paths: list[Path] = [] if given else list(known.values())
    for text in given:
        path = known.get(text, Path(text))
        if not path.exists():
            raise InputError(f"--tasks: {unknown('task', text, known)}, or a YAML file, or a folder of them")
        paths += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not paths:
        raise InputError(f"--tasks: no YAML file in {', '.join(given) or str(shipped)}")
    if len({path.stem for path in paths}) < len(paths):
        raise InputError(f"--tasks: two files have the same name: {', '.join(map(str, paths))}")
    return tuple(_read_task(path) for path in paths)


def _read_task(path: Path) -> TaskSpec:
    """With its `config` from the working directory; one whose validations differ in their problems is refused."""
    task = read_experiment(path, TaskSpec, name=path.stem)
    with named_in_errors(path):
        config = str(RunSpec(GRPO, task.config).located(path.parent).config)
        settings = {**(read_yaml(Path(config)) or {}), **task.settings}
        last, between = settings.get("final_validation_problems"), settings.get("validation_problems")
        if last not in (None, between):
            raise ValueError(
                f"final_validation_problems is {last} and validation_problems {between}; a curve needs the same "
                "problems at every point: leave final_validation_problems out"
            )
    return dataclasses.replace(task, config=config)


def run_of(plan: ComparisonPlan, task: TaskSpec, arm: Arm) -> RunSpec:
    """What an arm's runs on a task are."""
    common = {"save_strategy": "no", "disable_tqdm": True, **task.settings}
    return RunSpec(GRPO, task.config, arm.settings, common=common, more=plan.more)


def run_name(task: TaskSpec, arm: Arm, seed: int) -> str:
    """Of the folder that a run is in."""
    return f"{task.name},{arm.label},seed={seed}"


def commands_of(plan: ComparisonPlan, seeds: int, recipes: Path) -> dict[str, list[str]]:
    """Script and arguments of the runs of the first seeds, by name; arms take turns in who is first."""
    return {
        run_name(task, arm, seed): run_of(plan, task, arm).command(recipes, seed)
        for seed in range(seeds)
        for task in plan.tasks
        for arm in (plan.arms if seed % 2 else plan.arms[::-1])
    }


def check(plan: ComparisonPlan) -> None:
    """Parse the settings of both arms on every task, with losses loaded and tried on an example, without a model.

    Raises:
        InputError: with the task, the arm and what does not fit.
    """
    check_runs({f"task {task.name!r}, {a.label}": run_of(plan, task, a) for task in plan.tasks for a in plan.arms})


def fix(plan: ComparisonPlan, output: Path) -> None:
    """Write the plan down, or find it as it was; looks that were not fixed beforehand would make intervals too narrow.

    Raises:
        InputError: the folder has another plan, or a file that it is made of has changed since.
    """
    now, path = redact(plain({**asdict(plan), "files": _digests(plan)})), output / PLAN
    if not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
        return
    before = read_json(path)
    if other := [name for name in now if before.get(name) != now[name]]:
        earlier = before.get("files", {})
        changed = [name for name, digest in now["files"].items() if earlier.get(name, digest) != digest]
        what = f"{', '.join(changed)} has changed" if changed else f"{other[0]} was another"
        raise InputError(f"{path}: {what}; choose another --output_dir, or remove {output}")


def _digests(plan: ComparisonPlan) -> dict[str, str]:
    """What the files say that the plan names: tasks' recipes, and your own functions."""
    paths = {task.config for task in plan.tasks}
    for arm in plan.arms:
        places = (str(value).rpartition(":")[0] for value in arm.settings.values())
        paths |= {place for place in places if place.endswith(".py")}
    return {path: digest_of(Path(path)) for path in sorted(paths)}
