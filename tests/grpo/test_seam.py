"""What `trl_ext` relies on in TRL's private methods, so that another version fails here and not in a long run."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import trl
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.generation import vllm_generation
from trl.import_utils import is_vllm_available
from trl.models import unwrap_model_for_generation

import trl_ext
from tests.support.tiny import fraction_of_ones, make_trainer, tiny_sft, train
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat.lazy_vllm import load_vllm
from trl_ext.imitation.expert_iteration import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.training.trainer import ReliableTrainer

PACKAGE = Path(trl_ext.__file__).parent

# Of TRL's GRPOTrainer, in call order.
OVERRIDDEN = {
    "train": "resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None",
    "get_batch_samples": "epoch_iterator, num_batches, device",
    "training_step": "model, inputs, num_items_in_batch",
    "_prepare_inputs": "generation_batch",
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_tokenize_prompts": "prompts",
    "_generate_single_turn": "prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False",
    "_tool_call_loop": "prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields",
    "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
    "_compute_loss": "model, inputs",
}
# Of transformers' Trainer, which GRPO and SFT both override, in call order.
OVERRIDDEN_IN_BOTH = {
    "_build_accelerator_args": "**kwargs",
    "train": "resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None",
    "_load_from_checkpoint": "resume_from_checkpoint, model=None",
    "_get_train_sampler": "dataset=None",
    "_load_callback_state": "",
    "_prepare_for_training": "max_steps, train_dataloader, resume_from_checkpoint",
    "_evaluate": "trial, ignore_keys_for_eval, skip_scheduler=False",
    "_run_epoch": "model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
    "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch",
    "_load_rng_state": "checkpoint",
    "compute_loss": "model, inputs, return_outputs=False, num_items_in_batch=None",
    "_get_grad_norm": "model, grad_norm=None",
    "_maybe_log_save_evaluate": "tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, "
    "learning_rate=None",
    "_save_checkpoint": "model, trial",
    "_get_output_dir": "trial",
    "_save": "output_dir=None, state_dict=None",
    "_push_from_checkpoint": "checkpoint_folder",
    "_finalize_training": "trial, num_train_samples, start_time",
}
WRITTEN_BY_TRAINER = {
    "_inner_training_loop": ["self._tr_loss = ", "self._total_loss_scalar = ", "self._globalstep_last_logged = "],
    "_run_epoch": ["self._load_rng_state(resume_from_checkpoint)", "self._get_grad_norm(", "epoch == epochs_trained"],
    "_save_checkpoint": ["self._get_output_dir(trial=trial)", "TRAINER_STATE_NAME", "output_dir=run_dir,"],
}
PASSED_ON = {"_generate_single_turn"}  # everything but the first argument unseen
CALLED = {"log": "logs, start_time=None"}
CALLED_BY_KEYWORD = {
    GRPOTrainer._get_per_token_logps_and_entropies: {
        "positional": ("model", "input_ids", "attention_mask", "logits_to_keep"),
        "keywords": {"compute_entropy", "compute_aux_loss"},
    },
    unwrap_model_for_generation: {
        "positional": ("model", "accelerator"),
        "keywords": {"gather_deepspeed3_params"},
    },
}
# Metrics and keys of a batch that TRL's methods write and the seam reads; attributes are looked up on a real trainer.
WRITTEN = {
    "_generate_and_score_completions": ["advantages", "completion_mask", "old_per_token_logps", "num_items_in_batch"],
    "_generate": [
        "completions/clipped_ratio",
        *(f"completions/{name}_terminated_length" for name in ("mean", "min", "max")),
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, ",
        'completions = [[{"role": "assistant", "content": content}] for content in contents]',
    ],
    "_prepare_inputs": [
        "_buffered_inputs[self._step % self.args.steps_per_generation]",
        "shuffle_sequence_dict",
        "self._buffered_inputs = [",
    ],
    "_generate_single_turn": ["self.state.global_step != self._last_loaded_step"],
    "training_step": ["self._step += 1", "self._current_train_step_time += "],
    "_calculate_rewards": ["rewards_per_func = gather(rewards_per_func)"],
}


def test_base_overrides_exactly_the_methods_pinned_here() -> None:
    inherited = {name for name, value in vars(ReliableTrainer).items() if hasattr(Trainer, name) and callable(value)}
    assert {name for name in inherited if not name.startswith("__")} == set(OVERRIDDEN_IN_BOTH)
    for trainer in (GRPOTrainer, SFTTrainer):
        for name, expected in OVERRIDDEN_IN_BOTH.items():
            if (trainer, name) != (SFTTrainer, "_get_train_sampler"):  # its argument is passed on unseen
                assert _signature(getattr(trainer, name)).replace(" = ", "=") == expected, name


@pytest.mark.parametrize(("method", "text"), [(m, text) for m, texts in WRITTEN_BY_TRAINER.items() for text in texts])
def test_transformers_trainer_still_does_what_the_base_relies_on(method: str, text: str) -> None:
    assert text in inspect.getsource(inspect.unwrap(getattr(Trainer, method)))


def _signature(function: object) -> str:
    """`a, b, c=1`: names and defaults without `self` and without types."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name != "self"]
    return str(inspect.Signature(bare))[1:-1]


