"""A teacher behind a vLLM server: the same step as with the teacher in the trainer, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainerState

from tests.grpo.test_distillation import EVERY_TOKEN, config_of
from tests.grpo.test_step import questions, trained, trainer_of, words_of_some
from tests.support.tiny import WORDS, save_tiny, scripted, tiny_model, tiny_tokenizer, weight_difference
from tests.support.vllm_server import VllmServer, serving
from trl_ext.errors import InputError, ServerError
from trl_ext.generation.completion import Sampling
from trl_ext.generation.samplers import HFSampler
from trl_ext.grpo import served_teacher
from trl_ext.grpo.teachers import check_teachers, fingerprints_of_teachers, shortest_context

AGREE = 2e-5  # of the weights after a step of 0.3: float32 on both sides, in different kernels


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("served") / "teacher"
    # heads that vLLM's CPU kernels have
    config = Qwen3Config(**{**tiny_model().config.to_dict(), "hidden_size": 64, "head_dim": 32})
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with serving(folder) as found:
        yield found.wait()


def taught(path: Path, **settings: Any) -> Any:
    fixed = {"preset": "opd", "teacher_init_kwargs": None, "shuffle_dataset": False, "n_grpo_steps": 1}
    return trained(path, **fixed | settings)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"distill_rollouts": "incorrect"},
        {"preset": "gkd", "teacher_top_k": 3},
        {"preset": "gkd", "teacher_top_k": EVERY_TOKEN},
        {"preset": "gkd", "distillation": "full_reverse_kl", "teacher_top_k": 5, "epochs_per_rollout_batch": 2},
    ],
    ids=["sampled", "incorrect", "top_3", "every_token", "two_epochs"],
)
def test_it_teaches_what_it_teaches_here(settings: dict[str, Any], server: VllmServer, tmp_path: Path) -> None:
    here = taught(tmp_path / "here", teacher=str(server.model), **settings)
    there = taught(tmp_path / "there", teacher_url=server.url, **settings)
    assert weight_difference(here.model, tiny_model().double()) > 1e-3
    assert weight_difference(here.model, there.model) < AGREE
    logged = [[row for row in each.state.log_history if "distillation/reverse_kl" in row] for each in (here, there)]
    for ours, theirs in zip(*logged, strict=True):
        for name in ("reverse_kl", "agreement"):
            assert theirs[f"distillation/{name}"] == pytest.approx(ours[f"distillation/{name}"], abs=1e-4)


@pytest.mark.vllm
def test_one_here_and_one_there_teach_by_column(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    tell = served_teacher.TeacherServer.tell

    def noted(self: Any, row: Any, *rest: Any, **more: Any) -> Any:
        asked.append(row)
        return tell(self, row, *rest, **more)

    monkeypatch.setattr(served_teacher.TeacherServer, "tell", noted)
    data = questions()
    other = str(save_tiny(tmp_path / "other", seed=2))
    settings = {"train_dataset": data.add_column("by", ["a", "b"] * 8), "teacher_column": "by"}
    settings["rollout_func"] = scripted(words_of_some)  # some are equal
    here = taught(tmp_path / "here", teacher=f"a={other},b={server.model}", **settings)
    assert not asked
    there = taught(tmp_path / "there", teacher=f"a={other}", teacher_url=f"b={server.url}/v1", **settings)
    assert weight_difference(here.model, there.model) < AGREE
    sampled = asked[1:]  # the first is asked before a model loads
    texts = [tiny_tokenizer().decode(row.ids[: row.begin]) for row in sampled]
    theirs = set(data["prompt"][1::2])
    assert texts  # problems of the other teacher are not asked, and equal rows once
    assert set(texts) <= theirs
    assert len(set(sampled)) == len(sampled)


@pytest.mark.vllm
def test_its_probabilities_are_the_model_s(server: VllmServer) -> None:
    model, ids = Qwen3ForCausalLM.from_pretrained(server.model).eval(), (9, 7, 10, 8, 11, 5, 1)
    with torch.no_grad():
        every = model(torch.tensor([ids])).logits[0].log_softmax(-1)[3:-1]
    told = served_teacher.TeacherServer(server.url).tell(served_teacher.Asked(ids, 4), 4, len(WORDS))
    assert_close(torch.tensor(told.logp), every.gather(-1, torch.tensor(ids[4:])[:, None])[:, 0], atol=1e-5, rtol=0)
    assert_close(torch.tensor(told.ids), every.topk(4).indices)
    rest = (1 - every.topk(4).values.exp().sum(-1)).log()
    assert_close(torch.tensor(told.events), torch.cat([every.topk(4).values, rest[:, None]], -1), atol=1e-5, rtol=0)
    assert told.agrees == (every.argmax(-1) == torch.tensor(ids[4:])).tolist()


@pytest.mark.vllm
def test_what_a_step_would_end_in_is_refused_first(server: VllmServer, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    told = {"preset": "opd", "teacher_url": server.url, "max_completion_length": 12}
    config = config_of(tmp_path, **told)
    check_teachers(config, tokenizer, len(WORDS))
    assert shortest_context(config) == 127
    assert fingerprints_of_teachers(config) == {"teacher": {"served": str(server.model)}}
    with pytest.raises(InputError, match="divides texts into other tokens than the policy"):
        check_teachers(config, tiny_tokenizer([*WORDS[:3], *reversed(WORDS[3:])]), len(WORDS))
    many = config_of(tmp_path, **told | {"preset": "gkd"})
    with pytest.raises(InputError, match=r"answers 400 .* start it with: vllm serve .* --max-logprobs 60"):
        check_teachers(many, tokenizer, 60)
    with pytest.raises(InputError, match=r"serves .*teacher; name one, such as #/"):
        served_teacher.TeacherServer(f"{server.url}#another")


@pytest.mark.vllm
def test_it_is_measured_as_vllm_measures_it(server: VllmServer, tmp_path: Path) -> None:
    tokenizer, sampling = tiny_tokenizer(), Sampling(temperature=0.0, max_tokens=12, stop=("stop", "7 7"))
    numbers = list(range(16))
    asked = [" + ".join(map(str, range(i % 8, 9))) + " =" for i in numbers]
    here = HFSampler(str(server.model), sampling, batch_size=4)(asked, numbers)
    there = served_teacher.TeacherServer(server.url).sample(asked, numbers, sampling, tokenizer)
    assert [(one.text, one.tokens, one.finished) for one in there] == [
        (one.text, one.tokens, one.finished) for one in here
    ]


def test_no_server_and_no_vllm_server_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--teacher_url: .*127.0.0.1:1 does not answer.*vllm serve"):
        served_teacher.TeacherServer("http://user:secret@127.0.0.1:1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher_url": "localhost:8000"}, "teacher_url 'localhost:8000' is no address, such as http://host:8000"),
        ({"teacher": "http://h:1"}, "teacher 'http://h:1' is an address: use teacher_url"),
        ({"teacher_url": "http://h:1", "temperature": 0.7}, "at temperature 1, and the policy samples at 0.7"),
        ({"teacher_url": "http://h:1,http://h:2"}, "'teacher' is there twice; name them"),
        ({"teacher_url": "http://h:1,"}, "teacher_url 'http://h:1,' has an empty entry"),
        ({"teacher_url": "a=http://h:1", "teacher": "a=model"}, "teacher and teacher_url: 'a' is there twice"),
        ({"teacher_url": "http://h:1", "teacher_column": "by"}, "teacher_url 'http://h:1' has no name for 'by'"),
        ({"teacher_url": "http://h:1", "teacher": "m", "teacher_weights": [1.0]}, "has 1 for 2 teachers"),
    ],
)
def test_addresses_that_cannot_be_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, preset="opd", **settings)


class Loses(TrainerCallback):
    """The teacher's server is gone after some steps."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: int) -> None:
        self.patch, self.steps = patch, steps

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step == self.steps:

            def gone(*_: object, **__: object) -> None:
                raise requests.ConnectionError

            self.patch.setattr(requests.Session, "send", gone)


