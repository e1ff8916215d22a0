"""Conversations: prompts as messages with roles, of which a model's own chat template makes the text that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from trl_ext.registry import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, str]  # `role` and `content`
Conversation: TypeAlias = list[Message]
ROLES = ("system", "user", "assistant")
_ASKING = ("system", "user")
_DAY = datetime(2025, 1, 1)  # to templates that ask for it, else a run's prompts would be others on the next day
_PROBE = "The answer is 4."  # what an assistant may say, to see what a template writes after it


def is_conversation(value: object) -> bool:
    """Whether a prompt is a list of messages and not a text."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def conversation(value: Any, ends_with: str = "user") -> Conversation:
    """Messages with a role and a text each, checked.

    Args:
        ends_with: the role of the last message: the user's, whose answer is sampled, or the assistant's.

    Raises:
        ValueError: there is no message, a role that is not known, content that is no text, or another at the end.
    """
    if not is_conversation(value) or not value:
        raise ValueError("not a list of messages, each with role and content")
    for number, message in enumerate(value):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"message {number}: {unknown('role', str(role), ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number}: content is {str(content)[:80]!r}, not a text")
    if value[-1]["role"] != ends_with:
        raise ValueError(f"the last message is the {value[-1]['role']}'s, and must be the {ends_with}'s")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def with_system(messages: Conversation, text: str | None) -> Conversation:
    """The conversation with this system message in place of its own; as it is without a text."""
    if text is None:
        return messages
    return [{"role": "system", "content": text}, *(m for m in messages if m["role"] != "system")]


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a model.

    Attributes:
        model: its name, for messages.
        options: further variables of the template, such as `enable_thinking`.
        tools: functions that the template describes to the model.
        instructions: what the last message of the user says in addition.
    """

    tokenizer: PreTrainedTokenizerBase
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Callable[..., Any]] = ()
    instructions: str = ""

    def text(self, messages: Conversation) -> str:
        """What the model reads before it answers, special tokens included.

        Raises:
            ValueError: the model has no chat template, or its template refuses the messages or leaves some of them out.
        """
        if self.instructions:
            last = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{self.instructions}"}
            messages = [*messages[:-1], last]
        text = self._rendered(messages, add_generation_prompt=True, tools=list(self.tools) or None)
        for message in messages:
            said = message["content"].strip()
            if message["role"] in _ASKING and said not in text:  # of an assistant many leave out the reasoning
                raise ValueError(
                    f"the chat template of {self.model!r} leaves out what the {message['role']} says, or changes it "
                    f"({said[:40]!r}): put a system message into the user's, mend the template, or choose a text "
                    "template, such as --prompt r1_zero"
                )
        return text

    def end_of_turn(self) -> str | None:
        """The special token that ends what the assistant says; None if the template writes none."""
        asked = [{"role": "user", "content": "2 + 2 ="}]
        told = self._rendered([*asked, {"role": "assistant", "content": _PROBE}])
        ids = self.tokenizer(text=told.rpartition(_PROBE)[2], add_special_tokens=False)["input_ids"]
        first = next((token for token in ids if token in self.tokenizer.added_tokens_decoder), None)
        return None if first is None else str(self.tokenizer.convert_ids_to_tokens(first))

    def _rendered(self, messages: Conversation, **how: Any) -> str:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"model {self.model!r} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), which a conversation needs: choose a text template, such as --prompt r1_zero, "
                "or a model that has one"
            )
        try:
            variables = {"strftime_now": _DAY.strftime, **self.options}
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **how, **variables))
        except Exception as error:  # a template is a program, of whoever made the model
            roles = ", ".join(message["role"] for message in messages)
            said = " ".join(str(error).split()).removesuffix(".")
            raise ValueError(
                f"the chat template of {self.model!r} refuses messages of the roles {roles}: {said}. Leave that role "
                "out (system: put its text into the user's message)"
            ) from error
