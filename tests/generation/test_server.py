"""vLLM servers for real, on the loopback: weights by HTTP, seeds, refusals, and a server that is killed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import yaml
from peft import LoraConfig
from transformers import TrainerCallback

from tests.generation.test_sampling import ARRIVES, OF_VLLM, arrive
from tests.generation.test_vllm import disagreement, save_model, shake
from tests.grpo.test_distributed import by_accelerate, on_two_ranks
from tests.imitation.test_expert_iteration import made as expert_iteration
from tests.imitation.test_expert_iteration import steps_of
from tests.imitation.test_sft import ADAM, LEARNED, fraction_learned
from tests.imitation.test_sft import ours as fine_tuning
from tests.recipes.test_grpo import TINY_RUN, rows
from tests.recipes.test_launch import launched, steps, wait_for
from tests.support.faulty_link import BUSY, GONE, between, linked, silent_from, slow
from tests.support.hosts import error_lines
from tests.support.recipe import run_recipe
from tests.support.tiny import WORDS, fraction_of_ones, make_trainer, tiny_tokenizer, weight_difference
from tests.support.vllm_server import VllmServer, serving
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import InputError, ServerError
from trl_ext.generation import server as client
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.runs.checkpoints import checkpoints
from trl_ext.training.stopping import TimeBudget

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

AGREE = 1e-4  # float32 on both sides, in different kernels
APART = 0.1
SETTINGS = {"preset": "grpo_clip", "use_vllm": True, "vllm_mode": "server", "model_init_kwargs": {"dtype": "float32"}}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    """Started side by side; `tied` has room for adapters.

    `other` serves the same model until it is killed, a request at a time: what others it meets changes no digit.
    """
    folder = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        found = {}
        for name in ("tied", "untied", "other"):
            model = save_model(folder / name, tied=name != "untied")
            more = ()
            if name == "other":  # what it arrives with is the server's default
                arrive(model, {**ARRIVES, **OF_VLLM})
                more = ("--generation-config", "auto", "--max-num-seqs", "1", "--no-enable-prefix-caching")
            found[name] = stack.enter_context(serving(model, *more, rank=8 if name == "tied" else 0))
        yield {name: server.wait() for name, server in found.items()}


def trainer_of(path: Path, server: VllmServer, *more: VllmServer, **settings: Any) -> Any:
    urls = ",".join(each.url for each in (server, *more))
    given = {"model": str(server.model), "vllm_server_base_url": urls, "learning_rate": 0.5, **SETTINGS, **settings}
    reward = given.pop("reward", fraction_of_ones)
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path / "run", reward, **given)


def agree_after_each_push(trainer: Any, *parts: str) -> None:
    for part in parts:
        shake(trainer, part)
        assert disagreement(trainer) > APART
        trainer.vllm_generation.sync_weights()
        assert disagreement(trainer) < AGREE


def test_trainer_and_server_agree_after_steps_and_each_push(
    servers: dict[str, VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.parts, "__defaults__", (10_000,))  # no tensor fits into one request
    trainer = trainer_of(tmp_path, servers["tied"], max_steps=2)
    trainer.train()
    name = "sampling/sampling_logp_difference/max"
    assert all(entry[name] < AGREE for entry in trainer.state.log_history if name in entry)
    assert trainer.state.log_history[0]["grad_norm"] > 0
    assert disagreement(trainer) > APART  # the last step has not been synced
    agree_after_each_push(trainer, "embed_tokens", "q_proj", "norm")


def test_model_with_its_own_output_head_agrees(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    agree_after_each_push(trainer_of(tmp_path, servers["untied"]), "lm_head", "embed_tokens", "down_proj")


def test_lora_is_merged_for_the_server_and_policy_is_unchanged(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trainer_of(tmp_path, servers["tied"], peft_config=lora, vllm_lora_sync="merge")
    trainer.vllm_generation.sync_weights()  # the server has the weights of the test before
    shake(trainer, "lora_B")
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    assert disagreement(trainer) > APART
    trainer.vllm_generation.sync_weights()
    assert disagreement(trainer) < AGREE
    assert all(parameter.equal(before[name]) for name, parameter in trainer.model.named_parameters())


LORA = LoraConfig(r=4, lora_alpha=16, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")


def test_an_adapter_is_sent_by_itself(
    servers: dict[str, VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    post = client.Server.post

    def counted(server: client.Server, route: str, body: Any) -> Any:
        asked.append(route)
        return post(server, route, body)

    monkeypatch.setattr(client.Server, "post", counted)
    trainer = trainer_of(tmp_path, servers["tied"], peft_config=LORA, vllm_lora_sync="adapter", learning_rate=0.05)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < AGREE
    assert "update_weights" in asked  # the base model, once
    asked.clear()
    agree_after_each_push(trainer, "lora_B", "lora_A")
    assert set(asked) == {"collective_rpc", "v1/load_lora_adapter", "v1/unload_lora_adapter"}
    again = trainer_of(tmp_path / "again", servers["tied"], peft_config=LORA, vllm_lora_sync="merge")
    again.vllm_generation.sync_weights()  # a later run has the server to itself
    assert disagreement(again) < AGREE


def test_a_server_without_room_for_the_adapter_is_refused(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no room for an adapter of rank 4; start it with: VLLM_ALLOW.*--max-lora-rank 8"
    ):
        trainer_of(tmp_path, servers["untied"], peft_config=LORA, vllm_lora_sync="adapter")


def test_two_ranks_and_the_server_agree_after_a_push(
    servers: dict[str, VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ZeRO-3; the test of a killed server has two ranks under DDP."""
    monkeypatch.setenv("TRL_EXT_TEST_SERVER", servers["tied"].url)
    for found in on_two_ranks(by_accelerate("two_cpu_ranks_zero3"), tmp_path, "sync"):
        for apart in found.values():
            assert min(apart["unsynced"], apart["shaken"]) > APART
            assert max(apart["after_training"], apart["synced"]) < AGREE


