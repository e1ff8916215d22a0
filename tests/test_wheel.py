"""The wheel, made from the sdist: what is in it, and that it works in an empty environment and an empty folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import trl_ext
from tests.recipes.test_grpo import SMALL
from trl_ext.mini.policy import make_base_policy

pytestmark = pytest.mark.slow  # it is built and installed once, and trained with

REPO = Path(__file__).resolve().parents[1]
BUILT = ("trl_ext", "recipes", "accelerate_configs", "pyproject.toml", "README.md", "LICENSE")
USERS_FILE = """\
import torch

from trl_ext import POLICY_LOSSES, PRESETS, LossInputs, TokenLoss
from trl_ext.rewards import math_reward_fn


@POLICY_LOSSES.register(zero_advantage_is_noop=True)
def mine(x: LossInputs, *, width: float = 0.2) -> TokenLoss:
    return TokenLoss(-torch.exp(x.logp - x.old_logp) * x.advantage)


reveal_type(mine)
reveal_type(PRESETS["dapo"])
math_reward_fn(4, "4")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of the repository, and the wheel that is made of that sdist and nothing else."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "repository").mkdir()
    for name in BUILT:
        copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copy(REPO / name, folder / "repository" / name)
    run_python("from setuptools import build_meta; build_meta.build_sdist('..')", folder / "repository")
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder)
    run_python(
        "from setuptools import build_meta; build_meta.build_wheel('..')", folder / sdist.name[: -len(".tar.gz")]
    )
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def run_python(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_wheel_has_every_module_and_the_recipes_data(built):
    inside = {n for n in zipfile.ZipFile(built[1]).namelist() if ".dist-info/" not in n}
    endings = {"trl_ext": "py prompt yaml md html css js json", "recipes": "py yaml txt", "accelerate_configs": "yaml"}
    files = {
        p.relative_to(REPO).as_posix()
        for f, es in endings.items()
        for e in es.split()
        for p in (REPO / f).rglob(f"*.{e}")
    }
    written = {name for name in files if "/kissing_number/scripted/" in name}  # what a run has written
    wanted = {name if name.startswith("trl_ext/") else f"trl_ext/_data/{name}" for name in files - written}
    assert inside == wanted | {"trl_ext/py.typed"}


@pytest.mark.skipif(importlib.util.find_spec("twine") is None, reason="twine is not installed (extra `dev`)")
def test_twine_finds_nothing_wrong(built):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


class Installed:
    """An environment with the wheel, and with the dependencies of this one; an empty folder to work in."""

    def __init__(self, folder, wheel):
        self.empty, self.bin = folder / "empty", folder / "venv" / "bin"
        self.empty.mkdir()
        venv.create(folder / "venv", symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--no-deps", "--no-index", "-q"]
        subprocess.run([*pip, wheel], check=True, timeout=120)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # Its packages only: the editable install of the repository is a .pth file there, which is not followed.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def run(self, *command, folder=None):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [shutil.which(command[0], path=environment["PATH"]), *command[1:]],
            cwd=folder or self.empty, env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"), built[1])


@pytest.mark.nightly
def test_installed_command_knows_its_files(installed):
    where = installed.run("python", "-c", "import trl_ext; print(trl_ext.__file__)").stdout
    assert where.startswith(str(installed.bin.parent))
    assert installed.run("trl-ext", "--version").stdout == f"trl-ext {trl_ext.__version__}\n"
    path = installed.run("trl-ext", "path", "accelerate_configs/two_gpus_zero2.yaml").stdout.strip()
    assert path.startswith(str(installed.bin.parent))
    assert Path(path).read_bytes() == (REPO / "accelerate_configs" / "two_gpus_zero2.yaml").read_bytes()
    assert installed.run("trl-ext", "grpo", "--help").stdout.startswith("usage: grpo_math.py")
    assert "    reinforce_with_baseline: " in installed.run("trl-ext", "lab", "--list").stdout
    assert list(installed.empty.iterdir()) == []


@pytest.mark.nightly
def test_installed_recipe_trains_with_files_of_the_package(installed, policy):
    settings = [*policy, "--config", "recipes/grpo_math.yaml", "--policy_loss=recipes/my_loss.py:soft_clip"]
    done = installed.run("trl-ext", "grpo", *settings)
    assert done.returncode == 0, done.stderr
    run = json.loads((installed.empty / "runs" / "grpo_math" / "summary.json").read_text())
    assert run["command"] == shlex.join(["trl-ext", "grpo", *settings])


@pytest.mark.nightly
def test_a_new_project_trains_and_its_test_passes(installed, policy):
    done = installed.run("trl-ext", "init", "mine")
    assert done.returncode == 0, done.stderr
    project = installed.empty / "mine"
    again = installed.run("trl-ext", "init", "mine")
    assert (again.returncode, again.stderr) == (2, "error: mine is there and not empty; name a new folder\n")
    trained = installed.run("python", "train.py", *policy, folder=project)
    assert trained.returncode == 0, trained.stderr
    run = json.loads((project / "runs" / "train" / "summary.json").read_text())
    assert (run["policy_loss"], run["validations"][-1]["step"]) == ("my_loss.py:soft_clip", 2)
    tested = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=project)
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Settings of a run of two small steps from a policy that is made in a second."""
    folder = make_base_policy(0, tmp_path_factory.mktemp("policy"), SMALL, progress=False)
    small = {"max_steps": 2, "rollout_batch_size": 16, "group_size": 4, "train_batch_size": 8, "train_problems": 32,
             "micro_train_batch_size": 8, "sampling_max_tokens": 8, "validation_problems": 8, "save_strategy": "no"}  # fmt: skip
    return [
        "--model_name_or_path",
        str(folder),
        *(word for name, value in small.items() for word in (f"--{name}", str(value))),
    ]


@pytest.mark.nightly
def test_a_users_file_is_checked_against_our_types(installed):
    (installed.empty / "mine.py").write_text(USERS_FILE)
    # torch, transformers and TRL are left out: following them takes a minute and says nothing of ours.
    (installed.empty / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = skip\n[mypy-trl_ext.*]\nfollow_imports = normal\n"
    )
    done = installed.run(
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        str(installed.bin / "python"),
        "--cache-dir",
        "cache",
        "mine.py",
    )
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    kind = "trl_ext.algorithms.types"
    assert said[:3] == [
        f'note: Revealed type is "def (x: {kind}.LossInputs, *, width: float =) -> {kind}.TokenLoss"',
        'note: Revealed type is "trl_ext.algorithms.presets.Preset"',
        'error: Argument 1 to "math_reward_fn" has incompatible type "int"; expected "str"  [arg-type]',
    ]
    assert len(said) == 4  # the last one counts the errors


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="pyright is not installed (extra `dev`)")
def test_a_users_file_is_checked_by_pyright_too(installed):
    folder = installed.empty / "checked"
    folder.mkdir()
    (folder / "mine.py").write_text(USERS_FILE)
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    python = str(installed.bin / "python")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", python, "--outputjson", "mine.py"]
    found = json.loads(installed.run(*command, folder=folder).stdout)["generalDiagnostics"]
    said = [(one["severity"], one["message"].splitlines()[0]) for one in found]
    assert said == [
        ("information", 'Type of "mine" is "(x: LossInputs, *, width: float = 0.2) -> TokenLoss"'),
        ("information", 'Type of "PRESETS["dapo"]" is "Preset"'),
        ("error", 'Argument of type "Literal[4]" cannot be assigned to parameter "response" of type "str" in function '
         '"math_reward_fn"'),
    ]  # fmt: skip
