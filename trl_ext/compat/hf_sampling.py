"""What HF `generate` knows of the tokens that it draws, where TRL calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList


def generating_with(
    model: nn.Module, processor: LogitsProcessor, at_end: Callable[[Tensor], None]
) -> AbstractContextManager[object]:
    """In the block `generate` has one more logits processor, which misses the last token; `at_end` gets all of them."""
    generate: Any = model.generate

    def generate_with(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, logits_processor=LogitsProcessorList([processor]), **kwargs)
        at_end(output)
        return output

    return patch.object(model, "generate", generate_with)
