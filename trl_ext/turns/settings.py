"""Settings of tools, of every recipe whose model may call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trl_ext.compat.given import given
from trl_ext.registry import unknown
from trl_ext.setting import Group, setting

PROTOCOLS = ("auto", "template", "fences")
STOP = "```output"  # a model that writes it waits for what its code says
_NOT_NEXT_TO = {
    "use_transformers_continuous_batching": "it samples whole responses, not single turns",
    "sampling_min_tokens": "every turn would have that minimum",
    "log_completions": "TRL's table has one text of a response, and log_generations_every all turns",
}


@dataclass
class ToolSettings:
    """Mixin for what samples from a policy."""

    tools: str | None = setting(
        None,
        (
            "Tools that the model may call, such as python,calculator. A file.py:function is one, too; only the "
            "model's own tokens are trained on."
        ),
        Group.SAMPLING,
    )
    max_turns: int = setting(
        4,
        "The most turns of the model in a response; a tool answers between two of them.",
        Group.SAMPLING,
        needs="tools",
        within="[2, inf)",
        rare=True,
    )
    tool_timeout: float = setting(
        5.0,
        "The time limit of a tool's call, in seconds.",
        Group.SAMPLING,
        needs="tools",
        within="(0, inf)",
        unit="seconds",
        rare=True,
    )
    tool_output_tokens: int = setting(
        256,
        "The most tokens of a tool's answer; the rest is cut.",
        Group.SAMPLING,
        needs="tools",
        within="[1, inf)",
        rare=True,
    )
    tool_protocol: str = setting(
        "auto",
        (
            "How calls are written: by the chat template, or in fences of three backticks, which need no template. "
            "auto takes the template of a conversation's model if it has tools."
        ),
        Group.SAMPLING,
        needs="tools",
        rare=True,
    )
    tool_state: bool = setting(
        False,
        "The tool python keeps what earlier calls of a response have defined, by executing them again.",
        Group.SAMPLING,
        needs="tools",
        rare=True,
    )


def check_tools(config: Any) -> None:
    """Refuse, by a `ValueError`, what tools cannot have next to them; `given` settings of TRL's and ours."""
    if config.tool_protocol not in PROTOCOLS:
        raise unknown("tool_protocol", str(config.tool_protocol), PROTOCOLS)
    if not config.tools:
        return
    if given(config, [name for name in ("max_tool_calling_iterations",) if hasattr(config, name)]):
        raise ValueError("max_tool_calling_iterations is TRL's for tools, and tools has max_turns, one more: set that")
    for name, why in _NOT_NEXT_TO.items():
        if getattr(config, name, None):
            raise ValueError(f"tools with {name}: {why}; leave one of them out")
    resolve_protocol(config)


def resolve_protocol(config: Any, by_template: bool | None = None) -> None:
    """Settle `tool_protocol`, and stop at what calls a tool in fences.

    Args:
        by_template: whether prompts are written by a template that has tools; None if that is not known yet.
    """
    if config.tool_protocol == "auto" and by_template is not None:
        config.tool_protocol = "template" if by_template else "fences"
    if config.tool_protocol == "fences":
        config.stop = list(dict.fromkeys([*(config.stop or []), STOP]))
