"""What `test_distributed.py` trains on one rank in its own process and on two, under torchrun or accelerate.

python -m tests.support.two_ranks OUTPUT PART      PART: axes, all, sync, ahead, estimate, resume, reference,
                                                   compiled, or quantized
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.grpo.test_step import PLAIN, every_other_group, questions
from tests.support.tiny import (
    CALL,
    WAIT,
    chain_model,
    ends_early,
    fraction_of_ones,
    make_trainer,
    piece_tokenizer,
    save_tiny,
    scripted,
    tiny_model,
    tiny_sft,
    tiny_tokenizer,
    tool_tokenizer,
    train,
)
from trl_ext import AGGREGATIONS, PRESETS, ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import grade_rows
from trl_ext.generation.completion import Completion
from trl_ext.imitation.expert_iteration import ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.recipes.expert_iteration import EndOfStep
from trl_ext.rewards.graders import Grade
from trl_ext.rewards.score import Score
from trl_ext.runs.folder import Run
from trl_ext.training.callbacks import Validation
from trl_ext.training.stopping import TimeBasedLRDecay, TimeBudget

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
DEEPSPEED = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
ZERO3 = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
NIGHTLY = "TRL_EXT_NIGHTLY" in os.environ  # set by pytest --nightly
# Savings, sums over ranks and selections act before a loss is called: three presets show it, of tokens, of sequences,
# and with dynamic sampling. The others run nightly, as do, under ZeRO, the runs that exchange nothing of their own.
OFF_POLICY = ("dapo_full", "grpo_clip", "gspo")
UNDER_ZERO = ("token_mean", "kl", "left_out", "unequal", "saved", "as_trl_cuts", "dynamic_sampling", "sft", "playing")
TAUGHT = ("opd_grpo", "gkd")  # by a teacher, of sampled tokens and of distributions
SAMPLED = ["aa0", "1", "bbbb2", "0", "c1"]  # an odd number, of different lengths
STOP_WORD = 6


def ours(path: Path, reward: Any, **settings: Any) -> Any:
    return train(ExtGRPOTrainer, ExtGRPOConfig, path, reward, **settings)


def words_of_row(row: int, step: int) -> list[int]:
    """Rows of very different length: the ranks' token counts differ. Every third ends at the stop word."""
    return [3 + (row * 7 + i * i) % 3 + 5 * (i % 2) for i in range(1 + row * row % 10)] + [STOP_WORD if row % 3 else 4]


def graded(completions: list[str], **_: Any) -> list[float | None]:
    """The fraction of ones, except for a row that nothing scores; correct is a matter of length."""
    return [
        None if text.startswith("b") else Score(share, correct=len(text.split()) > 4)
        for text, share in zip(completions, fraction_of_ones(completions), strict=True)
    ]


