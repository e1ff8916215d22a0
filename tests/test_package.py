"""Imports point one way, and the mathematics needs nothing but torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trl_ext
from trl_ext.io import read_yaml

PACKAGE = Path(trl_ext.__file__).parent
PYPROJECT = PACKAGE.parent / "pyproject.toml"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# A package imports from the rows above its own only, for types and within functions too.
LAYERS = (
    "errors",
    "registry redaction ranks setting endpoint sandbox",
    "compat",
    "io",
    "plots",
    "hosts algorithms rewards generation step",
    "functional mini turns",
    "data evaluation",
    "runs",
    "hub browse",
    "training",
    "grpo imitation",
    "recipes",
    "tools/discovery tools/experiments",
    "tools/estimate",
)
LAYER_OF = {package: number for number, row in enumerate(LAYERS) for package in row.split()}
TOOLS = [package for package in LAYER_OF if package.startswith("tools/")]
WITHOUT_TRL = set(
    "errors io registry redaction ranks setting endpoint sandbox plots algorithms rewards functional mini data runs hub browse"
    " tools/discovery".split()
)
PURE = [
    f"trl_ext.algorithms.{name}"
    for name in ("advantages", "aggregation", "kl", "masking", "objective", "policy_losses", "presets", "types")
]
HEAVY = ("trl", "transformers", "vllm", "deepspeed", "datasets", "accelerate", "peft", "matplotlib", "openai", "scipy")


def package_of(module: str) -> str:
    """The row's name for a module's package; a tool is a package of its own."""
    first, *below = module.split(".")[1:]
    return f"{first}/{below[0]}" if first == "tools" and below else first


@cache
def imports(module: str, everywhere: bool = True, types: bool = False) -> set[str]:
    """Modules imported by `module`: anywhere in it, or only when it is itself imported; for type checks if asked for."""
    nodes = list(ast.walk(ast.parse(MODULES[module].read_text())))
    skipped: set[ast.AST] = set()
    for node in nodes:
        checking = not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if checking or (not everywhere and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            skipped |= set(ast.walk(node))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import) and node not in skipped:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            assert node.level == 0, f"{module} has a relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", trl_ext.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(trl_ext, name) is not None
    assert name in dir(trl_ext)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trl_ext' has no attribute 'POLICY_LOSS'"):
        trl_ext.POLICY_LOSS  # noqa: B018


def test_the_files_that_come_with_the_package_are_there() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_every_package_and_both_folders_go_into_the_wheel() -> None:
    settings = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    data = {"trl_ext._data.accelerate_configs": "accelerate_configs", "trl_ext._data.recipes": "recipes"}
    assert settings["package-dir"] == data
    assert sorted(settings["packages"]) == sorted(packages | set(data))


@pytest.mark.moderate
def test_what_a_module_imports_is_declared() -> None:
    """On its own import by the package itself, within functions by an extra at least."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    own, with_extras = (
        {canonicalize_name(Requirement(line).name) for line in lines}
        for lines in (project["dependencies"], project["dependencies"] + extras)
    )
    theirs = {module for module in MODULES if module.startswith("trl_ext.evaluation.their_graders.")}  # run by theirs
    for everywhere, declared in ((False, own), (True, with_extras)):
        imported = {name.partition(".")[0] for module in set(MODULES) - theirs for name in imports(module, everywhere)}
        foreign = imported - {"trl_ext", *sys.stdlib_module_names}
        assert {canonicalize_name({"yaml": "pyyaml"}.get(name, name)) for name in foreign} - declared == set()


