"""`ServedTeacher`: a teacher behind a vLLM server with OpenAI's API, asked for the probabilities of given tokens.

Letters: B rows of a micro-batch, T completion tokens, k tokens, E events, V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor

from trl_ext.algorithms.distillation import Scores
from trl_ext.errors import InputError, ServerError
from trl_ext.generation.completion import Completion, Sampling, derive_seed
from trl_ext.generation.progress import advance
from trl_ext.generation.server import MOST_REQUESTS, make_patient
from trl_ext.step import MicroBatch, Rows

KEY = "VLLM_API_KEY"  # of the environment, as for the server itself
# As the policy samples, whatever the model or its server has as a default.
_NEUTRAL: dict[str, Any] = {
    "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "add_special_tokens": False,
}  # fmt: skip
_ROUNDING = 1e-7  # of float32 probabilities: what the others have together is not known better


class Asked(NamedTuple):
    """A prompt and its completion, up to the last token that is trained on."""

    ids: tuple[int, ...]
    begin: int  # of the completion


class Told(NamedTuple):
    """What a server says of n completion tokens."""

    logp: list[float]  # n
    agrees: list[bool]  # n
    ids: list[list[int]]  # n of k
    events: list[list[float]]  # n of E


class TeacherServer:
    """A vLLM server as a teacher; its methods raise an `InputError` where it refuses, else a `ServerError`.

    Args:
        url: its address, with `/v1` or without.

    Raises:
        InputError: nothing answers there, or it is no vLLM server.
    """

    def __init__(self, url: str) -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        self.address = urlsplit(url).netloc.rpartition("@")[2]  # without a password
        self._session = requests.Session()
        make_patient(self._session)
        if key := os.environ.get(KEY):
            self._session.headers["Authorization"] = f"Bearer {key}"
        try:
            (self.model, self.context), *_ = (
                (str(model["id"]), int(model["max_model_len"])) for model in self._ask("GET", "v1/models")["data"]
            )
        except ServerError as error:
            raise InputError(f"--teacher_url: {error}; start one with: {start_command('TEACHER', None)}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"--teacher_url: {self.address} is no vLLM server: it does not list its models") from error

    def _ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._session.request(method, f"{self._root}/{route}", json=body)
        except requests.RequestException as error:
            raise ServerError(
                f"the teacher's server at {self.address} does not answer ({type(error).__name__})"
            ) from error
        if response.status_code in (401, 403):
            raise InputError(f"the teacher's server at {self.address} refuses the key; export {KEY}")
        if response.status_code != 200:
            said = f"answers {response.status_code} to /{route}: {response.text[:300]}"
            raise (InputError if response.status_code < 500 else ServerError)(
                f"the teacher's server at {self.address} {said}"
            )
        return response.json()

    def tokens_of(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._ask("POST", "tokenize", body)["tokens"]]

    def sample(self, prompts: Sequence[str], numbers: Sequence[int], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, whose seed goes by its number."""

        def complete(prompt: str, number: int) -> Completion:
            body = _NEUTRAL | {"model": self.model, "prompt": prompt, "seed": derive_seed(sampling.seed, number)}
            body |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "min_tokens")}
            answer = self._ask("POST", "v1/completions", body | {"stop": list(sampling.stop)})
            (choice,), tokens = answer["choices"], int(answer["usage"]["completion_tokens"])
            advance(tokens, finished=1)
            return Completion(choice["text"], tokens, choice["finish_reason"] == "stop")

        if not prompts:
            return []
        with ThreadPoolExecutor(min(len(prompts), MOST_REQUESTS)) as pool:
            return list(pool.map(complete, prompts, numbers))

    def tell(self, asked: Asked, top_k: int | None, vocabulary: int) -> Told:
        """What it says of a completion's tokens.

        Args:
            top_k: k, the number of the most probable tokens; None for none.
            vocabulary: V of the policy; tokens beyond are among the others.
        """
        body = {"model": self.model, "prompt": list(asked.ids), "max_tokens": 1, "prompt_logprobs": top_k or 0}
        (choice,) = self._ask("POST", "v1/completions", body)["choices"]
        told = Told([], [], [], [])
        for token, of_token in zip(asked.ids[asked.begin :], choice["prompt_logprobs"][asked.begin :], strict=True):
            own = of_token[str(token)]
            if own["logprob"] > 0:
                raise InputError(
                    f"the teacher's server at {self.address} tells logits: start it without --logprobs-mode"
                )
            told.logp.append(own["logprob"])
            told.agrees.append(own["rank"] == 1)
            if top_k is not None:
                self._add_events(told, of_token, top_k, vocabulary)
        return told

    def _add_events(self, told: Told, of_token: Mapping[str, Any], k: int, vocabulary: int) -> None:
        known = ((int(token), value["logprob"]) for token, value in of_token.items() if int(token) < vocabulary)
        most = sorted(known, key=lambda pair: -pair[1])[:k]
        if len(most) < k:
            raise ServerError(
                f"the teacher's server at {self.address} has tokens beyond the policy's {vocabulary} among its "
                f"{k} most probable ones; use a lower --teacher_top_k"
            )
        told.ids.append([token for token, _ in most])
        logp = [value for _, value in most]
        if k < vocabulary:
            logp.append(math.log(max(1 - math.fsum(map(math.exp, logp)), _ROUNDING)))
        told.events.append(logp)


