"""GRPO with tools: only what the policy has sampled is trained on, counted, penalized, corrected and shown as its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.tiny import CALL, WAIT, calling_model, make_trainer, prompts, tool_tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.presets import PRESETS
from trl_ext.grpo.rollout import add_numbers
from trl_ext.grpo.tool_use import RolloutTools
from trl_ext.step import advantages_of
from trl_ext.turns.protocols import Fences
from trl_ext.turns.responses import ToolUse
from trl_ext.turns.settings import STOP
from trl_ext.turns.tools import Toolbox

TOOLS: dict[str, Any] = {
    "tools": "calculator",
    "preset": "grpo_clip",
    "max_completion_length": 40,
    "max_turns": 3,
    "max_steps": 2,
    "learning_rate": 0.001,
}
pytestmark = pytest.mark.moderate


def says_six(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for 6 as the last word of its own."""
    assert all(isinstance(text, str) for text in completions)
    return [float(text.endswith("6")) for text in completions]


def policy(path: Path, **settings: Any) -> dict[str, Any]:
    """Model, tokenizer and problems; the model is on the disk where a reference is loaded from there."""
    tokenizer = tool_tokenizer()
    model = calling_model(tokenizer)
    if settings.get("beta"):
        model.save_pretrained(path / "policy")
        model = type(model).from_pretrained(path / "policy")
    return {"model": model, "processing_class": tokenizer, "train_dataset": prompts()}


def trainer_of(path: Path, reward: Any = says_six, **more: Any) -> Any:
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, reward, **policy(path, **more), **TOOLS | more)


class Seen(ExtGRPOTrainer):
    """Keeps every rollout."""

    rollouts: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.rollouts = [*getattr(self, "rollouts", []), {**batch, "rows": self.last_rollout}]
        return batch


def rollouts_of(path: Path, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    trainer = make_trainer(Seen, ExtGRPOConfig, path, says_six, **policy(path, **more), **TOOLS | more)
    trainer.train()
    return trainer, trainer.rollouts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    return rollouts_of(tmp_path_factory.mktemp("tools"))


def test_rollouts_call_and_read_the_answers(trained: tuple[Any, list[dict[str, Any]]]) -> None:
    trainer, rollouts = trained
    tokenizer = trainer.processing_class
    assert STOP in trainer.args.stop
    several = 0
    for rollout in rollouts:
        for ids, kept, mask, row in zip(
            rollout["completion_ids"], rollout["completion_mask"], rollout["tool_mask"], rollout["rows"], strict=True
        ):
            turns = row["turns"]
            assert "".join(turn["text"] for turn in turns) == tokenizer.decode(ids[kept.bool()])
            own = tokenizer.decode(ids[kept.bool() & mask.bool()], skip_special_tokens=True)
            assert row["response"] == own
            assert row["tokens"] == int((kept * mask).sum())
            assert row["calls"] == sum(turn["text"].endswith(WAIT) for turn in turns if turn["role"] == "assistant")
            for before, turn in itertools.pairwise(turns):
                if turn["role"] == "tool":
                    several += 1
                    assert before["text"].endswith(WAIT)
                    expected = {"2*3": "6", "3+3": "6"}.get(before["text"].removesuffix(WAIT).rpartition(CALL)[2])
                    said = turn["text"].removeprefix("\n").removesuffix("\n```\n")
                    assert said == expected if expected else "<unk>" in said  # of an error that it cannot spell
                    assert turn["outcome"] == ["ok" if expected else "failed"]
    assert several > 8


def test_metrics_count_calls_and_compare(trained: tuple[Any, list[dict[str, Any]]]) -> None:
    trainer, rollouts = trained
    logged = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry]
    assert len(logged) == 2
    for entry, rollout in zip(logged, rollouts, strict=True):
        rows = rollout["rows"]
        calls = sum(row["calls"] for row in rows)
        kinds = [kind for row in rows for turn in row["turns"] for kind in turn.get("outcome", ())]
        assert entry["tools/call_frequency"] == pytest.approx(calls / len(rows))
        assert entry["tools/failure_frequency"] == pytest.approx(kinds.count("failed") / calls)
        assert entry["tools/unanswered_frequency"] == pytest.approx((calls - len(kinds)) / calls)
        assert entry["tools/timeout_frequency"] == 0
        assert entry["tools/seconds"] >= 0
        assert entry["tools/rollouts_with_call"] == pytest.approx(sum(row["calls"] > 0 for row in rows) / len(rows))
        for name, has in (("with", True), ("without", False)):
            chosen = [row["reward"] for row in rows if (row["calls"] > 0) == has]
            assert entry[f"tools/accuracy_{name}_call"] == pytest.approx(sum(chosen) / len(chosen))
        assert entry["completions/mean_length"] == pytest.approx(sum(row["tokens"] for row in rows) / len(rows))


