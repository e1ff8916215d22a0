"""Run docs/grpo.ipynb from top to bottom and keep what its cells have put out.

python -m scripts.run_notebook                                       # what is committed; five minutes on two cores
python -m scripts.run_notebook --output /tmp/short.ipynb STEPS=2     # with other values in its parameter cell
python -m scripts.run_notebook --form --output /tmp/form.ipynb 'MODEL="smollm2"'     # the one for Colab and Kaggle
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from scripts.notebook_form import form

NOTEBOOK = Path(__file__).parents[1] / "docs" / "grpo.ipynb"


def executed(parameters: dict[str, str], folder: Path, timeout: int = 1200, notebook: Any = None) -> Any:
    """The notebook after all of its cells ran in `folder`, in a kernel of its own; an error if one raises.

    Args:
        parameters: name -> value, as Python writes it.
        notebook: docs/grpo.ipynb if None.

    Raises:
        ValueError: the parameter cell has no such name.
    """
    notebook = notebook or nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    for name, value in parameters.items():
        cell.source, count = re.subn(rf"^{name} = \S+", f"{name} = {value}", cell.source, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"the parameter cell of {NOTEBOOK.name} has no {name!r}:\n{cell.source}")
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", coalesce_streams=True, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times, which change with every run
    return notebook


def main() -> None:
    """Execute, and write the notebook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parameters", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--form", action="store_true", help="the one for Colab and Kaggle; --output is needed")
    parser.add_argument("--output", type=Path, default=NOTEBOOK)
    args = parser.parse_args()
    if args.form and args.output == NOTEBOOK:
        parser.error("--form needs an --output: its outputs are not committed")
    chosen = form() if args.form else None
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(dict(given.split("=", 1) for given in args.parameters), Path(folder), notebook=chosen)
    notebook.metadata.language_info = {"name": "python"}  # without the version that happened to run it
    nbformat.write(notebook, args.output)


if __name__ == "__main__":
    main()
