"""`trl-ext init FOLDER`: your own project, made of the recipe and the loss that the package has as examples."""

from __future__ import annotations

import ast
from pathlib import Path

from trl_ext.errors import InputError
from trl_ext.runs.recipes import RECIPES, shipped

_RECIPE = '''"""GRPO on math with the loss of my_loss.py. Without arguments: mini-MATH and a tiny policy built locally.

    python train.py
    python train.py --policy_loss_options width=0.5 --seed 1
    accelerate launch train.py --max_steps 40

Settings come from a YAML file (`--config`, default train.yaml), then from the command line.
"""'''
_LOSS = '"""The project\'s loss: a function of tensors, which train.yaml names and test_my_loss.py tests."""'
_TEST = "test_my_loss.py"
# Lines of grpo_math.yaml, and what a project has in place of each.
_CHANGED = {
    "preset: grpo_clip\n": "preset: grpo_clip\npolicy_loss: my_loss.py:soft_clip  # in place of the preset's\n",
    "\ntrain_batch_size: 128\n": "\ntrain_batch_size: 64  # half a rollout: in its second step the ratios are not 1\n",
}
_README = """# {name}

| file | what it is |
|---|---|
| `train.py` | the recipe: parse, assemble, train |
| `train.yaml` | its settings; any of them is a flag too, and `python train.py --help` lists them |
| `my_loss.py` | the loss |
| `test_my_loss.py` | its value and its gradient by hand |

In this folder:

```bash
python train.py                      # mini-MATH and a tiny policy built locally, in minutes on two CPU cores
pip install pytest && pytest         # seconds
trl-ext explain train.yaml           # what is optimized, before anything is trained
trl-ext browse runs/train            # its rollouts as one HTML file
```

The second run goes to `runs/train-2`, and so on; `--resume auto` resumes one that was interrupted.
"""


def write_project(folder: Path) -> str:
    """Write the files and return what to do next.

    Raises:
        InputError: the folder is there and not empty, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} is there and not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in project_files(folder.resolve().name).items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    return f"{folder} is ready:\n\n    cd {folder}\n    python train.py\n    pip install pytest && pytest\n"


def project_files(name: str) -> dict[str, str]:
    """The text of every file of a project, by its name."""
    recipe, loss, test = (_read(f"recipes/{script}") for script in (RECIPES["grpo"].script, "my_loss.py", _TEST))
    settings = _read(f"recipes/{Path(RECIPES['grpo'].script).with_suffix('.yaml')}")
    for line, own in _CHANGED.items():
        settings = settings.replace(line, own)
    return {
        "train.py": _with_docstring(recipe, _RECIPE),
        "train.yaml": settings,
        "my_loss.py": _with_docstring(loss, _LOSS),
        _TEST: test,
        "README.md": _README.format(name=name),
        ".gitignore": "/runs/\n__pycache__/\n",
    }


def _read(path: str) -> str:
    return shipped(path).read_text(encoding="utf-8")


def _with_docstring(source: str, docstring: str) -> str:
    end = ast.parse(source).body[0].end_lineno
    return docstring + "\n" + "".join(source.splitlines(keepends=True)[end:])