def test_a_validation_calls_tools_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    completions = trainer.sample(["1 + 2 ="] * 12, batch_size=4, seed=3)
    called = [completion for completion in completions if CALL in completion.text]
    assert called
    for completion in called:
        assert "\n6\n" not in completion.text  # the tool's words
        assert completion.entropy_estimate is not None
    ids = trainer.completion_ids(["1 + 2 ="] * 12)
    own = trainer.own_tokens(ids)
    assert any(len(mine) < len(whole) for mine, whole in zip(own, ids, strict=True))
    longest = max(len(row) for row in ids)
    assert longest <= 40
    short = trainer.sample(["1 + 2 ="] * 12, batch_size=12, seed=3, max_tokens=8)
    assert max(completion.tokens for completion in short) <= 8
    assert max(len(response.ids) for response in trainer.policy_tools.last) <= 8
    assert trainer.most_tokens == 40


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_turns": 1}, "max_turns must be at least 2, got 1"),
        ({"max_turns": 0}, "max_turns must be at least 2, got 0"),
        ({"tool_timeout": 0.0}, "tool_timeout must be positive seconds, got 0"),
        ({"tool_output_tokens": 0}, "tool_output_tokens must be at least 1, got 0"),
        ({"tool_protocol": "xml"}, "unknown tool_protocol 'xml'. Known: auto, fences, template"),
        ({"tools": None, "max_turns": 5}, "max_turns=5 needs tools; it would be ignored without"),
        ({"tools": None, "tool_state": True}, "tool_state=True needs tools"),
        ({"max_tool_calling_iterations": 3}, "tools has max_turns, one more: set that"),
        ({"sampling_min_tokens": 2}, "tools with sampling_min_tokens: every turn would have that minimum"),
        ({"log_completions": True}, "tools with log_completions: TRL's table has one text"),
        ({"use_transformers_continuous_batching": True}, "tools with use_transformers_continuous_batching: it"),
    ],
)
def test_what_tools_cannot_have_next_to_them_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    given = {"tools": "calculator", "preset": "grpo_clip", "use_cpu": True, "bf16": False, **settings}
    with pytest.raises(ValueError, match=said):
        ExtGRPOConfig(output_dir=str(tmp_path), **given)