def test_installed_trl_is_the_minor_version_of_the_seam() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pin = next(r for r in map(Requirement, project["dependencies"]) if r.name == "trl").specifier
    assert len(pin) == 1
    assert Version(trl.__version__) in pin
    major, minor = Version(trl.__version__).release[:2]
    assert f"{major}.{minor + 1}.0" not in pin, "the pin must hold TRL to one minor version"


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_trl_methods_have_the_signatures_the_seam_relies_on(name: str) -> None:
    expected, found = {**OVERRIDDEN, **CALLED}[name], _signature(getattr(GRPOTrainer, name))
    if name == "log":
        assert _signature(Trainer.log).replace(" = ", "=") == expected  # the seam calls this one past TRL's
    assert found.replace(" = ", "=") == expected, (
        f"TRL {trl.__version__} changed GRPOTrainer.{name}: ({found}), trl_ext relies on ({expected})"
    )


@pytest.mark.parametrize("function", CALLED_BY_KEYWORD, ids=lambda f: f.__name__)
def test_trl_functions_accept_the_arguments_of_the_seam(function: object) -> None:
    parameters, given = inspect.signature(function).parameters, CALLED_BY_KEYWORD[function]
    in_order = [name for name in parameters if name != "self"][: len(given["positional"])]
    assert tuple(in_order) == given["positional"]
    assert given["keywords"] <= parameters.keys()


@pytest.mark.parametrize(("method", "text"), [(m, text) for m, texts in WRITTEN.items() for text in texts])
def test_trls_methods_still_write_what_the_seam_reads(method: str, text: str) -> None:
    source = inspect.getsource(inspect.unwrap(getattr(GRPOTrainer, method)))
    assert text in source, f"TRL {trl.__version__}: GRPOTrainer.{method} no longer mentions {text!r}"


