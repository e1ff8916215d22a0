"""The list of planted faults fits the code, and the script that plants them tells caught from survived."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "plant_faults.py"

spec = importlib.util.spec_from_file_location("plant_faults", SCRIPT)
assert spec is not None
assert spec.loader is not None
plant_faults = sys.modules["plant_faults"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plant_faults)

FAULTS = plant_faults.read_faults(plant_faults.FAULTS)


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_fault_changes_one_line_in_effect_and_names_real_tests(file: str) -> None:
    parsers = {".yaml": yaml.safe_load, ".toml": tomllib.loads, ".css": str.split}
    parsed = parsers.get(Path(file).suffix, lambda text: ast.dump(ast.parse(text)))
    original = parsed((ROOT / file).read_text(encoding="utf-8"))
    for fault in (fault for fault in FAULTS if fault.file == file):
        text = fault.planted(ROOT)
        assert text is not None, f"{fault}: not exactly once in the file"
        assert parsed(text) != original, fault
        assert "\n" not in fault.find.strip(), fault
        assert fault.tests, fault
        assert all(exists(test) for test in fault.tests), fault


def exists(test: str) -> bool:
    """Whether there is that file or folder, and in the file a function of the name behind its last `::`."""
    file, _, name = test.partition("::")
    function = name.split("::")[-1].partition("[")[0]
    return (ROOT / file).exists() and (not name or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"))


def test_no_fault_is_listed_twice() -> None:
    assert len({(fault.file, fault.find, fault.replace) for fault in FAULTS}) == len(FAULTS)


ENTRY = """
[[fault]]
file = "trl_ext/algorithms/kl.py"
find = '{find}'
replace = '{replace}'
tests = ["tests/algorithms/test_kl.py"]
"""
CAUGHT = {"find": "return logp - ref_logp", "replace": "return ref_logp - logp"}
AT_IMPORT = {"find": "KL_ESTIMATORS = Registry(", "replace": "KL_ESTIMATORS = 1 / 0, Registry("}
STALE = {"find": "return nothing_of_this_kind", "replace": "return 0"}


def planted(tmp_path: Path, *entries: dict[str, str], only: str = "") -> tuple[int, str]:
    """Exit status and table of the script for a list of its own."""
    faults = tmp_path / "faults.toml"
    faults.write_text("".join(ENTRY.format(**entry) for entry in entries))
    command = [sys.executable, SCRIPT, "--faults", faults, "--jobs", "1", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_fault_is_caught_and_the_checkout_is_left_alone(tmp_path: Path) -> None:
    before = (ROOT / "trl_ext" / "algorithms" / "kl.py").read_bytes()
    status, table = planted(tmp_path, CAUGHT, AT_IMPORT)
    assert [line.split("  ")[0].strip() for line in table.splitlines()[:2]] == ["caught", "caught at import"]
    assert status == 0
    assert (ROOT / "trl_ext" / "algorithms" / "kl.py").read_bytes() == before


@pytest.mark.slow
def test_harmless_fault_survives_missing_one_is_stale_both_fail(tmp_path: Path) -> None:
    text = (ROOT / "trl_ext" / "algorithms" / "kl.py").read_text(encoding="utf-8")
    comment = next(line for line in text.splitlines() if line.startswith("KL_ESTIMATORS"))
    harmless = {"find": comment, "replace": comment + "  # a comment"}
    status, table = planted(tmp_path, harmless, STALE)
    assert [line.split()[0] for line in table.splitlines()[:2]] == ["SURVIVED", "stale"]
    assert status == 1
    assert planted(tmp_path, harmless, STALE, only="nothing_of_this")[0] == 1


def test_the_help_has_examples() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "plant_faults.py --only losses" in done.stdout
    assert "--jobs" in done.stdout