class ServedTeacher:
    """A teacher behind a server, of which each rank asks its own rows: those that it teaches, and equal ones once.

    Args:
        top_k: the number of the most probable tokens to tell; None for none.
        vocabulary: V of the policy.
    """

    def __init__(self, url: str, top_k: int | None, vocabulary: int) -> None:
        self.server, self.vocabulary = TeacherServer(url), vocabulary
        self.top_k = None if top_k is None else min(top_k, vocabulary)

    def score(self, batches: Sequence[MicroBatch], weights: Sequence[Tensor]) -> list[Scores]:
        """Its values of the completions' tokens; 0 where nothing is asked.

        Args:
            weights: for each micro-batch, (B, 1) of the teacher in a row.
        """
        asked = [_asked(batch.rows, weight) for batch, weight in zip(batches, weights, strict=True)]
        new = list(dict.fromkeys(row for of_batch in asked for row in of_batch if row is not None))
        if not new:
            return [self._scores(batch.rows, of_batch, {}) for batch, of_batch in zip(batches, asked, strict=True)]
        with ThreadPoolExecutor(min(len(new), MOST_REQUESTS)) as pool:
            tell = functools.partial(self.server.tell, top_k=self.top_k, vocabulary=self.vocabulary)
            told = dict(zip(new, pool.map(tell, new), strict=True))
        return [self._scores(batch.rows, of_batch, told) for batch, of_batch in zip(batches, asked, strict=True)]

    def _scores(self, rows: Rows, asked: Sequence[Asked | None], told: Mapping[Asked, Told]) -> Scores:
        ids = rows.completion_ids
        k = self.top_k or 0
        logp, agrees = torch.zeros(ids.shape), torch.zeros(ids.shape)
        # Different tokens where nothing is asked, since the policy's events are of these.
        chosen = torch.arange(k).expand(*ids.shape, k).clone()
        events = torch.zeros(*ids.shape, k + (k < self.vocabulary))
        for number, row in enumerate(asked):
            if row is None:
                continue
            of_row, n = told[row], len(row.ids) - row.begin
            logp[number, :n], agrees[number, :n] = torch.tensor(of_row.logp), torch.tensor(of_row.agrees).float()
            if self.top_k is not None:
                chosen[number, :n], events[number, :n] = torch.tensor(of_row.ids), torch.tensor(of_row.events)
        known = (logp, agrees) if self.top_k is None else (logp, agrees, chosen, events)
        return Scores(*(values.to(ids.device) for values in known))


def _asked(rows: Rows, weight: Tensor) -> list[Asked | None]:
    """For each row what to ask; None where no token is trained on, or the teacher has no weight."""
    taught = rows.trained & (weight != 0)
    found: list[Asked | None] = []
    for number in range(len(rows)):
        places = taught[number].nonzero()
        if not len(places):
            found.append(None)
            continue
        prompt = rows.prompt_ids[number][rows.prompt_mask[number].bool()].tolist()
        completion = rows.completion_ids[number, : int(places[-1]) + 1].tolist()
        found.append(Asked((*prompt, *completion), len(prompt)))
    return found


def start_command(model: str, top_k: int | None) -> str:
    """The command that starts a teacher's server."""
    return f"vllm serve {model}" + (f" --max-logprobs {top_k}" if top_k is not None else "")