def test_the_version_is_the_changelogs_newest_release() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    assert "version" not in project["project"], "the version is that of trl_ext/__init__.py"
    assert project["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "trl_ext.__version__"}}
    headings = re.findall(r"^## (.*)$", PYPROJECT.with_name("CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1].split()[0] == trl_ext.__version__


def test_the_citation_agrees_with_the_project() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    citation = read_yaml(PYPROJECT.with_name("CITATION.cff"))
    assert citation["title"].startswith(f"{project['name']}: ")
    assert citation["license"] == project["license"]
    assert citation["abstract"].split() == f"{project['description']}.".split()
    assert not {"version", "date-released"} & set(citation), "they would be a second source of the version"


def test_every_package_says_what_it_is_for() -> None:
    for folder in {path.parent for path in MODULES.values()} - {PACKAGE}:
        about = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert about, f"{folder}/__init__.py does not say what the package is for"


@pytest.mark.moderate
@pytest.mark.parametrize("package", sorted(LAYER_OF))
def test_a_package_imports_from_lower_layers_only(package: str) -> None:
    own = [module for module in MODULES if module != "trl_ext" and package_of(module) == package]
    assert own
    used = {package_of(name) for module in own for name in imports(module, types=True) if name.startswith("trl_ext.")}
    for other in (used & set(LAYER_OF)) - {package}:
        assert LAYER_OF[other] < LAYER_OF[package], f"{package} imports {other}, which is not below it"
    known = {name.split(".")[0] for module in own for name in imports(module)}
    assert package not in WITHOUT_TRL or not known & {"trl", "vllm", "deepspeed"}


def test_every_package_has_its_layer() -> None:
    assert {package_of(module) for module in set(MODULES) - {"trl_ext", "trl_ext.tools"}} == set(LAYER_OF)


def test_the_saving_of_work_has_one_door() -> None:
    outside = {module for module in MODULES if not module.startswith("trl_ext.step")}
    assert any("trl_ext.step" in imports(module) for module in outside)
    behind = {module for module in MODULES if module.startswith("trl_ext.step.")}
    for module in outside:
        assert not imports(module, types=True) & behind, f"{module} does not import from trl_ext.step itself"


def test_nothing_outside_the_tools_imports_them() -> None:
    """For types and within functions neither: what they do for a run is found by entry points."""
    inside = {module for module in MODULES if module.startswith("trl_ext.tools")}
    assert {package_of(module) for module in inside} == {"tools", *TOOLS}
    for module in set(MODULES) - inside:
        assert not {name for name in imports(module, types=True) if name.startswith("trl_ext.tools")}, module


@pytest.mark.parametrize("module", PURE)
def test_the_mathematics_imports_torch_and_itself_only(module: str) -> None:
    foreign = {name.split(".")[0] for name in imports(module)} - set(sys.stdlib_module_names)
    assert foreign <= {"torch", "trl_ext"}
    assert {name for name in imports(module) if name in MODULES} <= {*PURE, "trl_ext.registry"}


@pytest.mark.moderate
def test_there_is_no_circle() -> None:
    """Not for types either."""
    own = set(MODULES) - {"trl_ext"}
    below = {module: imports(module, everywhere=False, types=True) & own - {module} for module in MODULES}
    remaining = set(MODULES)
    while remaining:
        free = {module for module in remaining if not below[module] & remaining}
        assert free, f"these import each other: {sorted(remaining)}"
        remaining -= free


def loaded_by(statement: str) -> set[str]:
    """Top-level packages and transformers' trainer, if `statement` alone has loaded them, in a fresh process."""
    code = f"import sys; {statement}; import json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=PACKAGE.parent
    )
    return set(json.loads(done.stdout.splitlines()[-1])) & {*HEAVY, "torch", "transformers.trainer"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import trl_ext") == set()


@pytest.mark.moderate
def test_axes_handout_functions_and_rewards_import_only_torch() -> None:
    more = "functional algorithms.sampler_correction rewards evaluation.evaluator runs.tables_and_plots".split()
    more += ["mini.problems", "generation.prompts"]
    names = [*PURE, *(f"trl_ext.{name}" for name in more)]
    exported = "from trl_ext import ADVANTAGES, POLICY_LOSSES, PRESETS, LossInputs, REWARDS"
    assert loaded_by(f"import {', '.join(names)}; {exported}") == {"torch"}


@pytest.mark.moderate
def test_discovery_loop_imports_neither_torch_nor_client_early() -> None:
    assert loaded_by("import trl_ext.tools.discovery.command, trl_ext.tools.discovery.evaluator") == set()


@pytest.mark.slow
def test_the_trainers_load_vllm_only_when_they_use_it() -> None:
    assert "vllm" not in loaded_by("import trl_ext.grpo.trainer, trl_ext.imitation.sft, trl_ext.recipes.grpo")


@pytest.mark.nightly
@pytest.mark.slow
def test_lazily_loaded_trl_modules_are_as_if_imported_with_vllm() -> None:
    show = """
import inspect, json
from trl.generation import vllm_client as c, vllm_generation as g
told = {m.__name__: {k: v if isinstance(v, (bool, int, str)) else getattr(v, "__qualname__", type(v).__name__)
        for k, v in vars(m).items() if not k.startswith("__")} for m in (c, g)}
print(json.dumps([told, g.VLLMClient is c.VLLMClient, g.is_vllm_available()]))
"""
    later = "import trl_ext.grpo.trainer; from trl.generation import vllm_generation as g; g.is_vllm_available()"
    running = [
        subprocess.Popen([sys.executable, "-c", code + show], stdout=subprocess.PIPE, cwd=PACKAGE.parent, text=True)
        for code in ("", later)
    ]
    at_once, loaded_later = (json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in running)
    assert at_once == loaded_later
    assert at_once[1:] == [True, True]


@pytest.mark.moderate
def test_the_seam_stays_small() -> None:
    """What an override needs is next to it: lines, modules of ours that it imports, attributes of its own."""
    source = MODULES["trl_ext.grpo.trainer"].read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 450
    assert len({name for name in imports("trl_ext.grpo.trainer", types=True) if name in MODULES}) <= 18
    assigned = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert len(assigned) <= 30


@pytest.mark.moderate
def test_few_parameters_may_be_anything() -> None:
    """`*args` and `**kwargs` count too; the most common annotation that is checked by nobody."""
    parameters = [
        parameter
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for parameter in (
            *node.args.posonlyargs,
            *node.args.args,
            *node.args.kwonlyargs,
            node.args.vararg,
            node.args.kwarg,
        )
        if parameter is not None and parameter.arg not in ("self", "cls")
    ]
    anything = [p.arg for p in parameters if p.annotation is not None and ast.unparse(p.annotation) == "Any"]
    assert len(parameters) > 1000
    assert len(anything) < 0.03 * len(parameters)


@pytest.mark.moderate
def test_names_of_tests_are_short() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.rglob("test_*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(names) > 1000
    assert not [name for name in names if name.startswith("test_") and len(name) > 60]
