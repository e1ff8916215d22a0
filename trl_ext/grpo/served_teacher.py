"""`ServedTeacher`: a teacher behind a vLLM server with OpenAI's API, asked for the probabilities of given tokens.

Letters: B rows of a micro-batch, T completion tokens, k tokens, E events, V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor

from trl_ext.algorithms.distillation import Scores
from trl_ext.errors import InputError, ServerError
from trl_ext.generation.completion import Completion, Sampling, derive_seed
from trl_ext.generation.policy import VLLM_SEES_SPECIAL_TOKENS
from trl_ext.generation.progress import advance
from trl_ext.generation.samplers import sampled_text
from trl_ext.generation.sampling import OF_SERVERS
from trl_ext.generation.server import MOST_REQUESTS, make_patient
from trl_ext.generation.tokens import prompt_ids
from trl_ext.step import MicroBatch, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "VLLM_API_KEY"  # of the environment, as for the server itself
_AT_ONCE = 32  # requests: an answer of 64 tokens at each of 1,000 places takes 20 MB
# As the policy samples, whatever the model or its server has as a default.
_NEUTRAL: dict[str, Any] = {
    "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "include_stop_str_in_output": True, "return_token_ids": True,
    **OF_SERVERS, **VLLM_SEES_SPECIAL_TOKENS,
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
    """A vLLM server as a teacher; its methods raise a `ServerError` where it does not answer as one.

    Args:
        url: its address, with `/v1` or without, and with `#NAME` for one of several models.

    Raises:
        InputError: nothing answers there, it is no vLLM server, or it serves several models or none of that name.
    """

    def __init__(self, url: str) -> None:
        address, _, wanted = url.partition("#")
        self._root = address.rstrip("/").removesuffix("/v1")
        self.address = urlsplit(address).netloc.rpartition("@")[2]  # without a password
        self._session = requests.Session()
        make_patient(self._session)
        if key := os.environ.get(KEY):
            self._session.headers["Authorization"] = f"Bearer {key}"
        try:
            listed = {str(model["id"]): model for model in self._ask("GET", "v1/models")["data"]}
            self.model = wanted or next(iter(listed))
            # An adapter has its base's context.
            self.context = min(int(model["max_model_len"]) for model in listed.values() if model.get("max_model_len"))
        except ServerError as error:
            raise InputError(f"--teacher_url: {error}; start one with: {start_command('TEACHER')}") from error
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise InputError(f"--teacher_url: {self.address} is no vLLM server: it does not list its models") from error
        if self.model not in listed or (not wanted and len(listed) > 1):
            raise InputError(
                f"--teacher_url: {self.address} serves {', '.join(listed)}; name one, such as #{next(iter(listed))}"
            )

    def _ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        who = f"the teacher's server at {self.address}"
        try:
            response = self._session.request(method, f"{self._root}/{route}", json=body)
            answer = response.json() if response.status_code == 200 else None
        except requests.RequestException as error:  # an answer that is no JSON, too
            raise ServerError(f"{who} does not answer ({type(error).__name__})") from error
        if response.status_code in (401, 403):
            raise ServerError(f"{who} refuses the key; export {KEY}")
        if answer is None:
            raise ServerError(f"{who} answers {response.status_code} to /{route}: {response.text[:300]}")
        return answer

    def tokens_of(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._ask("POST", "tokenize", body)["tokens"]]

    def sample(
        self,
        prompts: Sequence[str],
        numbers: Sequence[int],
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[Completion]:
        """One completion per prompt, whose seed goes by its number; texts are made of tokens as those of the policy."""
        fields = ("temperature", "top_p", "max_tokens", "min_tokens")
        settings = _NEUTRAL | {"model": self.model, "stop": list(sampling.stop)}
        settings |= {name: getattr(sampling, name) for name in fields}

        def complete(ids: list[int], number: int) -> Completion:
            own = {"prompt": ids, "seed": derive_seed(sampling.seed, number)}
            (choice,) = self._ask("POST", "v1/completions", settings | own)["choices"]
            found = SimpleNamespace(**choice)
            text = sampled_text(found, tokenizer, includes_end=True)
            return Completion(text, len(found.token_ids), found.finish_reason == "stop")

        completions = []
        with ThreadPoolExecutor(MOST_REQUESTS) as pool:
            for completion in pool.map(complete, prompt_ids(tokenizer, prompts), numbers):
                advance(completion.tokens, finished=1)
                completions.append(completion)
        return completions

    def tell(self, asked: Asked, top_k: int | None, vocabulary: int) -> Told:
        """What it says of a completion's tokens.

        Args:
            top_k: k, the number of the most probable tokens; None for none.
            vocabulary: V of the policy; tokens beyond are among the others.
        """
        body = {"model": self.model, "prompt": list(asked.ids), "max_tokens": 1, "prompt_logprobs": top_k or 1}
        (choice,) = self._ask("POST", "v1/completions", body)["choices"]
        if not choice.get("prompt_logprobs"):
            raise ServerError(f"the teacher's server at {self.address} tells no prompt_logprobs: it is no vLLM server")
        told = Told([], [], [], [])
        for token, of_token in zip(asked.ids[asked.begin :], choice["prompt_logprobs"][asked.begin :], strict=True):
            own, highest = of_token[str(token)]["logprob"], max(value["logprob"] for value in of_token.values())
            if highest > 0:
                raise ServerError(
                    f"the teacher's server at {self.address} tells logits: start it without --logprobs-mode"
                )
            told.logp.append(own)
            told.agrees.append(own == highest)
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
        with ThreadPoolExecutor(_AT_ONCE) as pool:
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


def start_command(model: str, top_k: int | None = None) -> str:
    """The command that starts a teacher's server."""
    return f"vllm serve {model}" + (f" --max-logprobs {top_k}" if top_k is not None else "")