def infinite_in_the_second_rollout() -> Any:
    """A reward whose second call has an infinite value on every rank."""
    calls: list[int] = []

    def sometimes_infinite(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        rewards = fraction_of_ones(completions)
        return [float("inf"), *rewards[1:]] if len(calls) == 2 else rewards

    return sometimes_infinite


def second_half_never_ends(row: int, step: int) -> list[int]:
    """With truncated rows masked, all that trains is the first rank's."""
    return words_of_row(row, step) if row < 8 and row % 3 else [3] * 12


def scripted_run(path: Path, words: Any = words_of_row, reward: Any = graded, **axes: Any) -> Any:
    """The same completions whatever the weights and the ranks, so that only the arithmetic can differ."""
    settings = {"preset": "grpo_clip", "train_batch_size": 16, "rollout_batch_size": 16, "stop": ["stop"], **axes}
    model = tiny_model() if DEEPSPEED else tiny_model().double()  # ZeRO's buckets have no float64
    exact = {"model": model, "max_grad_norm": 0.0, "gradient_accumulation_steps": 4 // RANKS}
    return ours(path, reward, rollout_func=scripted(words), **{**exact, **settings})


def playing_run(path: Path) -> Any:
    """Responses of several turns, of an environment; in the first step those of the second half call nothing."""
    tokenizer = tool_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))  # whose logits are small: TRL's head computes them in float32
    model = model if DEEPSPEED else model.double()
    rows = Dataset.from_list([{"prompt": f"{n}+1=", "answer": "6", "start": n} for n in range(8)])
    trainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, path, says_six, model=model, processing_class=tokenizer, train_dataset=rows,
        tools="tests/support/own_environments.py:Calculators", preset="grpo_clip", advantage="turn_returns", max_turns=3,
        max_completion_length=40, train_batch_size=16, rollout_batch_size=16, max_grad_norm=0.0,
        gradient_accumulation_steps=4 // RANKS,
    )  # fmt: skip

    def turn(prompts: list[list[int]], *_: object, **__: object) -> tuple[list[list[int]], None]:
        start, step = trainer.accelerator.process_index * len(prompts), trainer.state.global_step
        said = []
        for place, ids in enumerate(prompts):
            is_first = tokenizer.decode(ids[-1:]) == "="
            number = start + place if is_first else sum(ids)
            call = [CALL, ("2*3", "3+3", "*")[number % 3], WAIT]
            calls = number % 3 and (number < 8 or step) if is_first else number % 4 == 0
            said.append(call if calls else ["guess" if is_first else "so", "67"[number % 2], "<eos>"])
        trainer.generated_logps = None
        return [tokenizer.convert_tokens_to_ids(words) for words in said], None

    trainer._generate_single_turn = turn
    trainer.train()
    return trainer


def says_six(completions: list[str], **_: Any) -> list[float]:
    """Whether 6 is the last word."""
    return [float(text.endswith("6")) for text in completions]


