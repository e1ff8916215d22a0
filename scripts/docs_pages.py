"""What is written from the code: pages of docs/ with settings, packages and a step's diagram; the recipes' `--help`.

python -m scripts.docs_pages
"""

from __future__ import annotations

import argparse
import ast
import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.algorithms_page import algorithms_page
from scripts.benchmarks_page import benchmarks_page
from scripts.compatibility_page import compatibility_page
from scripts.determinism_table import with_table
from scripts.optimizers_page import optimizers_page
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.io import markdown_table, read_yaml
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.settings_help import Setting, kept_help, page_of, settings_in
from trl_ext.runs.recipes import RECIPES as RUN_RECIPES
from trl_ext.setting import Group
from trl_ext.training.settings_table import MODEL, SFT, TRL
from trl_ext.training.trl_settings import rules_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES: dict[str, tuple[type, ...]] = {
    **{recipe.script: recipe.settings() for recipe in RUN_RECIPES.values()},
    "evaluate.py": (Evaluation,),
    "best_of_n.py": (BestOfN,),
}

SETTINGS_INTRODUCTION = """\
# Settings

Every setting can stand in a YAML file (`--config`) or on the command line, which wins. These are ours and the few of
TRL's that are often changed, as `--help` of each recipe shows them, with the values that hold unless they are set. A
recipe that trains also has all others of TRL and transformers (`--help all`; one by name: `--help NAME`), and
[Every setting next to a preset](trl_settings.md) says what each of those does. A list is written as in YAML,
`--stop '["</answer>"]'`.

Written by `python -m scripts.docs_pages` from the settings' classes.
"""

EFFECTS_INTRODUCTION = """\
# Every setting next to a preset

A preset or an axis (`--preset`, `--advantage`, `--policy_loss`, `--aggregation`, or the handout's short forms of these)
replaces TRL's advantages and loss. The effect of every setting is then one of these:

- **honored**: it does what TRL's documentation says;
- **taken over**: it is translated into an option of an axis, with the same weights as TRL trains to;
- **refused**: an error in one line, before a model loads, names the setting and what to use instead;
- **no effect**: it is accepted, and changes nothing in TRL's GRPO either.

Without a preset and without an axis every setting is TRL's and training is bit-identical to TRL's, with one exception:
on a CPU, `bf16` that is not set is off (TRL: on with `use_cpu`), which the run says when it starts. `--bf16 true` gives
TRL's numbers. A setting that needs another one is refused without it.

Shown by *a run*: `tests/training/test_settings_table.py` trains with the setting and without it, and compares weights,
metrics and files. Written by `python -m scripts.docs_pages` from `docs/site/trl_settings.yaml` and
`trl_ext/training/settings_table.py`.
"""
HEADLINES = {  # by class, what follows its name
    "TrainingArguments": " of transformers",
    "GRPOConfig": " of TRL",
    "ModelConfig": " of TRL, in every recipe",
    "ExtGRPOConfig": ", ours",
    "GRPOTask": ", the recipe's",
    "SFTConfig": " of TRL, in fine-tuning and expert iteration",
    "ExtSFTConfig": ", ours; the rest is as in `ExtGRPOConfig`",
    "SFTTask": ", the recipe's; the rest is as in `GRPOTask`",
    "ExpertIterationConfig": ", ours",
    "Evaluation": "; problems are as in `GRPOTask`",
    "BestOfN": "",
}
RULES = {"GRPOConfig": TRL, "ModelConfig": MODEL, "ExtGRPOConfig": rules_of(ExtGRPOConfig), "SFTConfig": SFT}


