"""A real small judge: SmolLM2-135M behind vLLM's server on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from tests.support.scripted_judge import PROBLEM, WRONG, injections, judge_file
from tests.support.versions import needs_gguf, needs_smollm2
from tests.support.vllm_server import VllmServer, serving
from trl_ext.errors import InputError
from trl_ext.generation.model_source import locate
from trl_ext.rewards.judge.judging import Judge
from trl_ext.rewards.judge.prompt import Case, prompt
from trl_ext.rewards.judge.settings import JudgeSettings, read_judge

pytestmark = [pytest.mark.vllm, needs_gguf, needs_smollm2, pytest.mark.timeout(580)]

RUBRIC = {"criteria": {"correct": {"description": "The answer is right."}}, "reason": False}
CASES = [Case("She sold 72. The answer is 72.", PROBLEM, "72"), Case(WRONG, PROBLEM, "72")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model = tmp_path_factory.mktemp("server") / "smollm2"
    model.symlink_to(locate("smollm2").base)
    with serving(model, "--served-model-name", "smollm2", "--max-model-len", "1024", "--max-num-seqs", "4") as started:
        yield started.wait(500)


@pytest.fixture
def settings(server: VllmServer, tmp_path: Path) -> JudgeSettings:
    limits = {"timeout": 200, "concurrency": 2}
    file = judge_file(tmp_path, f"{server.url}/v1", model="smollm2", rubric=RUBRIC, limits=limits)
    return read_judge(file)


def test_verdicts_hold_to_the_schema_and_are_kept(settings: JudgeSettings) -> None:
    first = Judge(settings)
    first.check()
    judgment = first(CASES)
    assert judgment.failures == 0
    assert first._has_schema
    again = Judge(settings)(CASES)
    assert (again.judged, again.calls, again.cache_hits) == (judgment.judged, 0, 2)


def test_the_same_question_has_the_same_verdict(settings: JudgeSettings, tmp_path: Path) -> None:
    by_cache = [Judge(replace(settings, cache=str(tmp_path / name)))(CASES[1:]) for name in "ab"]
    assert by_cache[0].judged == by_cache[1].judged
    assert [judgment.calls for judgment in by_cache] == [1, 1]


def test_a_model_that_is_not_served_is_refused(settings: JudgeSettings) -> None:
    with pytest.raises(InputError, match=r"serves no model 'other'\. It serves: smollm2; change model"):
        Judge(replace(settings, model="other")).check()


def test_chat_tokens_in_a_response_are_text_to_the_server(server: VllmServer, settings: JudgeSettings) -> None:
    def special(response: str, fenced: bool = True) -> int:
        case = Case(response, PROBLEM, "72")
        question = prompt(settings.rubric, case, "0123456789abcdef") if fenced else response
        asked = {"model": "smollm2", "messages": [{"role": "user", "content": question}]}
        said = requests.post(f"{server.url}/tokenize", json=asked, timeout=60).json()
        return sum(token < 17 for token in said["tokens"])  # SmolLM2's special tokens

    usual = special(WRONG)
    assert {special(f"{WRONG}\n{row['text']}") for row in injections()} == {usual}
    chatml = [row["text"] for row in injections() if row["kind"] == "chatml"]
    assert all(special(text, fenced=False) > special("x", fenced=False) for text in chatml), (
        "without a fence they are not"
    )