def found_by(trainer: Any) -> dict[str, Any]:
    """The weights, the logs and this rank's last rollout."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    with trainer._dist.gather_params(list(model.parameters())):
        weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    rollout = [(row["response"], repr(row["reward"])) for row in getattr(trainer, "last_rollout", [])]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": weights, "logs": logs, "rollout": rollout, "skipped": getattr(trainer, "skipped_steps", 0)}


def runs_of_axes(path: Path) -> dict[str, Any]:
    """What has to be the same on one rank and on two, by the name of the run."""
    two_epochs = {"reward": every_other_group, "num_iterations": 2, "max_steps": 4, "gradient_checkpointing": False}
    two_epochs |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // RANKS}
    several = {"reward": graded, "num_iterations": 2}  # advantages that ask for lengths, are per token, of two rewards
    scripted_runs: dict[str, dict[str, Any]] = {
        **{name: {"aggregation": name} for name in sorted(AGGREGATIONS)},
        "kl": {"num_iterations": 2, "max_steps": 4},
        "left_out": {"reward": infinite_in_the_second_rollout(), "advantage": "raw", "max_steps": 4},
        "unequal": {"words": second_half_never_ends, "mask_truncated_completions": True},
        "saved": two_epochs,
        "as_trl_cuts": two_epochs | PLAIN,
        "opo": {"advantage": "opo", **several},
        "discounted": {"advantage": "discounted", **several},
        "gdpo": {"advantage": "gdpo", **several, "reward": [graded, by_problem]},
        "dynamic_sampling": {
            "dynamic_sampling_tries": 3, "train_dataset": of_kinds(), "reward": by_problem, "max_steps": 4,
        },
        "selected": {
            "rollout_selection": "shortest", "rollout_selection_options": {"keep": 2}, "num_iterations": 2,
            "reward": graded, "max_steps": 4,
        },
        "step_tokens": {
            "policy_loss": "clip_cov", "policy_loss_options": {"fraction": 0.2, "low": 0.01}, "num_iterations": 2,
            "reward": graded, "max_steps": 4,
        },
    }  # fmt: skip
    others: dict[str, Callable[[Path], Any]] = {
        "sft": fine_tuned,
        "sft_constant": functools.partial(fine_tuned, normalize_constant=7.0),
        "expert_iteration": expert_iteration,
        "playing": playing_run,
    }
    found: dict[str, Any] = {}
    # Each rank's own, before there is a group in which the first one saves for all; and the first model that a run
    # loads is a teacher.
    teacher = save_tiny(path / f"teacher{os.environ.get('RANK', '0')}", seed=1)
    with mock.patch.dict(os.environ):
        if ZERO3:
            partition_everything(path.with_suffix(".json"))
        for name in TAUGHT:
            found[name] = found_by(taught_run(path / name, teacher, preset=name, **two_epochs))
    for name in (*scripted_runs, *others):
        if name in UNDER_ZERO or NIGHTLY or not DEEPSPEED:
            run = others.get(name) or functools.partial(scripted_run, **scripted_runs[name])
            found[name] = found_by(run(path / name))
    if ZERO3:
        partition_everything(path.with_suffix(".json"))
    found["sets"] = with_several_sets(path / "sets", micro_batch_tokens=40)
    found["sets_as_trl_cuts"] = with_several_sets(path / "sets_as_trl_cuts", **PLAIN)
    return found


def with_several_sets(path: Path, **settings: Any) -> dict[str, Any]:
    """Checkpointed, on more prompts than a micro-batch has room for, and on other numbers of them on either rank.

    A limit of tokens takes more micro-batches than the calls that TRL makes: one per rank and step.
    """
    data = {"train_dataset": questions(), "reward": every_other_group_of_the_second_half, "num_iterations": 2}
    cut = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2 // RANKS, "train_batch_size": 32}
    trainer = scripted_run(
        path, rollout_batch_size=32, gradient_checkpointing=True, max_steps=2, **data, **cut, **settings
    )
    plans = trainer._planner.plans if trainer._planner else []
    prompts = [list(dict.fromkeys(id(one.forward.prompts) for one in plan)) for plan in plans]
    trained = [len({id(one.forward.prompts) for one in plan if one.trains}) for plan in plans]
    found = {"sets": [len(sets) for sets in prompts], "trained_sets": trained, "micro_batches": [*map(len, plans)]}
    return found_by(trainer) | found


def taught_run(path: Path, teacher: Path, **settings: Any) -> Any:
    """On shared prompts, by a model with other weights; nothing of the second rank's is trained on."""
    settings |= {"words": second_half_never_ends, "mask_truncated_completions": True, "reward": graded}
    dtype = torch.float32 if DEEPSPEED else torch.float64
    given = {"teacher": f"t={teacher}", "teacher_init_kwargs": {"dtype": dtype}, "train_dataset": questions()}
    return scripted_run(path, **given, **settings)