@pytest.mark.vllm
def test_a_lost_server_ends_the_run_in_a_line_with_a_checkpoint(server: VllmServer, tmp_path: Path) -> None:
    settings = {"teacher_url": server.url, "n_grpo_steps": 4, "save_strategy": "steps", "save_steps": 100}
    settings |= {"preset": "opd", "teacher_init_kwargs": None, "shuffle_dataset": False}
    whole = trained(tmp_path / "whole", **settings)
    trainer = trainer_of(tmp_path / "lost", **settings)
    with pytest.MonkeyPatch.context() as patch:
        trainer.add_callback(Loses(patch, 2))
        with pytest.raises(ServerError, match=r"the teacher's server at [\d.:]+ does not answer \(ConnectionError\)"):
            trainer.train()
    (checkpoint,) = (tmp_path / "lost").glob("**/checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    resumed = trainer_of(tmp_path / "lost", **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert weight_difference(whole.model, tiny_model().double()) > 1e-3
    assert weight_difference(whole.model, resumed.model) < AGREE


def test_what_answers_as_no_vllm_server_does_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"data": [{"id": "base", "max_model_len": 99}, {"id": "adapter", "max_model_len": None}]}
    answers = iter([listed, listed, {"choices": [{"text": ""}]}, "<html>", {"data": "?"}])

    def request(*_: object, **__: object) -> requests.Response:
        body, found = next(answers), requests.Response()
        found.status_code, found._content = 200, body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return found

    monkeypatch.setattr(requests.Session, "request", request)
    with pytest.raises(InputError, match="h:1 serves base, adapter; name one, such as #base"):
        served_teacher.TeacherServer("http://user:secret@h:1/v1")
    server = served_teacher.TeacherServer("http://user:secret@h:1/v1#adapter")
    assert (server.model, server.context, server.address) == ("adapter", 99, "h:1")
    with pytest.raises(ServerError, match="the teacher's server at h:1 tells no prompt_logprobs"):
        server.tell(served_teacher.Asked((1, 2), 1), None, 9)
    with pytest.raises(ServerError, match=r"at h:1 does not answer \(JSONDecodeError\)"):
        server.tell(served_teacher.Asked((1, 2), 1), None, 9)
    with pytest.raises(InputError, match="h:1 is no vLLM server: it does not list its models"):
        served_teacher.TeacherServer("http://h:1")
