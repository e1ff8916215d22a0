"""What a vLLM engine decodes, step by step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


def steps_counted(llm: LLM, count: Callable[[int, int], None]) -> AbstractContextManager[object]:
    """In the block `count(tokens, finished)` is called after each step, which decodes one token of each sequence."""
    engine = llm.llm_engine
    step, most = engine.step, engine.vllm_config.scheduler_config.max_num_seqs

    def counted() -> list[RequestOutput]:
        before = engine.get_num_unfinished_requests()
        outputs = step()
        count(min(before, most), before - engine.get_num_unfinished_requests())
        return outputs

    return patch.object(engine, "step", counted)