def every_other_group_of_the_second_half(completions: list[str], **_: Any) -> list[float]:
    """Groups of 4, of which there are eight; every group of the first half has variance."""
    ranks_share = len(completions) // 4
    first = int(os.environ.get("RANK", "0")) * ranks_share
    shares = fraction_of_ones(completions)
    return [1.0 if first + i // 4 in (5, 7) else share for i, share in enumerate(shares)]


def of_kinds() -> Dataset:
    rows = [
        {"prompt": f"{i % 9} + {i % 5} =", "answer": "1", "subject": "ab"[i % 2], "level": 1 + i % 3} for i in range(24)
    ]
    return Dataset.from_list(rows)


def by_problem(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Of every third problem, the fraction of ones; the others have no variance."""
    shares = fraction_of_ones(completions)
    return [share if int(prompt[0]) % 3 == 0 else 1.0 for prompt, share in zip(prompts, shares, strict=True)]


def uninformative_run(path: Path) -> dict[str, Any]:
    """With a curriculum, of problems of which every other group has no reward variance."""
    data = {"train_dataset": of_kinds(), "reward": every_other_group}
    trainer = scripted_run(path, uninformative_keep_prob=0.1, max_steps=6, **data)
    return found_by(trainer) | {"curriculum": trainer._problems.curriculum.state_dict()}


def decaying(path: Path, **settings: Any) -> Any:
    """With a rate that falls on the clock, of which the second rank's is 20 s ahead."""
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, ends_early, preset="grpo_clip", max_steps=4, **settings)
    ahead = 20.0 * trainer.accelerator.process_index
    clock: Any = SimpleNamespace(seconds=lambda: 10.0 * trainer.state.global_step + ahead)
    trainer.add_callback(TimeBasedLRDecay(TimeBudget(trainer, clock, 100.0), 1.0))
    trainer.train()
    return trainer


def validated(path: Path, trainer: Any) -> list[float]:
    """Accuracy of a validation whose grader has no time for half of the responses on the second rank."""

    def graded(responses: Sequence[str], truths: Sequence[Any]) -> list[Grade]:
        known = len(responses) // (1 + trainer.accelerator.process_index)
        return [Grade(True, text, i < known, "") for i, text in enumerate(responses)]

    run = Run(path, {})
    problems = [{"prompt": prompt, "answer": "1"} for prompt in SAMPLED]
    validation = Validation(problems, graded, lambda state: True, {"batch_size": 2, "seed": 0}, run, trainer)
    validation.on_train_begin(trainer.args, trainer.state, trainer.control)
    return [entry["accuracy"] for entry in run.validations]


def exact() -> dict[str, Any]:
    """The model and the cut into micro-batches for which one rank and two add up the same rows."""
    model = tiny_model() if DEEPSPEED else tiny_model().double()  # ZeRO's buckets have no float64
    return {
        "model": model, "max_grad_norm": 0.0, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // RANKS,
    }  # fmt: skip


def fine_tuned(path: Path, **settings: Any) -> Any:
    """Rows of different lengths, so that the ranks' token counts differ."""
    rows = [
        {
            "input_ids": [9, 7, 10, 8, *words_of_row(row, 0)],
            "completion_mask": [0] * 4 + [1] * len(words_of_row(row, 0)),
        }
        for row in range(24)
    ]
    trainer = tiny_sft(ExtSFTTrainer, ExtSFTConfig, path, rows, **exact(), **settings)
    trainer.train()
    return trainer


def long_enough(responses: Sequence[str], truths: Sequence[Any]) -> list[Grade]:
    return [Grade(True, text, len(text.split()) > 6, "") for text in responses]


def expert_iteration(path: Path) -> Any:
    """The same completions on one rank and on two; what a step keeps fills no whole number of batches."""
    settings = {"n_ei_steps": 3, "questions_per_step": 5, "group_size": 1, "epochs_per_step": 2, "max_steps": -1}
    questions = [{"prompt": f"{i} + {i} =", "answer": str(i)} for i in range(9)]
    trainer = tiny_sft(
        ExpertIterationTrainer, ExpertIterationConfig, path, None, questions=questions, folder=path / "ei",
        grader=long_enough, **exact(), **settings,
    )  # fmt: skip
    trainer.completion_ids = lambda prompts: [words_of_row(int(prompt[0]), 0) for prompt in prompts]
    trainer.add_callback(EndOfStep(trainer))
    trainer.train()
    return trainer


def all_runs(path: Path) -> dict[str, Any]:
    """Those of the axes, on two ranks more runs, and completions of a validation."""
    found = runs_of_axes(path)

    def keep(name: str, trainer: Any) -> None:
        found[name] = found_by(trainer)

    if RANKS > 1:
        accumulate = {"gradient_accumulation_steps": 2}
        keep("stock_trl", train(GRPOTrainer, GRPOConfig, path / "trl", ends_early, **accumulate))
        keep("stock_ours", ours(path / "ours", ends_early, **accumulate))
        found["uninformative"] = uninformative_run(path / "uninformative")
        keep("decay", decaying(path / "decay", **accumulate))
        off_policy = {"rollout_batch_size": 32, "train_batch_size": 16, "num_iterations": 2, "max_steps": 6}
        for preset in sorted(
            PRESETS if NIGHTLY else OFF_POLICY
        ):  # several optimizer steps on each rollout, sampled by each rank
            keep(f"off_policy_{preset}", ours(path / preset, ends_early, preset=preset, **off_policy, **accumulate))
    tokenizer = piece_tokenizer()
    model = chain_model(tokenizer, ["0", "x", "<eos>"], ["1", "y", "</", "answer", ">"], ["2", "z", "z"])
    chain = {"model": model, "processing_class": tokenizer, "stop": ["</answer>"]}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, ends_early, **chain)
    generate, batches = trainer._generate_single_turn, []

    def count(*args: Any) -> Any:
        batches.append(len(args[0]))
        return generate(*args)

    trainer._generate_single_turn = count
    found["sampled"] = trainer.sample(SAMPLED, 2, seed=0) + trainer.sample(SAMPLED[:1], 2, seed=0)
    found["batches"] = batches.copy()
    found["validated"] = validated(path, trainer)
    if RANKS > 1:
        found["faults"] = faults_of_one_rank(path / "faults")
    return found


