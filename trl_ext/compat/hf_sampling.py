"""What HF `generate` knows of the tokens that it draws, where TRL calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList


@contextlib.contextmanager
def generating_with(model: nn.Module, processor: LogitsProcessor, at_end: Callable[[Tensor], None]) -> Iterator[None]:
    """In the block, the model's `generate` has one more logits processor.

    Args:
        at_end: called with all tokens; no processor sees the last one.
    """
    generate: Any = model.generate

    def generate_with(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, logits_processor=LogitsProcessorList([processor]), **kwargs)
        at_end(output)
        return output

    with patch.object(model, "generate", generate_with):
        yield