def main() -> None:
    """Write the pages."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, page in PAGES.items():
        (DOCS / path).write_text(page(), encoding="utf-8")
        print(f"wrote {DOCS / path}")


# Settings.


def settings_page() -> str:
    """What `--help` of the recipes shows, a table per group."""
    return f"{SETTINGS_INTRODUCTION}\n{settings_reference()}\n"


def settings_reference() -> str:
    """The settings that `--help` shows, by the recipes that have them, as a table for each group."""
    recipes = {Path(script).stem: settings_of(script) for script in RECIPES}
    lines: list[str] = []
    shown = {(s.group, s.name): None for settings in recipes.values() for s in settings}  # each once, in order
    for group in Group:
        rows = []
        for name in (name for shown_in, name in shown if shown_in is group):
            texts: dict[str, dict[str, str]] = {}  # by recipe, the default: two recipes may mean two things by a name
            for recipe, settings in recipes.items():
                for setting in (s for s in settings if s.name == name and s.group == group):
                    texts.setdefault(setting.text, {})[recipe] = setting.default
            rows += [[f"`{name}`", _cell(text), _defaults(defaults)] for text, defaults in texts.items()]
        lines += [f"## {group.value}", "", *markdown_table(["setting", "meaning", "default in"], rows), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def _defaults(by_recipe: Mapping[str, str]) -> str:
    """Recipes with one default stand together."""
    same: dict[str, list[str]] = {}
    for recipe, default in by_recipe.items():
        same.setdefault(default, []).append(recipe)
    return "; ".join(f"`{default}` {', '.join(of)}" if default else ", ".join(of) for default, of in same.items())


def help_page(script: str) -> str:
    """What `--help` of a script prints."""
    doc = ast.get_docstring(ast.parse((ROOT / "recipes" / script).read_text(encoding="utf-8")))
    return page_of(doc, script, settings_of(script)) + "\n"


def settings_of(script: str) -> list[Setting]:
    """Every setting of a recipe's script, with the defaults of its YAML file."""
    return settings_in(RECIPES[script], read_yaml((ROOT / "recipes" / script).with_suffix(".yaml")) or {})


# The effect of each.


@dataclass(frozen=True)
class Effect:
    """What a setting does next to a preset or an axis, and what shows it."""

    verdict: str
    remark: str
    shown_by: str


def effects_of(name: str) -> dict[str, Effect]:
    """The effects of all settings of a class."""
    listed = read_yaml(DOCS / "site/trl_settings.yaml")[name]
    shown, idle, refused, remarks = (
        {setting: text for text, settings in listed.get(kind, {}).items() for setting in settings.split()}
        for kind in ("shown by", "no effect", "refused", "remark")
    )
    effects = {setting: Effect("honored", remarks.get(setting, ""), text) for setting, text in shown.items()}
    effects |= {setting: Effect("no effect", why, "a run") for setting, why in idle.items()}
    effects |= {setting: _tested("refused", why) for setting, why in refused.items()}
    for setting, rule in RULES.get(name, {}).items():
        if rule.needs:
            needs = [f"`{need}`" if need != "uses_axes" else "a preset or an axis" for need in rule.needs]
            remark = "; ".join(filter(None, [f"needs {' and '.join(needs)}", remarks.get(setting)]))
            effects[setting] = Effect("honored", remark, shown[setting])
        else:
            effects[setting] = _tested("refused" if rule.refused else "taken over", rule.note)
    return effects


def _tested(verdict: str, remark: str) -> Effect:
    return Effect(verdict, remark, f"`training/test_settings_table`, {verdict}")


def effects_page() -> str:
    """The effect of every setting next to a preset or an axis, and the test that shows it."""
    parts = [f"## `{name}`{rest}\n\n{_effects(effects_of(name))}" for name, rest in HEADLINES.items()]
    return "\n".join([EFFECTS_INTRODUCTION, *parts])


def _effects(part: Mapping[str, Effect]) -> str:
    """One row per setting, in the order of the alphabet."""
    rows = [[f"`{name}`", of.verdict, of.remark, _shown(of.shown_by)] for name, of in sorted(part.items())]
    return "\n".join([*markdown_table(["setting", "effect", "remark", "shown by"], rows), ""])


def _shown(text: str) -> str:
    if "::" in text:
        return f"`{text}`"
    return f"not on a CPU in milliseconds: {text}" if text.startswith("needs") else text


# Packages.

CORE = (
    "algorithms",
    "grpo",
    "step",
    "rewards",
    "generation",
    "training",
)  # what trains; the others in the order of the layers


def packages_page() -> str:
    """The packages by layers, with the first sentence of each docstring."""
    numbered = [(str(number), name) for number, layer in enumerate(layers(), start=1) for name in layer.split()]
    last = {name: Path(name).name for _, name in numbered}
    page = {name: last[name] if (DOCS / f"packages/{last[name]}.md").exists() else "modules" for name in last}
    rows = [[number, f"[{name}]({page[name]}.md)", sentence(name)] for number, name in numbered]
    head = (DOCS / "packages" / "index.md").read_text(encoding="utf-8").partition("| layer |")[0]
    return "\n".join([*head.splitlines(), *markdown_table(["layer", "package", "what it holds"], rows), ""])


