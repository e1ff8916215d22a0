"""Parse recipes' arguments and stop: what `pipeline` and the lab run before their first run.

python -m trl_ext.experiments.preflight '[["grpo", "recipes/grpo_math.yaml", ["--preset", "dapo"]]]'

A second argument names the rules that a leaderboard's stages have to keep to.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import NoReturn

from trl_ext.data.load import READERS
from trl_ext.experiments.rules import RULES, violations
from trl_ext.recipes.cli import parse
from trl_ext.runs.recipes import RECIPES


def main() -> None:
    """Exit with 2 and the error on stderr at the first stage that does not parse or breaks a rule."""
    plan = json.loads(sys.argv[1])
    rules = RULES[sys.argv[2]] if len(sys.argv) > 2 else None
    for number, (recipe, default, arguments) in enumerate(plan, start=1):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                task, model, config = parse(RECIPES[recipe].settings(), None, Path(default), arguments)
        except SystemExit:
            reason = " ".join(said.getvalue().rpartition("error: ")[2].split())  # one line, also of a YAML error
            _refuse(number, recipe, reason)
        for name in ("dataset", "traces"):
            path = Path(str(getattr(task, name, "")).replace("{split}", "train"))
            if path.suffix in READERS and not path.is_file():
                _refuse(number, recipe, f"{name}: no file {str(path)!r}")
        if rules is not None:
            broken = violations(rules, task, config, is_last=number == len(plan))
            if broken:
                _refuse(number, recipe, f"the rules {sys.argv[2]!r} are broken: {'; '.join(broken)}")
        if model.use_peft and number < len(plan):
            _refuse(
                number,
                recipe,
                "use_peft: only the last stage may end in an adapter; the next one needs a whole model",
            )


def _refuse(number: int, recipe: str, reason: str) -> NoReturn:
    print(f"stage {number} ({recipe}): {reason}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
