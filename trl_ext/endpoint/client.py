"""Asks a language model behind any OpenAI-compatible endpoint, with retries, within a budget. The key stays secret."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trl_ext.endpoint.budget import Budget, BudgetSpent

if TYPE_CHECKING:
    from openai import APIStatusError
    from openai.types.chat import ChatCompletion

Message = Mapping[str, str]
_LONGEST_WAIT = 60.0
_CHARACTERS_PER_TOKEN = 3  # an estimate, where a server reports no counts
_TOKENS_PER_MESSAGE = 16  # more than a chat template adds to a message


class EndpointError(RuntimeError):
    """No request to this endpoint will ever succeed; the message says what to change."""


class RequestFailed(RuntimeError):
    """This request got no answer, however often it was tried; another may.

    Attributes:
        tokens: what its tries may have cost.
        is_refused: the endpoint wants another request, such as a shorter one, or one without a field.
    """

    def __init__(self, reason: str, tokens: int = 0, tries: int = 0, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.tokens, self.tries, self.is_refused = tokens, tries, is_refused


@dataclass(frozen=True)
class Endpoint:
    """The endpoint, and the settings of its requests.

    Attributes:
        key: sent as a bearer token; never shown.
        max_tokens: limit on an answer's tokens.
        timeout: seconds for one try.
        tries: number of tries before a request fails.
        first_wait: seconds before the second try; doubles with each try.
        extra_body: further fields of the request, such as `chat_template_kwargs` of vLLM.
        key_advice: what to do if the key is refused.
    """

    base_url: str
    model: str
    key: str = field(default="", repr=False)
    max_tokens: int = 16384
    temperature: float = 1.0
    timeout: float = 600.0
    tries: int = 5
    first_wait: float = 1.0
    extra_body: Mapping[str, object] = field(default_factory=dict)
    key_advice: str = "set OPENAI_API_KEY or name --api_key_env"

    @property
    def shown_url(self) -> str:
        """The address without user and password, for logs."""
        parts = urlsplit(self.base_url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


@dataclass(frozen=True)
class Reply:
    """An answer and its cost.

    Attributes:
        is_estimated: whether the token counts are estimates because the server reported none.
        reasoning: the model's reasoning, where the server separates it from the answer.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tries: int = 1
    seconds: float = 0.0
    is_estimated: bool = False
    reasoning: str = ""


