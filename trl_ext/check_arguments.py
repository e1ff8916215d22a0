"""Parse recipes' arguments and stop: what `pipeline` runs before its first stage.

python -m trl_ext.check_arguments '[["grpo", "recipes/grpo_math.yaml", ["--preset", "dapo"]]]'
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from trl_ext.arguments import parse
from trl_ext.expert_iteration_recipe import EXPERT_ITERATION_SETTINGS
from trl_ext.grpo_recipe import GRPO_SETTINGS
from trl_ext.sft_recipe import SFT_SETTINGS

SETTINGS = {"grpo": GRPO_SETTINGS, "sft": SFT_SETTINGS, "expert_iteration": EXPERT_ITERATION_SETTINGS}


def main() -> None:
    """Exit with 2 and the error on stderr at the first stage that does not parse."""
    for number, (recipe, default, arguments) in enumerate(json.loads(sys.argv[1]), start=1):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parse(SETTINGS[recipe], None, Path(default), arguments)
        except SystemExit:
            reason = " ".join(said.getvalue().rpartition("error: ")[2].split())  # one line, also of a YAML error
            print(f"stage {number} ({recipe}): {reason}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