def sync_runs(path: Path) -> dict[str, Any]:
    """How far engine and policy are apart before and after a sync, with full weights and with LoRA.

    The engine is colocated, or the server at TRL_EXT_TEST_SERVER.
    """
    from peft import LoraConfig

    from tests.generation.test_vllm import SETTINGS, disagreement, save_model, shake

    if ZERO3:
        partition_everything(path.with_suffix(".json"))
    settings = {**SETTINGS, "learning_rate": 0.1}
    if url := os.environ.get("TRL_EXT_TEST_SERVER"):
        settings = {name: value for name, value in settings.items() if not name.startswith("vllm_")}
        settings |= {"vllm_mode": "server", "vllm_server_base_url": url}
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    found, trainers = {}, []  # an engine that is collected takes vLLM's process groups with it
    by_itself = {"peft_config": lora, "vllm_lora_sync": "adapter"}
    for name, more in {"full": {}, "lora": {"peft_config": lora}, "by_itself": by_itself}.items():
        model = save_model(path / f"model{os.environ['RANK']}", tied=True)
        trainer = ours(path / name, ends_early, model=str(model), **settings, **more)
        trainers.append(trainer)
        apart = {"unsynced": disagreement(trainer)}
        trainer.vllm_generation.sync_weights()
        apart["after_training"] = disagreement(trainer)
        shake(trainer, "lora_B" if more else "proj")
        apart["shaken"] = disagreement(trainer)
        trainer.vllm_generation.sync_weights()
        apart["synced"] = disagreement(trainer)
        found[name] = apart
    return found


def runs_ahead(path: Path) -> dict[str, Any]:
    """What this rank trains on in a run one rollout ahead, in another whose answers are late, and in a resumed one.

    The servers at TRL_EXT_TEST_SERVER sample; problems are selected by earlier rewards.
    """
    from tests.generation.test_server import SELECTED, Sees, at_random_times
    from tests.generation.test_vllm import save_model

    if ZERO3:
        partition_everything(path.with_suffix(".json"))
    model = save_model(path / f"model{os.environ['RANK']}", tied=True)
    found: dict[str, Any] = {}

    def run(name: str, resume: Path | None = None) -> None:
        sees = Sees()
        sees.trainer = make_trainer(
            ExtGRPOTrainer, ExtGRPOConfig, path / name, model=str(model), use_vllm=True, vllm_mode="server",
            vllm_server_base_url=os.environ["TRL_EXT_TEST_SERVER"], model_init_kwargs={"dtype": "float32"},
            preset="grpo_clip", learning_rate=0.1, rollout_ahead=1, callbacks=[sees], max_steps=4, save_strategy="steps",
            save_steps=1, **SELECTED,
        )  # fmt: skip
        sees.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        logged = [entry for entry in sees.trainer.state.log_history if "sampling/staleness" in entry]
        staleness = [entry["sampling/staleness"] for entry in logged]
        found[name] = {"rollouts": sees.rollouts, "staleness": staleness}

    run("first")
    with pytest.MonkeyPatch.context() as patched:
        at_random_times(patched, seed=int(os.environ["RANK"]))
        run("late")
    run("resumed", path / "first" / "checkpoint-2")
    return found


