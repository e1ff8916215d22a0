"""`trl-ext`: which program a name runs, what it says of all of them, and what it does with files of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_pages import help_page
from trl_ext.errors import InputError
from trl_ext.recipes.command import OF_HUB, OWN, about, files, in_package, main, overview, path_of
from trl_ext.runs import recipes
from trl_ext.runs.recipes import RECIPES, programs, shipped, shown_command

ROOT = Path(__file__).parents[2]
COMMAND = "from trl_ext.recipes.command import main; main()"


def answer(*arguments: str, more: str = "") -> subprocess.CompletedProcess[str]:
    """What the command says in a process of its own, which it may become another program in."""
    command = [sys.executable, "-c", f"{COMMAND}{more}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["trl-ext", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


def test_all_commands_are_listed_with_a_sentence_without_torch() -> None:
    loaded = "; import sys; print(sorted({'torch', 'trl', 'transformers', 'numpy'} & set(sys.modules)))"
    assert answer("--help", more=loaded).stdout == overview() + "\n[]\n"


@pytest.mark.moderate
def test_what_trains_nothing_itself_answers_without_torch() -> None:
    """What they do, they do in other processes or import when it begins; all but `explain`, which asks TRL."""
    trains = {name.replace("_", "-") for name in RECIPES}
    found = {name: target for name, target in programs().items() if name not in {*trains, "explain"}}
    given = {name: str(shipped(f"recipes/{of}")) if of.endswith(".py") else of for name, of in found.items()}
    program = (
        "import contextlib, io, os, runpy, sys\n"
        f"for name, target in {given}.items():\n"
        "    sys.argv = [target, '--help']\n"
        "    sys.path.insert(0, os.path.dirname(target))\n"
        "    sys.modules.pop('problem', None)\n"  # both searches have one of this name next to them
        "    run = runpy.run_path if target.endswith('.py') else runpy.run_module\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        run(target, run_name='__main__')\n"
        "    print(name, *sorted({'torch', 'trl', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == list(found)


def test_the_overview_names_every_program_with_what_it_does() -> None:
    lines = overview().splitlines()
    assert max(map(len, lines)) <= 120
    listed = [line.split()[0] for line in lines if line[:2] == "  " and line[2] != " "]
    assert listed == [*OWN, *programs(), *OF_HUB]
    assert {"grpo", "lab", "estimate", "browse"} < set(listed)
    for target in programs().values():
        assert about(target)[0].isupper()
        assert about(target).endswith(".")
        assert len(about(target).split()) > 3 or target == "grpo_math.py"
    assert "Push what an earlier run could not." in overview()  # without the words of the module's own command


def test_an_unknown_command_is_told_the_nearest_and_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(capsys, monkeypatch, "grop", "--help")
    assert said.startswith("error: unknown command 'grop'. Did you mean 'grpo'? Known: best-of-n, browse,")
    assert len(said.splitlines()) == 1


def test_help_of_a_recipe_is_its_own_and_how_to_start_ranks() -> None:
    done = answer("expert_iteration", "-h")
    page = help_page("expert_iteration.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(page)
    rest = done.stdout.removeprefix(page)
    assert '"$(trl-ext path accelerate_configs/two_gpus_zero2.yaml)"' in rest
    assert '"$(trl-ext path expert-iteration)"' in rest


@pytest.mark.moderate
def test_the_command_becomes_the_program_with_its_status() -> None:
    done = answer("plot-runs", "no_run")
    assert done.returncode == 2
    assert "plot_runs.py: error: no_run has no summary.json" in done.stderr
    assert answer("plot_runs", "--help").stdout.startswith("usage: plot_runs.py")
    assert answer("merge", "--help").stdout.startswith("usage: python -m trl_ext.hub merge")


def test_a_file_of_the_package_is_found_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loss, config = shipped("recipes/my_loss.py"), shipped("accelerate_configs/one_cpu.yaml")
    assert in_package("recipes/my_loss.py:soft_clip") == f"{loss}:soft_clip"
    assert in_package("--config_file=accelerate_configs/one_cpu.yaml") == f"--config_file={config}"
    for other in ("recipes/no_such.yaml", "my/recipes/my_loss.py", "--seed", "recipes/", "width=0.5"):
        assert in_package(other) == other
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "my_loss.py").touch()
    assert in_package("recipes/my_loss.py:soft_clip") == "recipes/my_loss.py:soft_clip"


def test_path_is_of_a_script_or_a_file_and_lists_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert path_of("best_of_n") == path_of("best-of-n") == ROOT / "recipes" / "best_of_n.py"
    assert path_of("recipes/lab/mini_math/kl.yaml") == ROOT / "recipes" / "lab" / "mini_math" / "kl.yaml"
    with pytest.raises(InputError, match=r"no file 'two_gpus_zero\.yaml'\. Did you mean .*two_gpus_zero2\.yaml"):
        path_of("two_gpus_zero.yaml")
    assert "accelerate_configs/one_cpu.yaml" in files()
    assert refused(capsys, monkeypatch, "path", "a", "b") == ""


def test_commands_name_no_place_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "recipes/grpo_math.py"
    assert shown_command(script, ["--seed", "1"]) == ["python", script, "--seed", "1"]
    installed = tmp_path / "site-packages" / "trl_ext" / "_data"
    monkeypatch.setattr(recipes, "_INSTALLED", installed)
    monkeypatch.chdir(tmp_path)
    given = ["--config", "site-packages/trl_ext/_data/recipes/x.yaml", f"--policy_loss={installed}/recipes/a.py:f"]
    found = ["--config", "recipes/x.yaml", "--policy_loss=recipes/a.py:f"]
    assert shown_command(f"site-packages/trl_ext/_data/{script}", given) == ["trl-ext", "grpo", *found]
    assert shown_command(str(installed / "recipes/lab.py"), []) == ["trl-ext", "lab"]
    assert shown_command("my_project/train.py", given[:1]) == ["python", "my_project/train.py", "--config"]
