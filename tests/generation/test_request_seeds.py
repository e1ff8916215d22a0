"""What a colocated engine samples follows from the run's seed and the place in the run, whatever its generator is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from transformers import TrainerCallback

from tests.generation.test_vllm import SETTINGS, save_model
from tests.support.tiny import ends_early, make_trainer, no_engine_steps, tiny_model, tiny_tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.request_seeds import Place, RequestSeeds, request_seed
from trl_ext.generation.vllm import ColocatedEngine


def seeds_of(seeds: RequestSeeds, requests: int, given: int | None = None) -> list[int]:
    return [params.seed for params in seeds.applied(SimpleNamespace(seed=given), requests)]


def standing_at(place: Place) -> Callable[[], Place]:
    return lambda: place


def test_every_request_has_a_unique_seed_that_vllm_accepts() -> None:
    made = [
        seed
        for engine in (0, 1)
        for place in (("train", 0), ("train", 1), ("eval", 0))
        for seeds in [RequestSeeds(0, engine, standing_at(place))]
        for _ in range(2)  # calls of one step
        for seed in seeds_of(seeds, 8)
    ]
    assert len(set(made)) == len(made) == 2 * 3 * 2 * 8
    assert all(0 <= seed < 2**63 for seed in made)
    assert request_seed(0, "train", 0, 0, 0, 0) == 7600665532078019658  # on this machine as on another


def test_the_runs_seed_and_one_given_by_the_user_both_act() -> None:
    def first(seed: int, given: int | None = None) -> list[int]:
        return seeds_of(RequestSeeds(seed, 0, standing_at(("train", 0))), 4, given)

    assert first(0) == first(0) != first(1)
    assert first(0, given=5) == first(1, given=5) != first(0)
    assert len(set(first(0, given=5))) == 4  # the members of a group differ all the same


def test_calls_are_counted_per_step_so_resumed_seeds_are_equal() -> None:
    place: list[Place] = [("train", 0)]
    seeds = RequestSeeds(0, 0, lambda: place[0])
    seeds_of(seeds, 4)
    place[0] = ("train", 1)
    uninterrupted = [seeds_of(seeds, 4)]
    place[0] = ("eval", 1)
    seeds_of(seeds, 3)
    with seeds.fixed(3):
        validation = seeds_of(seeds, 4)
    place[0] = ("train", 1)
    uninterrupted.append(seeds_of(seeds, 4))
    resumed = RequestSeeds(0, 0, standing_at(("train", 1)))
    assert uninterrupted == [seeds_of(resumed, 4), seeds_of(resumed, 4)]
    with resumed.fixed(3):
        assert seeds_of(resumed, 4) == validation


class DrawsAsV2:
    """An engine that draws as vLLM's GPU runner does.

    `SamplingStates.add_request` in vllm/v1/worker/gpu/sample/states.py: a request without a seed takes its seed from
    numpy's global generator; tokens then follow from it.
    """

    llm_engine = no_engine_steps()

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        return [self._answer(prompt, params) for prompt, params in zip(prompts, each, strict=True)]

    @staticmethod
    def _answer(prompt: Any, params: Any) -> Any:
        seed = params.seed
        if seed is None:
            seed = np.random.randint(np.iinfo(np.int64).min, np.iinfo(np.int64).max)
        drawn = np.random.default_rng(seed % 2**63).integers(3, 18, size=params.max_tokens).tolist()
        logprobs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in drawn]
        output = SimpleNamespace(token_ids=drawn, logprobs=logprobs)
        return SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output])


@pytest.fixture
def draws_as_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(engine: ColocatedEngine) -> None:
        engine.llm, engine._llm_weights_sleeping = DrawsAsV2(), False
        np.random.seed(0)

    monkeypatch.setattr(ColocatedEngine, "_init_vllm", start)
    monkeypatch.setattr(ColocatedEngine, "_push_weights", lambda engine: None)


class Sees(TrainerCallback):
    """What each step is trained on; and, with `validating`, a validation after it."""

    def __init__(self, validating: bool) -> None:
        self.trainer: Any = None
        self.validating = validating
        self.rollouts: dict[int, list[str]] = {}
        self.validations: list[list[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rollouts[state.global_step] = [row["response"] for row in self.trainer.last_rollout]
        if self.validating:
            found = self.trainer.sample(["1 + 1 ="] * 4 + ["2 + 1 ="] * 2, batch_size=4, seed=3)
            self.validations.append([completion.text for completion in found])


def run(path: Path, validating: bool = False, resume: Path | None = None, **settings: Any) -> Sees:
    sees = Sees(validating)
    given = {**SETTINGS, "vllm_importance_sampling_correction": False, "save_strategy": "steps", "save_steps": 1}
    given |= {"max_steps": 3, "callbacks": [sees], **settings}
    sees.trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path / "run", ends_early, **given)
    sees.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return sees


@pytest.mark.vllm
@pytest.mark.usefixtures("draws_as_v2")
def test_run_on_a_v2_like_engine_depends_only_on_its_seed(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    validating = run(tmp_path / "validating", validating=True)
    assert validating.rollouts == whole.rollouts
    first, *others = validating.validations
    assert all(other == first for other in others)
    assert len(set(first)) == 6
    assert all(len(set(rollout)) == len(rollout) for rollout in whole.rollouts.values())
    assert run(tmp_path / "other", seed=8, max_steps=1).rollouts[1] != whole.rollouts[1]
    resumed = run(tmp_path / "whole", resume=tmp_path / "whole" / "run" / "checkpoint-1")
    assert resumed.rollouts == {step: whole.rollouts[step] for step in (2, 3)}


@pytest.mark.vllm
@pytest.mark.usefixtures("draws_as_v2")
@pytest.mark.parametrize(("peers", "distinct"), [(1, 16), (2, 8)])
def test_ranks_sample_apart_and_tensor_parallel_peers_alike(peers: int, distinct: int) -> None:
    found: list[list[int]] = []
    for rank in (0, 1):
        engine = ColocatedEngine(tiny_model(), Accelerator(cpu=True), tiny_tokenizer(), max_completion_length=12)
        engine.accelerator = SimpleNamespace(process_index=rank, num_processes=2)
        engine.tensor_parallel_size = peers
        engine.seed_requests(0, standing_at(("train", 0)))
        engine.tensor_parallel_size = 1  # this test has no process group to gather prompts with
        found += engine.generate(prompts=[[5]] * 8, images=None, num_generations=8)[1]
    assert len(set(map(tuple, found))) == distinct


@pytest.mark.vllm
def test_cpu_engine_is_seeded_and_validation_keeps_training_same(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model", True))
    whole = run(tmp_path / "whole", model=model)
    validating = run(tmp_path / "validating", validating=True, model=model, learning_rate=0.0)
    assert validating.rollouts[1] == whole.rollouts[1]
    assert validating.validations[0] == validating.validations[1] == validating.validations[2]
    assert len(set(validating.validations[0])) > 1
    assert validating.rollouts == run(tmp_path / "still", model=model, learning_rate=0.0).rollouts