def readme() -> str:
    """README.md, with the packages and the first sentence of each docstring in the tree, the core first."""
    names = sorted(" ".join(layers()).split(), key=lambda name: CORE.index(name) if name in CORE else len(CORE))
    width = max(map(len, names)) + 2
    is_package = {name: (ROOT / "trl_ext" / name).is_dir() for name in names}
    tree = [f"  {name + '/':{width}}{sentence(name)}" for name in names if is_package[name]]
    single = ", ".join(f"{name}.py" for name in names if not is_package[name])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = "\n".join(["trl_ext/", *tree, f"  {single}"])
    return re.sub(r"(?<=```text\n)trl_ext/\n.*?(?=\n```)", lambda _: lines, text, flags=re.DOTALL)


def layers() -> list[str]:
    """`LAYERS` of the test that holds them."""
    (test,) = (ROOT / "tests").rglob("test_package.py")
    for node in ast.parse(test.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{test} has no LAYERS")


def sentence(name: str) -> str:
    """The first sentence of a package's or module's docstring."""
    path = ROOT / "trl_ext" / name
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=\.)\s", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0]
    return first.removesuffix(".").removesuffix(":") + "."


# The diagram of a step.

LANES = {"HF": "transformers Trainer", "TRL": "TRL GRPOTrainer", "ours": "trl_ext"}
COLORS = {"HF": "#f0b429", "TRL": "#d64545", "ours": "#4c63b6"}
WIDTH, ROW, TOP = 330, 34, 48


def step_diagram() -> str:
    """The calls of an optimizer step as an SVG: a lane per library, downwards in the order of the calls."""
    order = (DOCS / "site" / "step.txt").read_text(encoding="utf-8")
    calls = re.findall(r"^(HF|TRL|ours)( +)(\S.*)$", order, re.MULTILINE)
    height = TOP + ROW * len(calls) + 8
    lanes = list(LANES)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(lanes)} {height}" '
        'font-family="monospace" font-size="12">',
        f'<rect width="100%" height="{height}" rx="6" fill="#fff"/>',
    ]
    for x, lane in ((i * WIDTH, lane) for i, lane in enumerate(lanes)):
        parts += [
            f'<rect x="{x + 4}" y="4" width="{WIDTH - 8}" height="{height - 8}" rx="6" '
            f'fill="{COLORS[lane]}" opacity=".1"/>',
            f'<text x="{x + WIDTH / 2}" y="28" text-anchor="middle" font-weight="bold">{LANES[lane]}</text>',
        ]
    before: tuple[float, float] | None = None
    for number, (lane, _, call) in enumerate(calls):
        x, y = lanes.index(lane) * WIDTH + 12, TOP + number * ROW
        middle = x + WIDTH / 2 - 12, y + (ROW - 10) / 2
        if before:
            parts.append(_arrow(before, middle))
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH - 24}" height="{ROW - 10}" rx="4" fill="#fff" '
            f'stroke="{COLORS[lane]}" stroke-width="1.5"/>'
            f'<text x="{x + 8}" y="{y + 16}">{html.escape(call)}</text>'
        )
        before = middle
    return "\n".join([*parts, "</svg>", ""])


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From below one box to above the next one, bent where they are in different lanes."""
    (x0, y0), (x1, y1) = (start[0], start[1] + (ROW - 10) / 2), (end[0], end[1] - (ROW - 10) / 2)
    half = (y0 + y1) / 2 - 1
    return (
        f'<path d="M{x0} {y0}V{half}H{x1}V{y1}" fill="none" stroke="#777"/>'
        f'<path d="M{x1 - 3} {y1 - 5}h6l-3 5z" fill="#777"/>'
    )


PAGES: dict[str, Callable[[], str]] = {
    "../README.md": readme,
    "two_gpus.md": lambda: with_table((DOCS / "two_gpus.md").read_text(encoding="utf-8")),
    "reference/settings.md": settings_page,
    "reference/trl_settings.md": effects_page,
    "reference/algorithms.md": algorithms_page,
    "reference/benchmarks.md": benchmarks_page,
    "reference/compatibility.md": compatibility_page,
    "reference/optimizers.md": optimizers_page,
    "packages/index.md": packages_page,
    "step.svg": step_diagram,
    **{f"../{kept_help(Path('recipes') / script)}": partial(help_page, script) for script in RECIPES},
}

if __name__ == "__main__":
    main()