def read_of_trl(files: list[str], *classes: type) -> set[str]:
    """Attributes of `self` that the files read and that neither they nor our classes set."""
    read, own = set(), {name for c in classes for base in c.__mro__ if base.__module__.startswith("trl_ext")
                        for name in vars(base)}  # fmt: skip
    for node in (n for name in files for n in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8")))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            (read if isinstance(node.ctx, ast.Load) else own).add(node.attr)
    return read - own


def test_trls_trainer_has_every_attribute_that_the_seam_reads(tmp_path: Path) -> None:
    read = read_of_trl(["grpo/trainer.py", "training/trainer.py"], ExtGRPOTrainer)
    assert len(read) > 20
    stock = train(GRPOTrainer, GRPOConfig, tmp_path, fraction_of_ones, max_steps=1)
    with_vllm = inspect.getsource(GRPOTrainer.__init__)  # what only a trainer with an engine has
    missing = sorted(name for name in read if not hasattr(stock, name) and f"self.{name} = " not in with_vllm)
    assert not missing, f"TRL {trl.__version__} has no GRPOTrainer.{', '.join(missing)}"


def test_trls_sft_trainer_has_what_ours_relies_on(tmp_path: Path) -> None:
    rows = [{"input_ids": [3, 4, 5], "completion_mask": [0, 1, 1]}]
    stock = tiny_sft(SFTTrainer, SFTConfig, tmp_path, rows, completion_only_loss=True)
    read = read_of_trl(
        ["imitation/sft.py", "training/trainer.py", "imitation/expert_iteration.py"],
        ExpertIterationTrainer,
        ExpertIterationConfig,
    )
    assert len(read) > 4
    missing = sorted(name for name in read if not hasattr(stock, name) and not hasattr(stock.args, name))
    assert not missing, f"TRL {trl.__version__} has no SFTTrainer.{', '.join(missing)}"
    assert stock.train_dataset[0]["labels"] == [-100, 4, 5]
    signatures = {
        "_get_num_items_in_batch": "batch_samples, device",
        "get_batch_samples": "epoch_iterator, num_batches, device",
        "compute_loss": "model, inputs, return_outputs=False, num_items_in_batch=None",
    }
    for name, expected in signatures.items():
        assert _signature(getattr(SFTTrainer, name)).replace(" = ", "=") == expected
    source = inspect.getsource(SFTTrainer.compute_loss)
    divided = "loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)"
    for text in (divided, '["entropy"].append(', '["mean_token_accuracy"].append('):
        assert text in source


def test_trainer_overrides_exactly_the_methods_pinned_here() -> None:
    seam = [c for c in ExtGRPOTrainer.__mro__ if c.__module__.startswith("trl_ext") and c is not ReliableTrainer]
    inherited = {n for c in seam for n in vars(c) if hasattr(GRPOTrainer, n) and not n.startswith("__")}
    assert {n for n in inherited if callable(getattr(GRPOTrainer, n))} == {*OVERRIDDEN}
    for name in set(OVERRIDDEN) - PASSED_ON:
        assert _signature(getattr(ExtGRPOTrainer, name)) == OVERRIDDEN[name]


@pytest.mark.moderate
def test_overrides_stand_in_the_order_a_step_calls_them(tmp_path: Path) -> None:
    """A real step with a stop string and tools, so that every override is called, from a checkpoint at its end."""
    trainer: Any = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, preset="grpo_clip", stop=["1"], max_steps=1,
        save_strategy="steps", save_steps=1, tools="calculator",
    )  # fmt: skip
    called: list[str] = []
    for name in dict.fromkeys((*OVERRIDDEN, *OVERRIDDEN_IN_BOTH)):
        original = getattr(trainer, name)
        assert original.__qualname__.split(".")[0] in ("ExtGRPOTrainer", "ReliableTrainer")
        setattr(trainer, name, lambda *a, name=name, original=original, **k: called.append(name) or original(*a, **k))
    trainer.train()
    in_order = list(dict.fromkeys(called))
    for cls, overridden in ((ExtGRPOTrainer, OVERRIDDEN), (ReliableTrainer, OVERRIDDEN_IN_BOTH)):
        seen = [name for name in in_order if name in overridden]
        resuming = {"_load_from_checkpoint", "_load_callback_state", "_load_rng_state"}
        only_elsewhere = resuming | {"_build_accelerator_args", "_evaluate", "_push_from_checkpoint"}
        assert seen == [name for name in overridden if name not in only_elsewhere]
        assert [name for name in vars(cls) if name in overridden] == list(overridden)
        about = sys.modules[cls.__module__].__doc__ or ""
        first = [re.search(rf"^ +(?:Trainer.train -> ExtGRPOTrainer.)?{name}\b", about, re.M) for name in overridden]
        places = [found.start() for found in first if found]
        assert len(places) == len(overridden)
        assert places == sorted(places)


