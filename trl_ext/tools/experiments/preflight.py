"""The settings of several runs are read, and nothing else is done: the check before a pipeline or a lab begins.

It takes a process of its own, which leaves no device in use and answers with one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trl_ext.errors import InputError, SettingsError


@dataclass(frozen=True)
class Planned:
    """A run to be checked."""

    recipe: str
    default_config: str  # the recipe's own YAML file
    arguments: list[str]
    is_last: bool = True  # of a pipeline's stages, the one that no other starts from; a run of its own is


@dataclass(frozen=True)
class Refusal:
    """Why a run cannot be started."""

    stage: int  # its number in the plan, from 1
    field: str | None  # the setting at fault, where it is known
    message: str  # one line


def refusal_of(plan: Sequence[Planned], rules: str | None = None) -> Refusal | None:
    """The first run that cannot be started, or breaks a leaderboard's `rules`; None where all can.

    Raises:
        InputError: the check itself did not end well.
    """
    given = json.dumps({"plan": [asdict(planned) for planned in plan], "rules": rules})
    command = [sys.executable, "-m", "trl_ext.tools.experiments.preflight"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"the settings could not be checked: {done.stderr.strip()[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return None if answer is None else Refusal(**answer)


def main() -> None:
    """Answer, in the last line of stdout, with the first refusal or null."""
    given = json.load(sys.stdin)
    found = first_refusal([Planned(**planned) for planned in given["plan"]], given["rules"])
    print(json.dumps(None if found is None else asdict(found)))


def first_refusal(plan: Sequence[Planned], rules: str | None) -> Refusal | None:
    """`refusal_of`, in this process."""
    for number, planned in enumerate(plan, start=1):
        try:
            _check(planned, rules)
        except SettingsError as error:
            return Refusal(number, error.field, " ".join(str(error).split()))  # one line, also of a YAML error
        except SystemExit as end:
            if end.code:
                raise
            return Refusal(number, None, "--help shows settings and starts no run")
    return None


def _check(planned: Planned, rules: str | None) -> None:
    from trl_ext.data.load import READERS
    from trl_ext.recipes.cli import read_settings
    from trl_ext.runs.recipes import RECIPES
    from trl_ext.tools.experiments.rules import RULES, violations

    settings = RECIPES[planned.recipe].settings()
    task, _, config = read_settings(settings, None, Path(planned.default_config), planned.arguments)
    for name in ("dataset", "traces"):
        path = Path(str(getattr(task, name, "")).replace("{split}", "train"))
        if path.suffix in READERS and not path.is_file():
            raise SettingsError(f"{name}: no file {str(path)!r}", field=name)
    if rules is not None and (broken := violations(RULES[rules], task, config, is_last=planned.is_last)):
        raise SettingsError(f"the rules {rules!r} are broken: {'; '.join(broken)}", field="rules")


if __name__ == "__main__":
    main()
