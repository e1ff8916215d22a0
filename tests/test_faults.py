"""The list of planted faults fits the code, and the script that plants them tells caught from survived."""

from __future__ import annotations

import ast
import functools
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
def test_a_fault_is_in_its_file_once_and_names_real_tests(file: str) -> None:
    for fault in (fault for fault in FAULTS if fault.file == file):
        assert fault.planted(ROOT) is not None, f"{fault}: not exactly once in the file"
        assert "\n" not in fault.find.strip(), fault
        assert fault.tests, fault
        assert all(exists(test) for test in fault.tests), fault


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_a_fault_changes_what_the_file_says_and_leaves_it_whole(file: str) -> None:
    parsers = {".yaml": yaml.safe_load, ".toml": tomllib.loads, ".css": str.split}
    parsed = parsers.get(Path(file).suffix, lambda text: ast.dump(ast.parse(text)))
    original = parsed((ROOT / file).read_text(encoding="utf-8"))
    for fault in (fault for fault in FAULTS if fault.file == file):
        assert parsed(fault.planted(ROOT) or "") != original, fault


@functools.cache
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


@pytest.mark.nightly
@pytest.mark.slow
def test_a_fault_is_caught_and_the_checkout_is_left_alone(tmp_path: Path) -> None:
    before = (ROOT / "trl_ext" / "algorithms" / "kl.py").read_bytes()
    status, table = planted(tmp_path, CAUGHT, AT_IMPORT)
    assert [line.split("  ")[0].strip() for line in table.splitlines()[:2]] == ["caught", "caught at import"]
    assert status == 0
    assert (ROOT / "trl_ext" / "algorithms" / "kl.py").read_bytes() == before


@pytest.mark.nightly
@pytest.mark.slow
def test_harmless_fault_survives_missing_one_is_stale_both_fail(tmp_path: Path) -> None:
    text = (ROOT / "trl_ext" / "algorithms" / "kl.py").read_text(encoding="utf-8")
    comment = next(line for line in text.splitlines() if line.startswith("KL_ESTIMATORS"))
    harmless = {"find": comment, "replace": comment + "  # a comment"}
    status, table = planted(tmp_path, harmless, STALE)
    assert [line.split()[0] for line in table.splitlines()[:2]] == ["SURVIVED", "stale"]
    assert status == 1
    assert planted(tmp_path, harmless, STALE, only="nothing_of_this")[0] == 1


@pytest.mark.parametrize(
    "formatted",
    [
        "x = call(first, second=[1, 2])",
        "x = call(\n    first,\n    second=[1, 2],\n)",
        "x = call(first, second=[\n    1,\n    2,\n])",
    ],
)
def test_a_fault_is_found_however_its_line_is_formatted(formatted: str, tmp_path: Path) -> None:
    fault = plant_faults.Fault("code.py", "call(first, second=[1, 2])", "call(second)", ("tests",))
    (tmp_path / "code.py").write_text(f"before = 1\n{formatted}\nafter = 2\n")
    assert fault.planted(tmp_path) == "before = 1\nx = call(second)\nafter = 2\n"
    (tmp_path / "code.py").write_text(f"{formatted}\n{formatted}\n")
    assert fault.planted(tmp_path) is None
    (tmp_path / "code.py").write_text(formatted.replace("first", "firstly"))
    assert fault.planted(tmp_path) is None


def test_faults_are_chosen_by_what_a_change_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant_faults, "changed_files", lambda since: {"trl_ext/algorithms/kl.py", "README.md"})
    shown: list[str] = []
    monkeypatch.setattr(plant_faults, "print", lambda *lines, **_: shown.extend(lines), raising=False)
    assert plant_faults.main(["--changed", "somewhere", "--list"]) == 0
    assert shown
    assert all("trl_ext/algorithms/kl.py" in line or "README.md" in line for line in shown)
    monkeypatch.setattr(plant_faults, "changed_files", lambda since: {"nothing.py"})
    assert plant_faults.main(["--changed", "somewhere"]) == 0
    assert shown[-1] == "no fault is of a file that differs from somewhere"


def test_no_such_commit_is_said() -> None:
    with pytest.raises(SystemExit, match="--changed no_such_commit: "):
        plant_faults.changed_files("no_such_commit")


def test_the_help_has_examples() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "plant_faults.py --only losses" in done.stdout
    assert "--jobs" in done.stdout