@pytest.mark.moderate
def test_no_class_has_more_than_two_bases() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.ClassDef) or len(node.bases) <= 2, (path, node.name)


@pytest.mark.moderate
def test_only_the_seams_subclass_a_trainer() -> None:
    subclasses = [
        (path.relative_to(PACKAGE).as_posix(), node.name, ast.unparse(base))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base).endswith("Trainer")
    ]
    assert sorted(subclasses) == [
        ("grpo/trainer.py", "ExtGRPOTrainer", "GRPOTrainer"),
        ("grpo/trainer.py", "ExtGRPOTrainer", "ReliableTrainer"),
        ("imitation/expert_iteration.py", "ExpertIterationTrainer", "ExtSFTTrainer"),
        ("imitation/sft.py", "ExtSFTTrainer", "ReliableTrainer"),
        ("imitation/sft.py", "ExtSFTTrainer", "SFTTrainer"),
        ("tools/estimate/memory/trainers.py", "FakeGRPO", "ExtGRPOTrainer"),
        ("tools/estimate/memory/trainers.py", "FakeSFT", "ExtSFTTrainer"),
        ("training/trainer.py", "ReliableTrainer", "Trainer"),
    ]


PATCHES = re.compile(
    r"unittest\.mock|patch\.object|register_package|importlib\.reload|^\w+\.\w+ = \w+\.\w+ = ", re.MULTILINE
)


def test_other_libraries_are_patched_in_compat_only() -> None:
    patching = [path for path in PACKAGE.rglob("*.py") if PATCHES.search(path.read_text(encoding="utf-8"))]
    assert {path.parent.name for path in patching} == {"compat"}
    about = (
        ast.get_docstring(ast.parse((PACKAGE / "compat" / "__init__.py").read_text(encoding="utf-8"))) or ""
    ).split()
    for path in sorted((PACKAGE / "compat").glob("*.py")):
        functions = [n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
        listed = any(f"`{path.stem}.{name}`:" in about for name in functions) or f"`{path.stem}`:" in about
        assert listed or path.stem == "__init__", path
        if path in patching and path.stem.startswith("trl_"):
            assert all(f"`{path.stem}.{name}`:" in about for name in functions)


@pytest.mark.moderate
def test_only_the_seams_and_what_stands_on_them_import_trl() -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl")
        or (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "trl" for a in node.names))
    }
    recipes = {"cli.py", "expert_iteration.py", "explain.py", "grpo.py", "model_settings.py", "preflight.py"}
    assert importers == {f"recipes/{name}" for name in (*recipes, "run.py", "sft.py")} | {
        "compat/fake_modules.py",
        "compat/given.py",
        "compat/lazy_vllm.py",
        "compat/trl_engine.py",
        "compat/trl_head.py",
        "compat/trl_scoring.py",
        "tools/estimate/costs/counting.py",
        "tools/estimate/planned.py",
        "generation/adapter_models.py",
        "generation/adapter_sync.py",
        "generation/engine_choice.py",
        "generation/server.py",
        "generation/vllm.py",
        "grpo/config.py",
        "grpo/construction.py",
        "grpo/forward_pass.py",
        "grpo/local_teacher.py",
        "grpo/trainer.py",
        "imitation/sft.py",
        "training/trainer.py",
        "turns/protocols.py",
    }


@pytest.mark.slow
def test_what_trl_imports_of_vllm_is_what_is_loaded_later() -> None:
    """Names under `if is_vllm_available()`, which TRL has from the start where vLLM is imported with it."""
    tree = ast.parse(inspect.getsource(vllm_generation))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "is_vllm_available()"]
    names = {alias.name for block in blocks for n in block.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert names
    source = inspect.getsource(load_vllm)
    assert all(f'"{name}": {name},' in source for name in names)
    load_vllm()
    for name in (*names, "VLLMClient"):
        assert getattr(vllm_generation, name).__module__.startswith("vllm" if name in names else "trl")
    assert vllm_generation.is_vllm_available is is_vllm_available
