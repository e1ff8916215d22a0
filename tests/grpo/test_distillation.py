"""What a teacher adds to a step: the gradient that its divergence has, by whichever passes the step is computed."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor
from torch.testing import assert_close

from tests.grpo.test_step import (
    ALL,
    OFF_POLICY,
    ON_POLICY,
    PLAIN,
    assert_same,
    questions,
    trained,
    trainer_of,
    words_of_row,
)
from tests.grpo.test_trainer import logs
from tests.support.tiny import WORDS, prompts, tiny_model, tiny_tokenizer, weight_difference
from trl_ext import DISTILLATIONS, POLICY_LOSSES, PRESETS, ExtGRPOConfig
from trl_ext.errors import InputError
from trl_ext.grpo.distillation_settings import fits_loss
from trl_ext.grpo.teachers import Teachers

EVERY_TOKEN = len(WORDS)
FLOAT64 = {"dtype": torch.float64}
OF_TEACHERS = sorted(name for name, preset in PRESETS.items() if preset.needs_teacher)


def teacher(path: Path, seed: int = 1) -> str:
    folder = path / f"teacher{seed}"
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def taught(path: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a run with a teacher in float64."""
    named = settings.get("teacher") or teacher(path)
    fixed = {"preset": "opd", "teacher": named, "teacher_init_kwargs": FLOAT64, "shuffle_dataset": False}
    return fixed | settings


def half_right(completions: list[str], **_: Any) -> list[float]:
    """1, 0, 1, 0, ..."""
    return [float(i % 2 == 0) for i, _ in enumerate(completions)]


@pytest.mark.slow
@pytest.mark.parametrize("preset", OF_TEACHERS)
@pytest.mark.parametrize("policy", [ON_POLICY, {**OFF_POLICY, "epochs_per_rollout_batch": 2}], ids=["on", "off"])
def test_savings_change_nothing(preset: str, policy: dict[str, Any], tmp_path: Path) -> None:
    assert_same(tmp_path, ALL, **taught(tmp_path, preset=preset), learning_rate=0.03, **policy)


