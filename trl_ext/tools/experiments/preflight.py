"""The settings of several runs are read, and nothing else is done: the check before an experiment begins.

It takes a process of its own, which leaves no device in use and answers with one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from trl_ext.errors import InputError, SettingsError
from trl_ext.runs.recipes import RECIPES, shipped
from trl_ext.tools.experiments.runspec import RunSpec


def check_runs(runs: Mapping[str, RunSpec], rules: str | None = None, not_last: Collection[str] = ()) -> None:
    """Refuse runs that cannot be started, or break a leaderboard's `rules`.

    Args:
        runs: by what they are called in messages.
        not_last: those from which others start, whose last validation is no result.

    Raises:
        InputError: with the first of them and what does not fit, in a line; or the check itself did not end well.
    """
    plan = {label: (run.recipe, run.arguments()) for label, run in runs.items()}
    given = json.dumps({"plan": plan, "rules": rules, "not_last": list(not_last)})
    command = [sys.executable, "-m", "trl_ext.tools.experiments.preflight"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"the settings could not be checked: {done.stderr.strip()[-2000:]}")
    if refusal := json.loads(done.stdout.splitlines()[-1]):
        raise InputError(refusal)


def main() -> None:
    """Answer, in the last line of stdout, with the first refusal or null."""
    given, refusal = json.load(sys.stdin), None
    runs = {label: RunSpec(recipe, more=arguments) for label, (recipe, arguments) in given["plan"].items()}
    try:
        check_in_this_process(runs, given["rules"], given["not_last"])
    except InputError as error:
        refusal = str(error)
    print(json.dumps(refusal))


def check_in_this_process(
    runs: Mapping[str, RunSpec], rules: str | None = None, not_last: Collection[str] = ()
) -> None:
    """`check_runs`, for which this process may use a device."""
    for label, run in runs.items():
        try:
            _check(run, rules, is_last=label not in not_last)
        except SettingsError as error:
            raise InputError(f"{label}: {' '.join(str(error).split())}") from error  # one line, also of a YAML error
        except SystemExit as end:
            if end.code:
                raise
            raise InputError(f"{label}: --help shows settings and starts no run") from end


def _check(run: RunSpec, rules: str | None, is_last: bool) -> None:
    from trl_ext.data.files import READERS
    from trl_ext.recipes.cli import read_settings
    from trl_ext.tools.experiments.rules import RULES, violations

    recipe = RECIPES[run.recipe]
    own = shipped(f"recipes/{recipe.script}").with_suffix(".yaml")
    task, _, config = read_settings(recipe.settings(), None, own, run.arguments())
    for name in ("dataset", "traces"):
        path = Path(str(getattr(task, name, "")).replace("{split}", "train"))
        if path.suffix in READERS and not path.is_file():
            raise SettingsError(f"{name}: no file {str(path)!r}")
    if rules is not None and (broken := violations(RULES[rules], task, config, is_last)):
        raise SettingsError(f"the rules {rules!r} are broken: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
