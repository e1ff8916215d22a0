"""`trl-ext NAME ...`: runs a script of `recipes/` or a module, as `python` would; imports neither torch nor TRL."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from trl_ext import __version__
from trl_ext.errors import InputError
from trl_ext.recipes.project import write_project
from trl_ext.recipes.settings_help import kept_help, topic_of
from trl_ext.registry import UnknownName, unknown
from trl_ext.runs.recipes import RECIPES, programs, shipped

FOLDERS = ("recipes", "accelerate_configs")
OWN = {  # what this command does itself
    "init": "Write a project of your own into a new folder: a recipe, its YAML, a loss, a test.",
    "path": "Print where a command's script or a file of recipes/ or accelerate_configs/ is; alone, list the files.",
}
OF_HUB = {  # what `hub` does, by a name of its own
    "merge": "Write the whole model that an adapter's folder and its base model make into a new folder.",
    "push": "Upload a finished run to the Hugging Face Hub.",
}
ABOUT = """usage: trl-ext COMMAND [ARGUMENTS]

Reinforcement learning on math with a language model. `trl-ext COMMAND --help` says more of a command.
"""
LAUNCH = """
`trl-ext {name}` is recipes/{script} in one process. Several processes are started by accelerate:

    accelerate launch --config_file "$(trl-ext path accelerate_configs/two_gpus_zero2.yaml)" \\
        "$(trl-ext path {name})" --NAME VALUE ...

A file in an argument of trl-ext that begins with recipes/ or accelerate_configs/ and is not in this folder is the
package's; `trl-ext path FILE` prints where it is."""


def main() -> None:
    """Answer for the command itself, or become the program that is named."""
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help", "help"):
        print(overview())
        return
    name, rest = given[0].replace("_", "-"), given[1:]
    if name in OF_HUB:
        name, rest = "hub", [name, *rest]
    try:
        if name in ("--version", "-V"):
            print(f"trl-ext {__version__}")
        elif name in OWN:
            _do_itself(name, rest)
        else:
            run(name, rest)
    except (InputError, UnknownName) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def overview() -> str:
    """What `trl-ext --help` prints: every command with the first sentence of what its program says of itself."""
    known = programs()
    trains = {name: about(target) for name, target in known.items() if name.replace("-", "_") in RECIPES}
    others = {name: about(target) for name, target in known.items() if name not in trains} | OF_HUB
    width = max(map(len, [*known, *OWN])) + 4
    lines = [ABOUT]
    for head, group in (("Your own project", OWN), ("Recipes that train", trains), ("Programs", others)):
        lines += [f"{head}:"]
        for name, text in group.items():
            lines += textwrap.wrap(text, 120, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
    return "\n".join(lines)


def about(target: str) -> str:
    """The first sentence of a program's docstring."""
    text = ast.get_docstring(ast.parse(_source(target).read_text(encoding="utf-8"))) or ""
    text = re.sub(r"^`[^`]*`: ", "", text.partition("\n\n")[0].replace("\n", " "))
    return text[:1].upper() + re.split(r"(?<=\.)\s", text[1:], maxsplit=1)[0]


def _source(target: str) -> Path:
    if target.endswith(".py"):
        return shipped(f"recipes/{target}")
    module = Path(__file__).parents[2].joinpath(*target.split("."))
    return module / "__main__.py" if module.is_dir() else module.with_suffix(".py")


def run(name: str, arguments: Sequence[str]) -> None:
    """Become the program of that name, in this process; a plain `--help` is followed by how to start several ranks.

    Raises:
        UnknownName: there is no such command; the message has the nearest and all of them.
    """
    known = programs()
    if name not in known:
        raise unknown("command", name, [*known, *OWN, *OF_HUB])
    script = shipped(f"recipes/{known[name]}")
    program = [str(script)] if script.suffix == ".py" else ["-m", known[name]]
    command = [sys.executable, *program, *map(in_package, arguments)]
    if topic_of(arguments) == "" and kept_help(script).is_file():  # a script with settings, which can have ranks
        status = subprocess.run(command, check=False).returncode
        print(LAUNCH.format(name=name, script=known[name]))
        sys.exit(status)
    os.execv(sys.executable, command)


def in_package(argument: str) -> str:
    """An argument as the program gets it: a file of the package by its path, where this folder does not have it."""
    match = re.search(rf"(?:^|=)((?:{'|'.join(FOLDERS)})/[^:]*)", argument)
    if match is None or Path(match[1]).exists() or not shipped(match[1]).is_file():
        return argument
    return argument[: match.start(1)] + str(shipped(match[1])) + argument[match.end(1) :]


def _do_itself(name: str, arguments: Sequence[str]) -> None:
    is_help = topic_of(arguments) is not None
    if is_help or (len(arguments) != 1 and (name, len(arguments)) != ("path", 0)):
        print(f"usage: trl-ext {name} {'FOLDER' if name == 'init' else '[COMMAND_OR_FILE]'}\n\n{OWN[name]}")
        sys.exit(0 if is_help else 2)
    if name == "init":
        print(write_project(Path(arguments[0])))
    else:
        print(path_of(arguments[0]) if arguments else "\n".join(files()))


def files() -> dict[str, Path]:
    """The files of `recipes/` and `accelerate_configs/` that are written by people, by their path there."""
    paths = [path for folder in FOLDERS for path in shipped(folder).rglob("*") if path.suffix in (".py", ".yaml")]
    return {path.relative_to(shipped()).as_posix(): path for path in sorted(paths)}


def path_of(name: str) -> Path:
    """Where the script of a command is, or a file of the package.

    Raises:
        InputError: it is neither; the message has the nearest one.
    """
    scripts = {name: shipped(f"recipes/{target}") for name, target in programs().items() if target.endswith(".py")}
    known = {**files(), **scripts}
    path = known.get(name) or known.get(name.replace("_", "-"))
    if path is None:
        nearest = difflib.get_close_matches(name, known, n=3)
        hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        raise InputError(
            f"no command has a script and the package no file {name!r}.{hint} `trl-ext path` lists the files"
        )
    return path
