"""Find what an interrupted `pip install` left half-done in a virtual environment, so that pip installs it again.

pip writes a package's RECORD last, so a package whose RECORD is missing, or lists a file that is missing or has
another size, is incomplete. pip itself only looks at the metadata and would call it installed. Standard library only.

    python scripts/repair_venv.py .venv
"""

import argparse
import csv
import shutil
from pathlib import Path


def is_complete(dist_info: Path) -> bool:
    """Whether every file that the RECORD of an installed package lists is there, in its size."""
    record = dist_info / "RECORD"
    if not record.is_file():
        return False
    with record.open(newline="", encoding="utf-8") as f:
        for path, _, size in csv.reader(f):
            file = dist_info.parent / path
            if path.endswith(".pyc"):
                continue  # written by Python, not by pip
            if not file.is_file() or (size and file.stat().st_size != int(size)):
                return False
    return True


def repair(venv: Path) -> list[str]:
    """Forget the packages of `venv` that are incomplete; return their names."""
    forgotten = []
    for site in venv.glob("lib/python*/site-packages"):
        for leftover in site.glob("~*"):  # what pip was replacing when it was stopped
            shutil.rmtree(leftover, ignore_errors=True)
        for dist_info in sorted(site.glob("*.dist-info")):
            if not is_complete(dist_info):
                shutil.rmtree(dist_info)
                forgotten.append(dist_info.name.removesuffix(".dist-info"))
    return forgotten


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="the environment's folder")
    for name in repair(parser.parse_args().venv):
        print(f"[set-up] half-installed, will be installed again: {name}")
