"""Every object that holds state during a run is what it was in a resumed one, or the resumed run is refused by its name.

docs/packages/training.md lists the objects; the cases below go through the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Qwen3ForCausalLM, TrainerCallback, set_seed
from transformers.trainer_callback import ExportableState
from trl import BEMACallback

from tests.recipes.test_grpo import DEFAULT, ON_A_CPU
from tests.support.tiny import prompts, save_tiny, tiny_sft, weight_difference
from tests.training.test_resume import OF_KINDS, OFF_POLICY, SAVING, made
from trl_ext.errors import InputError
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.preflight import prepare

STEPS, KILLED = 4, 2
KL = {"preset": "grpo_clip", "beta": 0.5}
SYNCED = {**KL, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6}
JUDGED = {
    "preset": "grpo_clip", "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4), "num_generations_eval": 4,
    "per_device_eval_batch_size": 4, "metric_for_best_model": "eval_reward", "greater_is_better": True,
}  # fmt: skip
EPOCHS = {"train_dataset": prompts(8)}  # two optimizer steps each


class Counting(TrainerCallback, ExportableState):
    """Counts steps into its own log, as transformers' protocol keeps it."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class Averaging(TrainerCallback):
    """An average of the weights, as torch's protocol keeps it."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        for name, weight in kwargs["model"].named_parameters():
            before = self.average.get(name, weight.detach())
            self.average[name] = 0.5 * before + 0.5 * weight.detach()


class Kept(Averaging):
    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def stream(n: int = 16, **shuffled: int) -> Any:
    found = prompts(n).to_iterable_dataset(num_shards=2)
    return found.shuffle(**shuffled) if shuffled else found


def dropping(path: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(path, attention_dropout=0.3)


def lora(**more: Any) -> Callable[[Path], dict[str, Any]]:
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **more}
    return lambda path: {"peft_config": peft.LoraConfig(**settings), **KL}


def other_adapter(kind: str, **more: Any) -> Callable[[Path], dict[str, Any]]:
    given = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **more}
    return lambda path: {"peft_config": getattr(peft, kind)(**given), **KL}


def with_an_adapter(path: Path) -> dict[str, Any]:
    """A policy that came with an adapter: TRL's reference is a second, frozen copy of that."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    set_seed(3)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return {"model": model, **KL}


GRPO: dict[str, dict[str, Any] | Callable[[Path], dict[str, Any]]] = {
    "synced reference": SYNCED,
    "reference": {**KL, **OFF_POLICY},
    "schedule on a plateau": {**JUDGED, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}},
    "greedy schedule": {**JUDGED, "lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 0}},
    "warm-up, stable, decay": {
        "preset": "grpo_clip", "lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 1,
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
    },
    "early stopping": {**JUDGED, "load_best_model_at_end": True, "callbacks": lambda: [EarlyStoppingCallback(3)]},
    "evaluation at the start": {**JUDGED, "eval_on_start": True},
    "callbacks with state": {"preset": "grpo_clip", "callbacks": lambda: [Counting(), Counting(), Kept()]},
    "stream": lambda path: {"preset": "grpo_clip", "train_dataset": stream()},
    "shuffled stream": lambda path: {"preset": "grpo_clip", "train_dataset": stream(seed=3, buffer_size=8)},
    "shuffled stream over epochs": lambda path: {"preset": "grpo_clip", "train_dataset": stream(8, seed=3, buffer_size=8)},
    "rows in order over epochs": {"preset": "grpo_clip", "shuffle_dataset": False, **EPOCHS},
    "curriculum over epochs": {"preset": "grpo_clip", "uninformative_keep_prob": 0.1, "train_dataset": OF_KINDS.select(range(8))},
    "adaptive entropy in TRL's loss": {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.1},
    "noise on embeddings": {"preset": "grpo_clip", "neftune_noise_alpha": 5.0},
    "dropout": lambda path: {"preset": "grpo_clip", "model": dropping(path), "disable_dropout": False},
    "counted tokens": {"preset": "grpo_clip", "include_num_input_tokens_seen": True, "logging_steps": 3},
    "LoRA with dropout": lora(lora_dropout=0.2),
    "PiSSA": lora(init_lora_weights="pissa"),
    "AdaLoRA": other_adapter("AdaLoraConfig", init_r=3, target_r=2, tinit=1, tfinal=1, total_step=STEPS),
    "policy with an adapter": with_an_adapter,
}  # fmt: skip
# Whose state is that of the adapters above.
OTHER_ADAPTERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "DoRA": lora(use_dora=True),
    "rsLoRA and a trained head": lora(use_rslora=True, modules_to_save=["norm"]),
    "PiSSA by random projections": lora(init_lora_weights="pissa_niter_2"),
    "OLoRA": lora(init_lora_weights="olora"),
    "VeRA": other_adapter("VeraConfig", r=2),
    "IA3": other_adapter("IA3Config", feedforward_modules=[]),
}


SFT: dict[str, dict[str, Any]] = {
    "rows at random over epochs": {},
    "without accelerate's sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "balanced batches": {"train_sampling_strategy": "batch_rebalance"},
    "in order": {"train_sampling_strategy": "sequential"},
    "packed": {"packing": True, "max_length": 16},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "a seed of the data": {"data_seed": 11, "logging_steps": 3},
}