def partition_everything(config: Path) -> None:
    """ZeRO-3 that keeps no parameter whole between uses, as it would all of a tiny model's."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    kept_whole = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    zero3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **dict.fromkeys(kept_whole, 0)}
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps({"zero_optimization": zero3, **dict.fromkeys(auto, "auto")}))
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(config)
    os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ""  # those of accelerate's own file, refused next to DeepSpeed's


def faults_of_one_rank(path: Path) -> dict[str, Any]:
    """What either rank raises, and after how many seconds, where something of one rank's is at fault."""
    rank = int(os.environ["RANK"])

    known: dict[str, float] = {}

    def raises(completions: list[str], **_: Any) -> list[float]:
        return fraction_of_ones(completions) if rank == 0 else [known[text] for text in completions]

    async def raises_later(completions: list[str], **_: Any) -> list[float]:
        return raises(completions)

    def hangs(completions: list[str], **_: Any) -> list[float]:
        time.sleep(1000 * rank)
        return fraction_of_ones(completions)

    def fails(problems: Any, completions: Any) -> list[Grade]:
        raise LookupError("no verdict")  # the first rank grades for all

    def validates(trainer: Any) -> None:
        run_on_main_and_broadcast(lambda: grade_rows([{"answer": "1"}], [Completion("1", 1, True)], fails))

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            if rank == 1:
                raise torch.OutOfMemoryError("no memory for the reward model")
            return SimpleNamespace(logits=torch.zeros(len(input_ids), 1))

    def with_model(trainer: Any) -> None:
        trainer.reward_funcs, trainer.reward_processing_classes = [Model()], [tiny_tokenizer()]
        trainer.train()

    rewards = {
        "raises": raises,
        "model": ends_early,
        "raises_later": raises_later,
        "hangs": hangs,
        "validates": ends_early,
    }
    found = {}
    for name, reward in rewards.items():
        settings = {"reward_timeout": 1.0, "gradient_accumulation_steps": 2}
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path / name, reward, **settings)
        began = time.monotonic()
        try:
            {"validates": validates, "model": with_model}.get(name, lambda trainer: trainer.train())(trainer)
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            found[name] = {"kinds": kinds, "message": str(error), "seconds": time.monotonic() - began}
    return found


def resumed_by_two(path: Path) -> dict[str, Any]:
    """What two ranks make of the checkpoints that one process has left, within a rollout and between two."""

    def resumed(step: int) -> Any:
        settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "resume_changed": True}
        off_policy = {"steps_per_generation": 8, "num_iterations": 2, "uninformative_keep_prob": 0.5}
        trainer = make_trainer(
            ExtGRPOTrainer, ExtGRPOConfig, path, ends_early, preset="grpo_clip", **settings, **off_policy
        )
        trainer.train(resume_from_checkpoint=str(path.parent / "one" / f"checkpoint-{step}"))
        return trainer

    try:
        resumed(2)
    except InputError as error:
        refused = str(error)
    between = resumed(4)
    settled = sorted(between._problems.curriculum.informative.items())
    return {"refused": refused, "steps": between.state.global_step, "settled": settled}


def with_a_synced_reference(path: Path) -> dict[str, Any]:
    """The KL that a run logs after its first step, uninterrupted and resumed there."""
    if RANKS == 1 or int(os.environ["RANK"]) == 0:
        save_tiny(path / "model")
    model, saving = (
        str(path / "model"),
        {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "optim": "adamw_torch"},
    )
    saving |= {
        "beta": 0.5,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "learning_rate": 0.01,
        "preset": "grpo_clip",
    }
    if ZERO3:
        partition_everything(path.with_suffix(".json"))
    found = {}
    for name, checkpoint in (("whole", None), ("again", path / "whole" / "checkpoint-2")):
        PartialState().wait_for_everyone()
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path / name, ends_early, model=model, **saving)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        found[name] = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    return found