class Watched:
    """A trainer's forward passes, whose values keep their gradients."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.seen = forward, list[tuple[Any, Any]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)

    def __call__(self, model: Any, batch: Any, *more: Any) -> Any:
        found = self.forward(model, batch, *more)
        if found.logp.requires_grad:
            for value in (found.logp, found.entropy):
                if value.requires_grad:
                    value.retain_grad()
            self.seen.append((found, batch.rows))
        return found


OF_TEACHERS = {"opd", "gkd", "opd_grpo"}  # below
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS if name not in OF_TEACHERS},
    "stock axes": {"preset": None, "policy_loss": "ppo_clip"},
    **{f"kl {name}": {"beta": 0.1, "kl_estimator": name} for name in KL_ESTIMATORS},
    **{f"aggregation {name}": {"aggregation": name} for name in AGGREGATIONS},
    "corrected kl": {"beta": 0.1, "use_bias_correction_kl": True},
    "entropy bonus": {"entropy_coef": 0.1},
    "high entropy": {"top_entropy_quantile": 0.5},
    "overlong": {"overlong_buffer": 20},
    "masked when cut": {"mask_truncated_completions": True},
    "per token": {"advantage": "discounted"},
    "by length": {"advantage": "length_reward"},
    "off-policy": {"epochs_per_rollout_batch": 2},
    "no savings": {"dynamic_micro_batches": False, "share_prompt_prefix": False, "skip_zero_advantage_rows": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_reaches_a_tools_token(tmp_path: Path, way: str) -> None:
    trainer = trainer_of(tmp_path, per_device_train_batch_size=12, max_steps=1, **WAYS[way])
    watched = trainer._loss.forward = Watched(trainer._loss.forward)
    trainer.train()
    assert watched.seen
    holes = 0
    for found, rows in watched.seen:
        between = rows.completion_mask.bool() & ~rows.trained
        holes += int(between.sum())
        for value in (found.logp, found.entropy):
            if value.grad is not None:
                assert value.grad[~rows.trained].abs().max() == 0
    assert holes > 8
    assert any(found.logp.grad.abs().max() > 0 for found, _ in watched.seen if found.logp.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["opd", "gkd"])
def test_a_teacher_says_nothing_of_a_tools_tokens(tmp_path: Path, preset: str) -> None:
    """It differs from the policy only in what follows a token that tools answer after, or in what the policy says."""
    moved = {}
    for of_tools in (True, False):
        tokenizer, teacher = tool_tokenizer(), calling_model(tool_tokenizer())
        with torch.no_grad():
            before = tokenizer.convert_tokens_to_ids([WAIT, "```"] if of_tools else ["so"])
            teacher.lm_head.weight[tokenizer.convert_tokens_to_ids("7"), before] += 2.0
        teacher.save_pretrained(tmp_path / "teacher")
        tokenizer.save_pretrained(tmp_path / "teacher")
        settings = {"preset": preset, "teacher": str(tmp_path / "teacher"), "max_steps": 1}
        trainer = trainer_of(tmp_path / "run", per_device_train_batch_size=12, **settings)
        start = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        assert sum(row["calls"] for row in trainer.last_rollout) > 2
        after = trainer.model.parameters()
        moved[of_tools] = max((a.detach() - b).abs().max().item() for a, b in zip(after, start, strict=True))
    assert moved[True] < 1e-7  # float32: the same model twice
    assert moved[False] > 1e-5


def test_what_is_trained_on_is_what_was_sampled(trained: tuple[Any, list[dict[str, Any]]]) -> None:
    """The mask is of the text: neither an answer nor the fence that closes it is the policy's."""
    trainer, rollouts = trained
    tokenizer = trainer.processing_class
    for rollout in rollouts:
        for ids, kept, mask in zip(
            rollout["completion_ids"], rollout["completion_mask"], rollout["tool_mask"], strict=True
        ):
            own = tokenizer.decode(ids[(kept * mask).bool()], skip_special_tokens=True)
            for answered in own.split(WAIT)[1:]:
                assert answered[:2] in ("so", "``", "")  # what the model can say after an answer, or nothing
    assert any((rollout["tool_mask"] == 0).any() for rollout in rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"beta": 0.1, "epochs_per_rollout_batch": 2}], ids=["on-policy", "off-policy"])
def test_savings_change_nothing_with_tools_either(tmp_path: Path, more: dict[str, Any]) -> None:
    off = dict.fromkeys(
        ("skip_zero_advantage_rows", "dynamic_micro_batches", "share_prompt_prefix", "reuse_log_probs"), False
    )
    weights = []
    for savings in ({}, off):
        trainer = trainer_of(tmp_path, learning_rate=0.05, **more, **savings)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    before = torch.cat([p.detach().flatten() for p in calling_model(tool_tokenizer()).parameters()])
    assert_close(*weights, rtol=0, atol=2e-5)
    assert (weights[0] - before).abs().max() > 1e-3


@pytest.mark.slow
def test_a_run_resumes_within_a_rollout_of_tools(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "epochs_per_rollout_batch": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trainer_of(tmp_path, **settings)
    whole.train()
    for step in (1, 2, 3):
        resumed = trainer_of(tmp_path, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"dynamic_sampling_tries": 3},
        {"uninformative_keep_prob": 0.5},
        {"rollout_selection": "max_variance", "rollout_selection_options": {"keep": 2}},
        {"preset": None},
    ],
    ids=["dynamic sampling", "curriculum", "selection", "TRL's own loss"],
)
def test_rows_and_masks_stay_together(tmp_path: Path, more: dict[str, Any]) -> None:
    trainer, rollouts = rollouts_of(tmp_path, **more)
    for rollout in rollouts:
        own = (rollout["completion_mask"] * rollout["tool_mask"]).sum(dim=1).tolist()
        assert own == [row["tokens"] for row in rollout["rows"]]
        texts = trainer.processing_class.batch_decode(
            [ids[kept.bool()] for ids, kept in zip(rollout["completion_ids"], rollout["completion_mask"], strict=True)]
        )
        assert texts == ["".join(turn["text"] for turn in row["turns"]) for row in rollout["rows"]]