def grpo(path: Path, case: str, model: Path) -> Any:
    given = {**GRPO, **OTHER_ADAPTERS}[case]
    settings = dict(given(model) if callable(given) else given)
    if "callbacks" in settings:
        settings["callbacks"] = settings["callbacks"]()
    return made(path, **{"model": str(model), "max_steps": STEPS, "save_steps": KILLED, **settings})


def sft(path: Path, case: str, model: Path) -> Any:
    rows = [
        {"input_ids": [9, *range(3, 5 + n % 5), 1], "completion_mask": [0, 1, *[1] * (n % 5 + 2)]} for n in range(8)
    ]
    settings = {**SAVING, "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    settings["save_steps"] = KILLED
    return tiny_sft(ExtSFTTrainer, ExtSFTConfig, path, rows, **{**settings, **SFT[case]})


def without_seconds(trainer: Any) -> list[Any]:
    return [{k: v for k, v in e.items() if "second" not in k and "time" not in k} for e in trainer.state.log_history]


def difference(whole: Any, again: Any) -> str | None:
    """What an uninterrupted run and a resumed one do not share; None if they are bit-identical."""
    for before, after in zip(without_seconds(whole), without_seconds(again), strict=False):
        if json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True):  # NaN is NaN
            return f"logged {before}, resumed {after}"
    if len(whole.state.log_history) != len(again.state.log_history):
        return "another number of entries was logged"
    if weight_difference(whole.model, again.model):
        return "weights"
    states = [trainer.optimizer.state_dict()["state"] for trainer in (whole, again)]
    if not same(*states):
        return "the optimizer"
    names = ("steps", "early_stopping_patience_counter", "average")
    found = [[[getattr(c, n, None) for n in names] for c in t.callback_handler.callbacks] for t in (whole, again)]
    return None if same(*found) else f"callbacks: {found}"


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors in them too."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("make", "cases"),
    [
        pytest.param(grpo, GRPO, id="grpo"),
        pytest.param(grpo, OTHER_ADAPTERS, id="other adapters", marks=pytest.mark.nightly),
        pytest.param(sft, SFT, id="sft"),
    ],
)
def test_each_state_of_a_run_is_resumed_bit_identically(
    make: Callable[[Path, str, Path], Any], cases: dict[str, Any], tmp_path: Path
) -> None:
    model, wrong = save_tiny(tmp_path / "model"), {}
    for case in cases:
        whole, again = tmp_path / case / "whole", tmp_path / case / "again"
        uninterrupted = make(whole, case, model)
        uninterrupted.train()
        torch.manual_seed(99)  # another process
        resumed = make(again, case, model)
        resumed.train(resume_from_checkpoint=str(whole / f"checkpoint-{KILLED}"))
        if found := difference(uninterrupted, resumed):
            wrong[case] = found
    assert not wrong


def refusal(trainer: Any, checkpoint: Path) -> str:
    with pytest.raises(InputError) as refused:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    return str(refused.value)


class Allocating(TrainerCallback):
    def on_optimizer_step(self, args: object, state: Any, control: object, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_state_that_no_checkpoint_holds_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny(tmp_path / "model")

    def run(name: str, **more: Any) -> Any:
        return made(tmp_path / name, **{"model": str(model), "preset": "grpo_clip", "max_steps": 2, **more})

    ada = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_r": 3, "target_r": 2, "tinit": 0, "tfinal": 1}
    cases: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "bema": (
            "BEMACallback, whose tensors are in no checkpoint",
            lambda: {"callbacks": [BEMACallback(update_freq=1)]},
        ),
        "own": ("Averaging, whose tensors are in no checkpoint", lambda: {"callbacks": [Averaging()]}),
        "adalora": (
            "AdaLoRA's rank allocator, whose",
            lambda: {"callbacks": [Allocating()], "peft_config": peft.AdaLoraConfig(**ada, total_step=4)},
        ),
        "model only": (
            "the optimizer's moments (no optimizer.pt); the learning rate's schedule, from its first step (no "
            "scheduler.pt); the random states (no rng_state.pth), since it was saved with save_only_model",
            lambda: {"save_only_model": True},
        ),
    }
    for name, (words, settings) in cases.items():
        run(name, **settings()).train()
        checkpoint = tmp_path / name / "checkpoint-1"
        said = refusal(run(f"{name} again", **settings()), checkpoint)
        assert words in said
        assert "--resume_changed" in said
        asked = run(f"{name} asked", resume_changed=True, **settings())
        asked.train(resume_from_checkpoint=str(checkpoint))
        assert f"{checkpoint} is resumed, and this restarts: {words[:20]}" in caplog.text
        assert asked.state.global_step == 2
    run("synced", **SYNCED).train()
    (tmp_path / "synced" / "checkpoint-1" / "reference" / "model.safetensors").unlink()
    (tmp_path / "synced" / "checkpoint-1" / "manifest.json").unlink()  # as an earlier version has left it
    said = refusal(run("synced again", **SYNCED), tmp_path / "synced" / "checkpoint-1")
    assert "the reference of sync_ref_model, from the model that the run began with" in said
    assert f"resume from {tmp_path / 'synced' / 'checkpoint-2'}, which has all of it" in said


def test_synced_reference_of_an_adapter_is_refused_early() -> None:
    given = [*ON_A_CPU, "--use_peft", "true", "--beta", "0.1", "--sync_ref_model", "true"]
    task, model, config = parse(GRPO_SETTINGS, "about", DEFAULT, given)
    with pytest.raises(
        InputError, match="sync_ref_model with use_peft: the reference of an adapter is the model without"
    ):
        prepare(task, model, config, task.data)