@pytest.mark.parametrize("ranks", ["two_cpu_ranks_zero3", pytest.param("two_cpu_ranks_ddp", marks=pytest.mark.nightly)])
def test_two_ranks_with_two_servers_roll_out_ahead(
    ranks: str, servers: dict[str, VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXT_TEST_SERVER", f"{servers['tied'].url},{servers['other'].url}")
    assert_same_rollouts_ahead(*on_two_ranks(by_accelerate(ranks), tmp_path, "ahead"))


def assert_same_rollouts_ahead(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Of two ranks: whatever the timing, and resumed."""
    assert first["first"]["rollouts"] != second["first"]["rollouts"]
    for found in (first, second):
        whole = found["first"]["rollouts"]
        assert sorted(whole) == [1, 2, 3, 4]
        assert found["late"] == found["first"]
        assert found["resumed"]["rollouts"] == {step: whole[step] for step in (3, 4)}
    ages = first["first"]["staleness"]
    assert ages[0] == 0
    assert 0 < max(ages) <= 1


def test_sft_and_expert_iteration_sample_on_a_server(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": servers["tied"].url}
    served |= {"model": str(servers["tied"].model), "model_init_kwargs": {"dtype": "float32"}}
    trainer = fine_tuning(tmp_path / "sft", LEARNED, **{**ADAM, **served})
    before = fraction_learned(trainer)
    trainer.train()
    assert before < 0.2
    assert fraction_learned(trainer) > 0.9
    (completion,) = trainer.sample(["1 + 1 ="], batch_size=1, seed=0, temperature=0)
    assert (completion.text, completion.finished, completion.tokens) == ("1 1 stop", True, 3)
    expert_iteration(tmp_path / "ei", **served).train()
    assert steps_of(tmp_path / "ei")[0]["rollouts"] > 0


def test_server_takes_no_sampling_field_of_its_model(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    drawn = []
    for name in ("tied", "other"):
        trainer = trainer_of(tmp_path / name, servers[name], model=str(servers["tied"].model))
        drawn.append([trainer.sample(["1 + 1 =", "2 + 3 ="], 2, 3, temperature) for temperature in (0.0, None)])
    assert drawn[0] == drawn[1]


def test_two_servers_take_a_share_of_the_prompts_each(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, servers["tied"], servers["other"])
    engine = trainer.vllm_generation

    def served() -> list[int]:
        texts = [requests.get(f"{servers[name].url}/metrics", timeout=10).text for name in ("tied", "other")]
        lines = [next(x for x in text.splitlines() if x.startswith("vllm:prompt_tokens_total")) for text in texts]
        return [int(float(line.split()[-1])) for line in lines]

    shake(trainer, "proj")
    engine.sync_weights()
    before = served()
    assert disagreement(trainer) < AGREE  # 8 prompts of 4 tokens
    assert [after - b for after, b in zip(served(), before, strict=True)] == [16, 16]


class Sees(TrainerCallback):
    """What each step is trained on."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.rollouts: dict[int, list[str]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rollouts[state.global_step] = [row["response"] for row in self.trainer.last_rollout]


def run(
    path: Path, server: VllmServer, resume: Path | None = None, more_callbacks: Sequence[Any] = (), **settings: Any
) -> Sees:
    sees = Sees()
    callbacks = [sees, *more_callbacks]
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "callbacks": callbacks, "learning_rate": 0.1}
    sees.trainer = trainer_of(path, server, **{**saving, **settings})
    for callback in more_callbacks:
        callback.trainer = sees.trainer
    sees.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return sees


@pytest.fixture(scope="module")
def whole(servers: dict[str, VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Sees:
    """Three steps without interruption, with a checkpoint after each."""
    return run(tmp_path_factory.mktemp("whole"), servers["tied"])


def test_resumed_run_is_the_uninterrupted_run(whole: Sees, servers: dict[str, VllmServer], tmp_path: Path) -> None:
    assert all(len(set(rollout)) > 4 for rollout in whole.rollouts.values())
    trainer = whole.trainer
    trainer.vllm_generation.generate([[3]] * 3, None, 3)  # whatever the server was asked since
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    resumed = run(tmp_path, servers["tied"], resume=checkpoint)
    assert resumed.rollouts == {step: whole.rollouts[step] for step in (2, 3)}
    assert weight_difference(resumed.trainer.model, trainer.model) < 1e-4  # batches of the server differ


def at_random_times(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Have every answer come after up to a fifth of a second."""
    complete, draw = client.Server.complete, random.Random(seed)

    def delayed(*args: Any) -> Any:
        time.sleep(0.2 * draw.random())
        return complete(*args)

    monkeypatch.setattr(client.Server, "complete", delayed)


def begins_with_one(completions: list[str], **_: Any) -> list[float]:
    """A reward that is the same in many groups."""
    return [float(text.startswith("1")) for text in completions]


SELECTED = {"dynamic_sampling_tries": 3, "uninformative_keep_prob": 0.5, "reward": begins_with_one}
PROBLEMS = pytest.mark.parametrize("selected", [{}, SELECTED], ids=["in order", "selected"])


@PROBLEMS
def test_rollouts_ahead_at_a_rate_of_0_are_those_of_now(
    selected: dict[str, Any], whole: Sees, servers: dict[str, VllmServer], tmp_path: Path
) -> None:
    settings = {"learning_rate": 0.0, **selected}
    still, ahead = (run(tmp_path / str(n), servers["tied"], rollout_ahead=n, **settings) for n in (0, 1))
    assert ahead.rollouts == still.rollouts
    assert ahead.rollouts != whole.rollouts
    assert logged(still, "sampling/staleness") == []
    assert_one_rollout_old(ahead, 3)


def logged(seen: Sees, name: str) -> list[float]:
    return [entry[name] for entry in seen.trainer.state.log_history if name in entry]


def assert_one_rollout_old(seen: Sees, rollouts: int) -> None:
    """All but the first, as far as no further try was needed, which is of current weights."""
    of_old = [0.0, *[1.0] * (rollouts - 1)]
    tries = logged(seen, "dynamic_sampling/tries")
    if not tries:
        assert logged(seen, "sampling/staleness") == of_old
        return
    assert max(tries[1:]) > 1
    for age, most, tried in zip(logged(seen, "sampling/staleness"), of_old, tries, strict=True):
        assert age == most if tried == 1 else age < most or most == 0


@PROBLEMS
def test_rollouts_ahead_are_the_same_at_any_timing_and_resumed(
    selected: dict[str, Any],
    whole: Sees,
    servers: dict[str, VllmServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last digit, as the server has a batch of one."""
    settings = {"rollout_ahead": 1, "max_steps": 4, "model": str(servers["tied"].model), **selected}
    first = run(tmp_path / "first", servers["other"], **settings)
    if not selected:
        assert first.rollouts[1] == whole.rollouts[1]
        assert first.rollouts[3] != whole.rollouts[3], "of the weights before"
    assert_one_rollout_old(first, 4)
    at_random_times(monkeypatch, seed=0)
    validates = Validates()
    second = run(tmp_path / "second", servers["other"], more_callbacks=[validates], **settings)
    assert second.rollouts == first.rollouts
    assert weight_difference(second.trainer.model, first.trainer.model) == 0
    assert validates.found[0] != validates.found[1], "of each step's weights"
    for step in (2, 3):
        checkpoint = Path(first.trainer.args.output_dir) / f"checkpoint-{step}"
        resumed = run(tmp_path / f"resumed{step}", servers["other"], resume=checkpoint, **settings)
        assert resumed.rollouts == {later: first.rollouts[later] for later in range(step + 1, 5)}
        assert weight_difference(resumed.trainer.model, first.trainer.model) == 0


def test_a_time_budget_ends_a_run_with_a_rollout_ahead(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    """Validations after it are of the last weights; resumed, the run is the one without a budget."""

    class Budget(TimeBudget):
        """Spent after two steps."""

        def left(self) -> float:
            return 1e9 if self.trainer.state.global_step < 2 else 0.0

    settings = {"rollout_ahead": 1, "max_steps": 4, "save_steps": 2, **SELECTED}
    whole = run(tmp_path / "whole", servers["tied"], **settings)
    sees = Sees()
    sees.trainer = trainer = trainer_of(
        tmp_path / "ended", servers["tied"], callbacks=[sees], save_strategy="steps", learning_rate=0.1, **settings
    )
    trainer.add_callback(Budget(trainer, SimpleNamespace(seconds=float), 1e9))
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.vllm_generation.ahead is not None
    trainer.vllm_generation.sync_weights()
    assert disagreement(trainer) < AGREE
    (saved,) = checkpoints(tmp_path / "ended" / "run")
    resumed = run(tmp_path / "ended", servers["tied"], resume=saved, **settings)
    assert {**sees.rollouts, **resumed.rollouts} == whole.rollouts


class Validates(TrainerCallback):
    """Samples after every step, while the next rollout is on its way, and expects what a synced engine gives."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before = self.trainer.vllm_generation.ahead
        self.found.append([c.text for c in self.trainer.sample(["1 + 1 ="] * 8, batch_size=8, seed=3)])
        with self.trainer.vllm_generation.seeds.fixed(0):  # else these would be a try at the next rollout
            assert disagreement(self.trainer) < AGREE
        assert self.trainer.vllm_generation.ahead is before


def test_a_server_lost_in_a_rollout_ahead_ends_the_run(
    servers: dict[str, VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = client.Servers.generate, []

    def third_time_lost(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ServerError("lost")
        return generate(*args, **kwargs)

    monkeypatch.setattr(client.Servers, "generate", third_time_lost)
    with pytest.raises(ServerError, match="lost"):
        run(tmp_path, servers["tied"], save_steps=100, rollout_ahead=1, max_steps=4)
    (saved,) = checkpoints(tmp_path / "run")
    assert saved.name == "checkpoint-2"
    resumed = run(tmp_path, servers["tied"], resume=saved, save_steps=100, rollout_ahead=1, max_steps=4)
    assert logged(resumed, "sampling/staleness")[-2:] == [0, 1], "what was on its way is sampled again"


class StartsAgain(TrainerCallback):
    """Kills the server when it has sampled what is on its way after two steps, and starts it on the same port."""

    def __init__(self, server: VllmServer, stack: contextlib.ExitStack) -> None:
        self.server, self.stack = server, stack
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.trainer.vllm_generation.wait_for_ahead()
            self.server.kill()
            self.stack.enter_context(serving(self.server.model, port=self.server.port)).wait()


@pytest.mark.nightly
def test_a_server_started_again_is_given_the_weights(
    whole_ahead: Sees, servers: dict[str, VllmServer], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(servers["tied"].model)).wait()
        again = StartsAgain(server, stack)
        found = run(tmp_path, server, more_callbacks=[again], rollout_ahead=1, max_steps=5)
    assert sorted(found.rollouts) == [1, 2, 3, 4, 5]
    assert {step: found.rollouts[step] for step in whole_ahead.rollouts} == whole_ahead.rollouts


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", range(3))
def test_trainer_killed_with_a_rollout_ahead_resumes(
    moment: int, servers: dict[str, VllmServer], tmp_path: Path
) -> None:
    """At any moment; what it then leaves is the uninterrupted run's, byte for byte."""
    saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "validate_every": 4}
    made = {"rollout_ahead": 1, "sampling_max_tokens": 24, **saving, **SELECTED, "reward": None}
    weights = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        settings = recipe_settings(folder, servers["tied"].model, servers["other"].url, **made)
        if name == "killed":
            kill_after_two_steps(folder, settings, random.Random(moment).uniform(0, 2))
        with launched(folder, "one_cpu", "--config", str(settings), "--resume", "auto") as trained:
            assert trained.wait() == 0, trained.printed()[-3000:]
        assert steps(folder) == list(range(1, 9))
        weights.append((folder / "run" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def kill_after_two_steps(folder: Path, settings: Path, seconds: float) -> None:
    with launched(folder, "one_cpu", "--config", str(settings)) as trained:
        wait_for(lambda: trained.process.poll() is not None or len(steps(folder)) > 1)
        time.sleep(seconds)
        os.killpg(trained.process.pid, signal.SIGKILL)
    assert len(steps(folder)) < 8


PASSES = {
    "slow": slow, "closed for a while": between(12, 13, GONE), "a full queue": between(12, 15, BUSY),
}  # fmt: skip
THIRD = 2  # rollouts before it; it is asked for ahead, while the second step is made
ENDS = {
    "dead": functools.partial(between, last=10**6, fate=GONE),
    "a queue that stays full": functools.partial(between, last=10**6, fate=BUSY),
    "silent": silent_from,
}


@pytest.fixture(scope="module")
def whole_ahead(servers: dict[str, VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Sees:
    return run(tmp_path_factory.mktemp("whole_ahead"), servers["tied"], rollout_ahead=1)


@pytest.mark.parametrize("name", PASSES)
def test_a_fault_that_passes_changes_nothing_of_a_run_ahead(
    name: str, whole_ahead: Sees, servers: dict[str, VllmServer], tmp_path: Path
) -> None:
    with linked(servers["tied"].url, PASSES[name]) as link:
        found = run(tmp_path, servers["tied"], rollout_ahead=1, vllm_server_base_url=link.url)
    assert found.rollouts == whole_ahead.rollouts
    assert link.asked >= sum(map(len, found.rollouts.values()))


@pytest.mark.timeout(280)
@pytest.mark.parametrize("of_two", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_a_fault_that_stays_ends_a_run_ahead_in_a_line(
    name: str,
    of_two: bool,
    whole_ahead: Sees,
    servers: dict[str, VllmServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE", (5.0, 5.0))
    first = THIRD * len(whole_ahead.rollouts[1]) // (2 if of_two else 1)
    with linked(servers["other" if of_two else "tied"].url, ENDS[name](first)) as link:
        urls = f"{servers['tied'].url},{link.url}" if of_two else link.url
        began = time.monotonic()
        lost = f"the vLLM server at {link.url.removeprefix('http://')} does not answer any more"
        with pytest.raises(ServerError, match=lost):
            run(tmp_path, servers["tied"], rollout_ahead=1, max_steps=6, save_steps=100, vllm_server_base_url=urls)
        assert time.monotonic() - began < 60
    (saved,) = checkpoints(tmp_path / "run")
    assert saved.name == "checkpoint-2"
    resumed = run(tmp_path, servers["tied"], resume=saved, rollout_ahead=1, max_steps=6, save_steps=100)
    assert resumed.trainer.state.global_step == 6


def test_sigterm_does_not_wait_for_a_servers_answers(
    whole: Sees, servers: dict[str, VllmServer], tmp_path: Path
) -> None:
    second = len(whole.rollouts[1])
    silent = silent_from(second)
    told: list[float] = []

    def tell(number: int) -> int:
        if number == second:
            told.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return silent(number)

    with linked(servers["tied"].url, tell) as link:
        saving = {"save_strategy": "steps", "save_steps": 100, "max_steps": 3}
        trainer = trainer_of(tmp_path, servers["tied"], vllm_server_base_url=link.url, **saving)
        with trainer.stopping_on_sigterm():
            trainer.train()
    assert time.monotonic() - told[0] < 10
    assert (trainer.stop_signal, trainer.state.global_step) == (signal.SIGTERM, 1)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1"]


def test_answers_of_other_weights_than_were_pushed_end_a_run(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, servers["tied"])
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.generate([[3]], None, 1)
    servers["tied"].wait()
    push = {"method": "take_push", "args": [""]}  # as a server has that was started again
    assert trainer.vllm_generation.servers.each[0].post("collective_rpc", push) is not None
    with pytest.raises(ServerError, match="has other weights than it was given: it was started again, or another run"):
        trainer.vllm_generation.generate([[3]], None, 1)
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.generate([[3]], None, 1)


@pytest.mark.parametrize("lost", ["push", "generate"])
def test_step_before_a_server_is_lost_is_saved(
    lost: str, whole: Sees, servers: dict[str, VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = getattr(client.Servers, lost)
    calls: list[int] = []

    def third_time_lost(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ServerError("lost")
        return call(*args)

    monkeypatch.setattr(client.Servers, lost, third_time_lost)
    with pytest.raises(ServerError, match="lost"):
        run(tmp_path / "lost", servers["tied"], save_steps=100)
    saved = checkpoints(tmp_path / "lost" / "run")
    assert [path.name for path in saved] == ["checkpoint-2"]
    resumed = run(tmp_path / "lost", servers["tied"], resume=saved[0], save_steps=100)
    assert resumed.rollouts == {3: whole.rollouts[3]}
    assert weight_difference(resumed.trainer.model, whole.trainer.model) < 1e-4
    entries = [[e for e in r.trainer.state.log_history if e.get("step") == 3 and "loss" in e] for r in (whole, resumed)]
    assert entries[0][0]["num_tokens"] == entries[1][0]["num_tokens"]


def test_validation_is_the_same_whenever_it_is_done(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, servers["tied"])
    found = [[c.text for c in trainer.sample(["1 + 1 ="] * 4, batch_size=4, seed=3)] for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def recipe_settings(folder: Path, model: Path, *urls: str, **more: Any) -> Path:
    """A YAML file for a run of small steps whose reward differs within every group."""
    (folder / "mine.py").write_text("def mine(completions, **_):\n    return [len(set(c)) / 9 for c in completions]\n")
    settings = {
        **TINY_RUN, "model_name_or_path": str(model), "reward": f"{folder / 'mine.py'}:mine", "use_vllm": True,
        "vllm_mode": "server", "vllm_server_base_url": ",".join(urls), "disable_tqdm": True, "bf16": False,
        "prompt": "question_only", "stop": None, "output_dir": str(folder / "run"),
        **{name: value for name, value in more.items() if value is not None},
    }  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_another_vocabulary_or_model_is_refused_at_the_start(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    settings = recipe_settings(tmp_path, servers["tied"].model, servers["untied"].url)
    with pytest.raises(InputError, match=r"serves another model, .*: tie_word_embeddings is False there and True here"):
        run_recipe(*parse(GRPO_SETTINGS, "about", settings, []))
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"has another vocabulary: .*; start it with --model .*tied"):
        trainer_of(tmp_path, servers["tied"], processing_class=tiny_tokenizer([*WORDS[:3], *reversed(WORDS[3:])]))
    with pytest.raises(InputError, match=r"serves another model, .*: tie_word_embeddings is False there and True here"):
        trainer_of(tmp_path, servers["untied"], model=str(servers["tied"].model))


def test_server_taking_no_weights_is_refused_with_a_command(
    servers: dict[str, VllmServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = client.Server(servers["tied"].url)
    assert found.backend("cpu") == "http"
    reported: dict[str, Any] = {"weight_transfer_config": {"backend": "nccl"}}
    monkeypatch.setattr(found.client, "get_server_info", lambda: reported)
    assert found.backend("cuda") == "nccl"
    with pytest.raises(InputError, match=r"by nccl, which needs GPUs on both sides, .*start it with: VLLM_SERVER_DEV"):
        found.backend("cpu")
    for own in ({"generation_config": "/a/folder"}, {"override_generation_config": {"max_new_tokens": 3}}):
        reported["model_config"] = own
        with pytest.raises(InputError, match=r"--generation-config .*of its own.*start it with: .*-config vllm"):
            found.backend("cuda")
    del reported["model_config"]
    reported["weight_transfer_config"] = None
    with pytest.raises(InputError, match=r"without --weight-transfer-config, .*start it with: VLLM_SERVER_DEV"):
        found.backend("cuda")
    monkeypatch.undo()
    get = found.client.session.get
    missing = lambda url, **kwargs: get(url.replace("server_info", "nothing_there"), **kwargs)  # noqa: E731
    monkeypatch.setattr(found.client.session, "get", missing)
    with pytest.raises(InputError, match=r"without VLLM_SERVER_DEV_MODE=1, .*start it with: VLLM_SERVER_DEV"):
        found.backend("cpu")


def test_push_that_a_trainer_left_half_done_is_no_obstacle(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, servers["tied"])
    server = trainer.vllm_generation.servers.each[0]
    server.begin_update()
    first = next(client.parts(trainer.vllm_generation._iter_named_params(), 1000))
    server.post("update_weights", {"update_info": first})
    trainer.vllm_generation.sync_weights()
    assert disagreement(trainer) < AGREE
    with pytest.raises(ServerError, match=r"answers 500 to /update_weights, and its own output says why"):
        server.post("update_weights", {"update_info": first})  # none has begun


@pytest.mark.nightly
def test_killed_server_ends_the_run_in_a_line_with_a_checkpoint(servers: dict[str, VllmServer], tmp_path: Path) -> None:
    """On two ranks, which agreed with both servers until then."""
    other = servers["other"]
    saving = {"max_steps": 1000, "save_strategy": "steps", "save_steps": 1000, "validate_every": 1000}
    settings = recipe_settings(tmp_path, servers["tied"].model, servers["tied"].url, other.url, **saving)
    with launched(tmp_path, "two_cpu_ranks_ddp", "--config", str(settings)) as trained:
        wait_for(lambda: trained.process.poll() is not None or len(steps(tmp_path)) > 2)
        other.kill()
        assert trained.wait(100) == 1, trained.printed()[-3000:]
    name = "sampling/sampling_logp_difference/max"
    apart = [row[name] for row in rows(tmp_path / "run" / "metrics.jsonl") if name in row]
    assert len(apart) > 2
    assert max(apart) < AGREE
    last = checkpoints(tmp_path / "run")[0]
    lines = error_lines(trained.printed())
    assert lines, trained.printed()[-3000:]
    address = other.url.removeprefix("http://")
    for line in lines:  # of each rank
        assert f"the vLLM server at {address} does not answer any more" in line
        assert f"up to {last.name}; resume with the same command" in line
        assert "--resume auto" in line
    state = json.loads((last / "trainer_state.json").read_text())
    assert state["global_step"] == int(last.name.removeprefix("checkpoint-"))