class Client:
    """One endpoint. Thread-safe. Once `stopped` is set, requests are not tried again."""

    def __init__(self, endpoint: Endpoint, budget: Budget) -> None:
        from openai import OpenAI

        self.endpoint, self.budget, self.stopped = endpoint, budget, threading.Event()
        self._openai = OpenAI(base_url=endpoint.base_url, api_key=endpoint.key or "none", max_retries=0)

    def redact(self, text: str) -> str:
        """The text without the key, and without lone surrogates, which neither a file nor a request can hold."""
        text = text.encode(errors="replace").decode()
        return text.replace(self.endpoint.key, "[key]") if self.endpoint.key else text

    def most_tokens(self, messages: Sequence[Message]) -> int:
        """An upper bound on the tokens of a request and its answer, for the budget."""
        prompt = sum(len(m["content"].encode(errors="replace")) + _TOKENS_PER_MESSAGE for m in messages)
        return prompt + self.endpoint.max_tokens  # no tokenizer makes more tokens of a text than it has bytes

    def models(self) -> list[str]:
        """The names of the models that the endpoint serves.

        Raises:
            EndpointError: it does not say.
        """
        from openai import OpenAIError

        try:
            return [model.id for model in self._openai.models.list(timeout=30)]
        except (OpenAIError, ValueError) as error:
            raise EndpointError(f"{self.endpoint.shown_url} does not list its models: {self._said(error)}") from None

    def ask(self, messages: Sequence[Message], **fields: object) -> Reply:
        """The model's answer. The caller has taken the first try from the budget; retries are taken here.

        Args:
            fields: of this request, in addition to the endpoint's `extra_body`.

        Raises:
            RequestFailed: there was no answer, or the request was refused.
            EndpointError: the key, the model or the address is wrong.
        """
        began, most, spent = time.monotonic(), self.most_tokens(messages), 0
        for number in range(1, self.endpoint.tries + 1):
            used = 0
            try:
                reply = self._try(messages, fields)
                used = reply.prompt_tokens + reply.completion_tokens
                prompt = reply.prompt_tokens + spent
                return replace(reply, prompt_tokens=prompt, tries=number, seconds=round(time.monotonic() - began, 3))
            except _Retryable as error:
                reason, wait = str(error), error.seconds(self.endpoint.first_wait, number)
                used = _estimated(messages) if error.may_have_cost else 0
                spent += used
            finally:
                self.budget.settle(most, used)
            if number == self.endpoint.tries or self.stopped.wait(min(wait, max(0.0, self.budget.seconds_left()))):
                break
            try:
                self.budget.take(most)
            except BudgetSpent as error:
                raise RequestFailed(f"{reason}; not tried again: {error}", spent, number) from None
        raise RequestFailed(f"no answer after {number} tries: {reason}", spent, number)

    def _try(self, messages: Sequence[Message], fields: Mapping[str, object]) -> Reply:
        import openai

        endpoint = self.endpoint
        try:
            completion = self._openai.chat.completions.create(
                model=endpoint.model,
                messages=list(messages),
                max_tokens=endpoint.max_tokens,
                temperature=endpoint.temperature,
                timeout=max(1.0, min(endpoint.timeout, self.budget.seconds_left())),
                extra_body={**endpoint.extra_body, **fields} or None,
            )
        except openai.APITimeoutError:
            raise _Retryable(f"no answer within {endpoint.timeout:g} s", may_have_cost=True) from None
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except UnicodeEncodeError as error:
            raise RequestFailed(f"the request cannot be sent: {self._said(error)}") from None
        except (openai.OpenAIError, ValueError) as error:  # no connection, or an answer that is not JSON
            has_sent = type(error.__cause__).__name__ != "ConnectError"  # of httpx or httpx2, by openai's version
            raise _Retryable(self._said(error), may_have_cost=has_sent) from None
        return _reply_of(completion, messages)

    def _refused(self, error: APIStatusError) -> Exception:
        """The exception to raise for an HTTP status."""
        status, said = error.status_code, self._said(error)
        if status in (401, 403):
            return EndpointError(f"the endpoint refuses the key ({said}); {self.endpoint.key_advice}")
        if status == 404:
            return EndpointError(f"no model {self.endpoint.model!r} at {self.endpoint.shown_url} ({said})")
        if status in (408, 409, 425, 429) or status >= 500:
            return _Retryable(said, error.response.headers.get("retry-after"))
        return RequestFailed(
            f"the endpoint refused the request: {said}", is_refused=True
        )  # such as one longer than the model's context

    def _said(self, error: Exception) -> str:
        cause = f" ({error.__cause__} at {self.endpoint.shown_url})" if error.__cause__ else ""
        return self.redact(f"{type(error).__name__}: {error}{cause}")[:500]


class _Retryable(Exception):
    """A try that failed and may succeed later. `may_have_cost`: the server may have worked on it."""

    def __init__(self, reason: str, retry_after: str | None = None, may_have_cost: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.may_have_cost = retry_after, may_have_cost

    def seconds(self, first: float, number: int) -> float:
        """How long to wait: the server's Retry-After, otherwise exponential backoff with jitter."""
        try:
            return min(_LONGEST_WAIT, max(0.0, float(self.retry_after or "")))
        except ValueError:
            return min(_LONGEST_WAIT, first * 2 ** (number - 1)) * random.uniform(0.75, 1.25)


def _estimated(messages: Sequence[Message]) -> int:
    """An estimate of the prompt's tokens."""
    return sum(len(m["content"]) for m in messages) // _CHARACTERS_PER_TOKEN


def _reply_of(completion: ChatCompletion, messages: Sequence[Message]) -> Reply:
    """The reply in the server's answer; servers differ in the fields they send."""
    try:
        choice = completion.choices[0]
        message, finish = choice.message, str(choice.finish_reason)
        text = message.content or ""
        if not isinstance(text, str):
            raise TypeError("its content is no text")
        reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
    except (AttributeError, IndexError, TypeError) as error:
        raise _Retryable(f"the server's answer has no message ({error})", may_have_cost=True) from None
    try:
        prompt, answer = (int(getattr(completion.usage, name)) for name in ("prompt_tokens", "completion_tokens"))
        is_estimated = False
    except (AttributeError, TypeError, ValueError):
        prompt, answer, is_estimated = _estimated(messages), len(text) // _CHARACTERS_PER_TOKEN, True
    return Reply(text, finish, prompt, answer, is_estimated=is_estimated, reasoning=str(reasoning))