def estimated_runs(path: Path) -> dict[str, Any]:
    """What either rank meets, prints and starts where a run on a GPU, which is not there, is estimated."""
    from tests.generation.test_vllm import save_model
    from trl_ext.data.references import first_rank
    from trl_ext.recipes.cli import read_settings
    from trl_ext.recipes.grpo import GRPO_SETTINGS
    from trl_ext.tools.estimate import before_run

    policy, settings = save_model(path / os.environ["RANK"], tied=True), path / os.environ["RANK"] / "run.yaml"
    settings.write_text(f"sampling_max_tokens: 64\nuse_cpu: true\nuse_vllm: false\noutput_dir: {path}\n")
    task, model, config = read_settings(GRPO_SETTINGS, None, settings, ["--model_name_or_path", str(policy)])
    data, start, started = SimpleNamespace(train={"prompt": ["1 + 1 ="] * 4}), subprocess.run, []

    def counted(*command: Any, **options: Any) -> Any:
        started.append(command)
        return start(*command, **options)

    def meets(gib: float, seconds: float, check: str) -> dict[str, Any]:
        task.check_memory, config.ddp_timeout, refusal, said = check, seconds, None, io.StringIO()
        gpu = mock.patch.multiple(torch.cuda, is_available=lambda: True, mem_get_info=lambda: (0, int(gib * 2**30)))
        started.clear()
        with gpu, mock.patch.object(before_run.subprocess, "run", counted), contextlib.redirect_stdout(said):
            try:
                first_rank(
                    lambda: before_run.refuse_what_does_not_fit(task, model, config, cast(Any, data), str(policy))
                )
            except ValueError as error:
                refusal = str(error)
        return {"refusal": refusal, "processes": len(started), "printed": said.getvalue()}

    return {
        "fits": meets(16, 600, "auto"),
        "does not fit": meets(0.5, 600, "auto"),
        "too slow": meets(16, 1, "auto"),
        "too slow and asked for": meets(16, 1, "true"),
    }


def compiled_runs(path: Path) -> dict[str, Any]:
    """With compiled layers and without, or what is said of them under ZeRO-3."""
    settings = {"reward": every_other_group, "num_iterations": 2, "max_steps": 2, "gradient_checkpointing": False}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8 // RANKS}
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found: dict[str, Any] = {"plain": found_by(scripted_run(path / "plain", **settings))}
    try:
        found["compiled"] = found_by(scripted_run(path / "compiled", **settings, **compiled))
    except ValueError as error:
        found["refused"] = str(error)
    from torch._dynamo.utils import counters

    return found | {"graphs": counters["stats"]["unique_graphs"]}


def quantized_runs(path: Path) -> dict[str, Any]:
    """The gradient's norm in a step of an adapter on quantized weights."""
    from tests.recipes.test_compatibility import ADAPTERS, QUANTIZED, trained

    found = {}
    for name, quantization in QUANTIZED.items():
        trainer = trained(path / f"{name.strip('`')}{os.environ['RANK']}", ADAPTERS["LoRA"], quantization)
        found[name] = trainer.state.log_history[0]["grad_norm"]
    return found


PARTS = {
    "axes": runs_of_axes, "all": all_runs, "sync": sync_runs, "ahead": runs_ahead, "estimate": estimated_runs,
    "resume": resumed_by_two, "reference": with_a_synced_reference, "compiled": compiled_runs,
    "quantized": quantized_runs,
}  # fmt: skip

if __name__ == "__main__":
    output, part = Path(sys.argv[1]), sys.argv[2]
    torch.save(PARTS[part](output / "runs"), output / f"rank{os.environ['RANK']}.pt")