class Engine:
    """What `RolloutTools` needs of a trainer that samples by an engine, which says `so6` at every turn."""

    def __init__(self, tokenizer: Any, first: list[list[float]]) -> None:
        self.generated_logps: Any = first
        self.eos_token_ids, self.most_tokens = [1], 40
        self.said = tokenizer.convert_tokens_to_ids(["so", "6", "<eos>"])
        self.rooms = list[int]()

    @contextlib.contextmanager
    def _sampling(self, temperature: None, most_tokens: int) -> Iterator[None]:
        self.rooms.append(most_tokens)
        yield

    def largest_of_ranks(self, number: int) -> int:
        return number

    def turn_ids(self, prompts: list[list[int]]) -> list[list[int]]:
        self.generated_logps = [[-0.5, -0.25, None] for _ in prompts]  # vLLM's NaN is None
        return [list(self.said) for _ in prompts]


def test_an_engines_log_probabilities_stay_with_their_tokens() -> None:
    tokenizer = tool_tokenizer()
    box = Toolbox.of("calculator", 1.0)
    use = ToolUse(tokenizer, box, Fences(tokenizer, box.functions), 4, 20)
    first = [tokenizer.convert_tokens_to_ids(words) for words in ([CALL, "2*3", WAIT], ["guess", "7", "<eos>"])]
    engine = Engine(tokenizer, [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    tools = RolloutTools(use, engine)
    own, texts, ids, sampled, calls, failed, images = tools.loop([[5], [5]], first, engine.generated_logps)
    answer = len(ids[0]) - 6
    assert own == [[1] * 3 + [0] * answer + [1] * 3, [1] * 3]
    assert sampled == [[-1.0, -2.0, -3.0, *[0.0] * answer, -0.5, -0.25, None], [-4.0, -5.0, -6.0]]
    assert tokenizer.decode(ids[0]) == f"{CALL}2*3{WAIT}\n6\n```\nso6<eos>"
    assert texts == [f"{CALL}2*3{WAIT}so6", "guess7"]
    assert (calls, failed, images, engine.rooms) == (1, 0, [[], []], [40 - 3 - answer])
    assert engine.generated_logps == [[-1.0, -2.0, -3.0, -0.5, -0.25, None], [-4.0, -5.0, -6.0]]
    engine.generated_logps = None
    assert tools.loop([[5]], first[1:], None)[3] is None  # HF generate's are not TRL's business


def test_a_penalty_of_length_counts_the_models_tokens(tmp_path: Path) -> None:
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return says_six(completions, completion_ids)

    trainer = trainer_of(tmp_path, reward, max_steps=1)
    trainer.train()
    assert lengths == [row["tokens"] for row in trainer.last_rollout]
    assert any(len(response.ids) > len(response.own_ids) for response in trainer.policy_tools.last)


def test_advantages_per_token_are_those_of_own_tokens() -> None:
    batch = {"completion_ids": torch.zeros(2, 5), "tool_mask": torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]])}
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert advantages_of(batch, values).tolist() == [[1, 0, 0, 2, 3], [4, 5, 6, 0, 0]]
    assert advantages_of(batch, values[:, 0]).tolist() == [1, 4]


def test_equal_tokens_with_other_masks_are_not_equal_rows() -> None:
    ids = torch.tensor([[5, 6, 7]] * 3)
    batch = {
        "prompt_ids": torch.tensor([[1]] * 3),
        "prompt_mask": torch.ones(3, 1, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "tool_mask": torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]]),
    }
    add_numbers(batch, 0, 3, sequences=True)
    one, other, again = batch["sequence"].tolist()
    assert one == again != other