def by_hand(model: Any, teachers: dict[str, float], loss: Callable[[Tensor, list[Tensor], Tensor], Tensor]) -> Any:
    """The model after one step of SGD on the mean over tokens of a loss of full distributions, row by row.

    Args:
        teachers: folders and weights.
        loss: of (T, V) log-probabilities of the student and of each teacher, and the (T,) sampled tokens -> (T,).
    """
    tokenizer, models = tiny_tokenizer(), [type(model).from_pretrained(name, dtype=torch.float64) for name in teachers]
    rows = [(i, tokenizer(questions()[i // 4]["prompt"])["input_ids"]) for i in range(32)]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, prompt in rows:
        ids = torch.tensor([*prompt, *words_of_row(row, 0)][: len(prompt) + 12])
        places = slice(len(prompt) - 1, len(ids) - 1)
        own, *others = (each(ids[None]).logits[0, places].log_softmax(-1) for each in (model, *models))
        total, count = (
            total + loss(own, [other.detach() for other in others], ids[len(prompt) :]).sum(),
            count + places.stop - places.start,
        )
    (total / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.3 * parameter.grad
    return model


def sampled_reverse_kl(own: Tensor, others: list[Tensor], ids: Tensor) -> Tensor:
    logp, theirs = (x.gather(-1, ids[:, None])[:, 0] for x in (own, others[0]))
    return -(theirs - logp.detach()) * logp


def jensen_shannon(own: Tensor, others: list[Tensor], ids: Tensor) -> Tensor:
    s, t = own.exp(), others[0].exp()
    mean = (s + t) / 2
    return ((t * (t / mean).log()).sum(-1) + (s * (s / mean).log()).sum(-1)) / 2


@pytest.mark.moderate
@pytest.mark.parametrize("savings", [PLAIN, ALL], ids=["plain", "saved"])
@pytest.mark.parametrize(("preset", "loss"), [("opd", sampled_reverse_kl), ("gkd", jensen_shannon)])
def test_a_step_is_that_of_the_divergence_written_out(
    preset: str, loss: Callable[..., Tensor], savings: dict[str, bool], tmp_path: Path
) -> None:
    settings = taught(tmp_path, preset=preset, n_grpo_steps=1, **savings)
    if preset == "gkd":
        settings["teacher_top_k"] = EVERY_TOKEN
    ours = trained(tmp_path / "ours", **settings)
    wanted = by_hand(tiny_model().double(), {settings["teacher"]: 1.0}, loss)
    assert weight_difference(wanted, tiny_model().double()) > 1e-3
    # norms compute in float32 even in a float64 model
    assert weight_difference(ours.model, wanted) < 1e-7


@pytest.mark.moderate
def test_with_fewer_tokens_the_gradient_is_of_these_and_the_rest(tmp_path: Path) -> None:
    def coarse(own: Tensor, others: list[Tensor], ids: Tensor) -> Tensor:
        chosen = others[0].topk(3).indices
        s, t = (x.exp().gather(-1, chosen) for x in (own, others[0]))
        s, t = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1) for x in (s, t))
        return (t * (t / s).log()).sum(-1)

    settings = taught(tmp_path, preset="gkd", distillation="full_forward_kl", teacher_top_k=3, n_grpo_steps=1)
    ours = trained(tmp_path / "ours", **settings)
    wanted = by_hand(tiny_model().double(), {settings["teacher"]: 1.0}, coarse)
    assert weight_difference(ours.model, wanted) < 1e-7


@pytest.mark.moderate
def test_options_choose_the_divergence(tmp_path: Path) -> None:
    def skewed(own: Tensor, others: list[Tensor], ids: Tensor) -> Tensor:
        s, t = own.exp(), others[0].exp()
        mean = 0.9 * t + 0.1 * s
        return 0.9 * (t * (t / mean).log()).sum(-1) + 0.1 * (s * (s / mean).log()).sum(-1)

    options = {"teacher_top_k": EVERY_TOKEN, "distillation_options": {"beta": 0.9}}
    settings = taught(tmp_path, preset="gkd", n_grpo_steps=1, **options)
    ours = trained(tmp_path / "ours", **settings)
    wanted = by_hand(tiny_model().double(), {settings["teacher"]: 1.0}, skewed)
    assert weight_difference(ours.model, wanted) < 1e-7


@pytest.mark.moderate
def test_two_teachers_teach_by_their_weights(tmp_path: Path) -> None:
    first, second = teacher(tmp_path, 1), teacher(tmp_path, 2)

    def mixed(own: Tensor, others: list[Tensor], ids: Tensor) -> Tensor:
        return 0.25 * sampled_reverse_kl(own, others[:1], ids) + 0.75 * sampled_reverse_kl(own, others[1:], ids)

    settings = taught(tmp_path, teacher=f"one={first},{second}", teacher_weights=[0.25, 0.75], n_grpo_steps=1)
    ours = trained(tmp_path / "ours", **settings)
    wanted = by_hand(tiny_model().double(), {first: 0.25, second: 0.75}, mixed)
    assert weight_difference(ours.model, wanted) < 1e-7
    (entry,) = logs(ours)
    assert entry["distillation/reverse_kl_one"] != entry["distillation/reverse_kl_teacher2"]


@pytest.mark.moderate
def test_a_column_names_each_problem_s_teacher(tmp_path: Path) -> None:
    first, second = teacher(tmp_path, 1), teacher(tmp_path, 2)
    kinds = Dataset.from_list([{**row, "subject": "ab"[i % 2]} for i, row in enumerate(questions())])
    settings = taught(tmp_path, teacher=f"a={first},b={second}", teacher_column="subject", train_dataset=kinds)
    trainer = trainer_of(tmp_path / "ours", **settings, n_grpo_steps=1)
    trainer.train()
    (_, x, _) = trainer.seen[0]
    weights = trainer.rollouts[0]["teacher_weight"][:, 0]
    assert weights.tolist() == [[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4 + (
        [[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4 + [[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 4
    )
    assert x.advantage.shape == x.logp.shape
    with pytest.raises(InputError, match="teacher_column 'subject': a problem has 'b' there; teachers: a, c"):
        trained(tmp_path / "other", **{**settings, "teacher": f"a={first},c={second}"}, n_grpo_steps=1)


@pytest.mark.moderate
@pytest.mark.parametrize(("rollouts", "share"), [("all", 1.0), ("incorrect", 0.5), ("correct", 0.5)])
def test_rollouts_that_are_not_distilled_are_left_out(rollouts: str, share: float, tmp_path: Path) -> None:
    settings = taught(tmp_path, distill_rollouts=rollouts, reward=half_right, n_grpo_steps=1)
    trainer = trainer_of(tmp_path / "ours", **settings, dynamic_micro_batches=False)
    trainer.train()
    (entry,) = logs(trainer)
    assert entry["step/rows_trained"] == share
    # the mean is over all tokens of the step, whichever are learned from
    advantages = sum((x.advantage.expand_as(x.logp) * x.mask).abs().sum().item() for _, x, _ in trainer.seen)
    assert advantages > 0
    absent = {"correct": "incorrect", "incorrect": "correct"}.get(rollouts)
    assert [name for name in entry if name.startswith("distillation/agreement_")] == [
        f"distillation/agreement_{name}" for name in ("correct", "incorrect") if name != absent
    ]


@pytest.mark.moderate
def test_the_reward_s_advantage_and_the_teacher_s_add_up(tmp_path: Path) -> None:
    runs = {}
    for name, settings in {
        "reward": {"preset": "grpo_clip", "aggregation": "token_mean", "shuffle_dataset": False},
        "teacher": taught(tmp_path),
        "both": taught(tmp_path, preset="opd_grpo", distillation_coef=0.5),
    }.items():
        runs[name] = trained(tmp_path / name, **settings, n_grpo_steps=1)
    start = tiny_model().double().state_dict()
    moved = {name: {k: v - start[k] for k, v in run.model.state_dict().items()} for name, run in runs.items()}
    for weight in start:
        wanted = moved["reward"][weight] + 0.5 * moved["teacher"][weight]
        assert_close(moved["both"][weight], wanted, rtol=0, atol=1e-7)


@pytest.mark.moderate
def test_the_coefficient_falls_over_the_run(tmp_path: Path) -> None:
    settings = taught(tmp_path, distillation_coef=1.0, distillation_coef_end=0.0, n_grpo_steps=None, max_steps=4)
    trainer = trainer_of(tmp_path, **settings)
    trainer.train()
    constant = trainer_of(tmp_path / "constant", **{**settings, "distillation_coef_end": None})
    constant.train()

    def size(run: Any, step: int) -> float:
        of_step = [x for number, x, _ in run.seen if number == step]
        return sum(x.advantage.masked_select(x.mask).abs().sum().item() for x in of_step)

    assert size(trainer, 0) == pytest.approx(size(constant, 0), rel=1e-6)
    assert size(trainer, 3) < 0.4 * size(trainer, 0) < size(constant, 3)


@pytest.mark.moderate
@pytest.mark.parametrize("preset", OF_TEACHERS)
def test_resumed_within_a_rollout_it_ends_with_the_same_bits(preset: str, tmp_path: Path) -> None:
    settings = taught(
        tmp_path, preset=preset, rollout_func=None, reward=half_right, n_grpo_steps=None, max_steps=6, rollout_batch_size=32,
        train_batch_size=16, epochs_per_rollout_batch=2, save_strategy="steps", save_steps=1, learning_rate=0.05,
        train_dataset=prompts(), distillation_coef_end=0.5, save_total_limit=None,
    )  # fmt: skip
    whole = trained(tmp_path / "whole", **settings)
    resumed = trainer_of(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert weight_difference(whole.model, resumed.model) == 0
    assert [entry["distillation/reverse_kl"] for entry in logs(whole)][3:] == [
        entry["distillation/reverse_kl"] for entry in logs(resumed)
    ][-3:]


@pytest.mark.moderate
def test_an_adapter_teaches_and_an_adapter_is_taught(tmp_path: Path) -> None:
    base = teacher(tmp_path)
    adapted = peft.get_peft_model(tiny_model(1), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    merged = tmp_path / "merged"
    adapted.merge_and_unload().save_pretrained(merged)
    tiny_tokenizer().save_pretrained(merged)
    student = {"peft_config": peft.LoraConfig(target_modules=["q_proj"], r=2), "n_grpo_steps": 2, "preset": "gkd"}
    settings = taught(tmp_path, teacher=str(tmp_path / "adapter"), teacher_init_kwargs={}) | student
    ours = trained(tmp_path / "ours", **settings)
    plain = trained(tmp_path / "plain", **settings | {"teacher": str(merged)})
    assert logs(ours)[0]["distillation/reverse_kl"] == pytest.approx(
        logs(plain)[0]["distillation/reverse_kl"], abs=1e-5
    )
    assert weight_difference(ours.model, plain.model) < 1e-5
    (moved,) = {name.split(".")[-2] for name, p in ours.model.named_parameters() if "lora_B" in name and p.any()}
    assert moved == "default"


def test_a_divergence_under_fsdp_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, preset="gkd", teacher=teacher(tmp_path))
    sharded: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"distillation 'jensen_shannon' under FSDP: .* such as reverse_kl"):
        Teachers.of(config, sharded, tiny_model(), tiny_tokenizer())


def other_ids(path: Path) -> str:
    folder = path / "other"
    tiny_model().save_pretrained(folder)
    words = [*WORDS]
    words[4], words[5] = words[5], words[4]
    tiny_tokenizer(words).save_pretrained(folder)
    return str(folder)


def without_a_token(path: Path) -> str:
    folder = path / "fewer"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(WORDS[:-1]).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (other_ids, "'b' is the id 4 of the policy and the id 5 of the teacher"),
        (without_a_token, "'8' is the id 17 of the policy and no token of the teacher"),
    ],
)
def test_another_tokenizer_is_refused_with_the_first_difference(
    made: Callable[[Path], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"has another tokenizer than the policy: {message}"):
        trainer_of(tmp_path, **taught(tmp_path, teacher=made(tmp_path)))


def test_other_tokens_of_the_same_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = teacher(tmp_path)
    file = Path(folder) / "tokenizer.json"
    changed = json.loads(file.read_text())
    changed["normalizer"] = {"type": "Replace", "pattern": {"String": "+"}, "content": "+ +"}
    file.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"divides texts into other tokens than the policy: .* from token 4 on"):
        trainer_of(tmp_path, **taught(tmp_path, teacher=folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "opd"}, "preset 'opd' distills, and there is no teacher: give --teacher FOLDER, or --teacher_url"),
        ({"teacher": "t"}, "teacher='t' needs a preset or an axis; it would be ignored without"),
        ({"preset": "grpo_clip", "distillation_coef": 0.5}, "distillation_coef=0.5 needs a teacher"),
        ({"preset": "opd", "teacher": "t", "teacher_top_k": 5}, "teacher_top_k=5 needs a divergence, not 'reverse_kl'"),
        ({"preset": "opd", "teacher": "a,b", "teacher_weights": [1.0]}, "teacher_weights has 1 for 2 teachers"),
        ({"preset": "opd", "teacher": "x/a,y/a"}, "'a' is there twice; name them"),
        (
            {"preset": "opd", "teacher": "a", "teacher_column": "subject"},
            "teacher 'a' has no name for 'subject': NAME=a",
        ),
        (
            {"preset": "opd", "teacher": "p=a,q=b", "teacher_column": "s", "teacher_weights": [1.0, 2.0]},
            "a problem has one teacher, or all; leave one out",
        ),
        ({"preset": "opd", "teacher": "t", "distill_rollouts": "wrong"}, "unknown value of distill_rollouts 'wrong'"),
        ({"preset": "opd", "teacher": "t", "distillation": "kl"}, "unknown distillation 'kl'. .*jensen_shannon"),
        (
            {"preset": "opd", "teacher": "t", "distillation_coef_end": 0.0, "max_steps": -1},
            "distillation_coef_end needs max_steps",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)


def test_a_teacher_next_to_a_preset_without_one_is_learned_from(tmp_path: Path) -> None:
    config = ExtGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", preset="grpo_clip", teacher="a/b/c,d=e"
    )
    assert (config.distillation, config.teacher_models) == ("reverse_kl", {"c": "a/b/c", "d": "e"})
    assert set(DISTILLATIONS) > {"reverse_kl"}


def config_of(path: Path, **settings: Any) -> ExtGRPOConfig:
    return ExtGRPOConfig(output_dir=str(path), use_cpu=True, bf16=False, report_to="none", **settings)


def test_every_preset_takes_or_refuses_a_distillation_by_name(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text(encoding="utf-8")
    told = dict(
        re.findall(r"^\| `(\w+)` \| (.*) \|$", page.partition("### A teacher next to a preset")[2], re.MULTILINE)
    )
    refused: dict[str, list[str]] = {}
    for preset, name in itertools.product(PRESETS, DISTILLATIONS):
        if fits_loss(DISTILLATIONS[name], POLICY_LOSSES[PRESETS[preset].policy_loss]):
            config_of(tmp_path, preset=preset, teacher="a/model", distillation=name)
            continue
        with pytest.raises(ValueError, match=f"ratio of a whole response.* advantages of {name!r}"):
            config_of(tmp_path, preset=preset, teacher="a/model", distillation=name)
        refused.setdefault(preset, []).append(f"`{name}`")
    assert refused == {preset: ["`reverse_kl`"] for preset in ("gspo", "luspo", "gmpo")}
    assert {preset: told[preset] for preset in refused} == {
        preset: ", ".join(names) for preset, names in refused.items()
    }


EACH_PUSH = ("dapo_full", "gspo", "vespo")


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in EACH_PUSH else pytest.mark.nightly) for name in sorted(PRESETS)]
)
def test_on_policy_a_teacher_teaches_the_same_through_every_loss(preset: str, tmp_path: Path) -> None:
    is_whole = PRESETS[preset].policy_loss in ("gspo", "gmpo")
    settings = taught(tmp_path, distillation="reverse_kl_mean" if is_whole else "reverse_kl", n_grpo_steps=1)
    settings |= {"advantage": "zero", "aggregation": "token_mean", "reward": half_right}
    ours = trained(tmp_path / "ours", **settings | {"preset": preset})
    plain = trained(tmp_path / "plain", **settings | {"preset": "opd"})
    assert weight_difference(plain.model, tiny_model().double()) > 1e-3
    assert weight_difference(ours.model, plain.model) < 1e-7
