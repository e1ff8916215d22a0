"""Rows whose prompts are conversations -> rows whose prompts are the texts that a model's chat template makes of them.

Everything after this knows texts only: rollouts, validations, traces, logs, exports and the browser show what the model
reads. A tokenizer parses the special tokens in such a text, and BOS once, see `trl_ext.generation.tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_ext.generation.adapter_models import generation_config_of
from trl_ext.generation.conversation import ChatTemplate
from trl_ext.generation.hf import eos_ids_of
from trl_ext.registry import parse_options

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from trl_ext.generation.model_source import ModelSource

TOOLS = "{tools}"  # in a text template
_SHOWN = 80  # characters of a prompt's end in a message


@dataclass(frozen=True)
class Chat:
    """How a model is talked to.

    Attributes:
        end: the special token that ends a turn of the assistant; None if its template writes none.
        more_stops: `end`, where neither the tokenizer nor the model's generation config says that it ends a response.
    """

    template: ChatTemplate
    end: str | None
    more_stops: tuple[str, ...]

    @classmethod
    def with_model(
        cls,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | str | None,
        tools: ShownTools | None = None,
    ) -> Chat:
        """The chat of a model; a `ValueError` if it has no chat template, or one that cannot be used."""
        variables, shown = parse_options("chat_template_kwargs", options) or {}, tools or ShownTools()
        template = ChatTemplate(tokenizer, source.name, variables, shown.functions, shown.instructions)
        end = template.end_of_turn()
        known = eos_ids_of(generation_config_of(source), tokenizer.eos_token_id)
        is_known = end is None or tokenizer.convert_tokens_to_ids(end) in known
        return cls(template, end, () if is_known else (str(end),))

    def texts(self, rows: Any) -> Any:
        """A dataset's rows, or a list of rows, with texts as prompts; those that are texts already stay."""
        prompts = [self._text(row["prompt"]) for row in rows]
        if isinstance(rows, list):
            return [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
        return rows.remove_columns("prompt").add_column("prompt", prompts)

    def line(self, rows: Dataset | Sequence[Mapping[str, Any]]) -> str:
        """What a person wants to know: how a prompt ends, and what ends a response."""
        shown = f"the first ends with {rows[0]['prompt'][-_SHOWN:]!r}; " if len(rows) else ""
        return f"prompts by the chat template of {self.template.model}: {shown}{self.end!r} ends a turn"

    def _text(self, prompt: Any) -> str:
        return prompt if isinstance(prompt, str) else self.template.text(prompt)


@dataclass(frozen=True)
class ShownTools:
    """How a prompt says which tools there are: by functions, of which a chat template writes that, or by a text."""

    functions: Sequence[Callable[..., Any]] = ()
    instructions: str = ""

    @classmethod
    def of(cls, config: Any, tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> ShownTools:
        """Of a config with tools, whose `tool_protocol` and `stop` are settled here.

        Raises:
            ValueError: a tool is refused, or a template that has no tools was asked for.
        """
        from trl_ext.turns.protocols import Fences, supports_template
        from trl_ext.turns.settings import resolve_protocol
        from trl_ext.turns.tools import functions_of

        has_tools = is_chat and supports_template(tokenizer)
        if config.tool_protocol == "template" and not has_tools:
            what = "its chat template writes no tools" if is_chat else "its prompts are texts, which have none"
            raise ValueError(f"tool_protocol template: {what}: choose --tool_protocol fences")
        resolve_protocol(config, has_tools)
        functions = functions_of(config.tools)
        if config.tool_protocol == "template":
            return cls(functions)
        return cls((), Fences(tokenizer, functions).instructions(functions))

    def in_texts(self, rows: Any) -> Any:
        """Rows of a dataset, or a list of them, with the instructions where a prompt's template says `{tools}`."""
        prompts = [row["prompt"].replace(TOOLS, self.instructions) for row in rows]
        if isinstance(rows, list):
            return [{**row, "prompt": prompt} for row, prompt in zip(rows, prompts, strict=True)]
        return rows.remove_columns("prompt").add_column("prompt", prompts)


def refuse_unused_options(options: object, prompt: str) -> None:
    """Raise a ValueError for options of a chat template where prompts are texts."""
    if options:
        raise ValueError(
            f"chat_template_kwargs is for conversations, and prompt {prompt!r} is a text: choose --prompt chat or a "
            "file of messages, or leave it out"
        )


def needs_a_model(prompt: str) -> ValueError:
    """The error of a conversation with the base policy that is made here."""
    return ValueError(
        f"prompt {prompt!r} is put into a chat template, and the base policy that is made here has none: give "
        "--model_name_or_path, or choose --prompt r1_zero"
    )


def doubled_begin(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]]) -> str:
    """What to say where a text template writes the BOS token that the tokenizer adds as well; else an empty text."""
    bos = tokenizer.bos_token
    if not bos or not len(rows) or not rows[0]["prompt"].startswith(bos):
        return ""
    adds = tokenizer(text="a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return f"the prompt begins with {bos!r}, which the tokenizer adds too: the model reads it once" if adds else ""
