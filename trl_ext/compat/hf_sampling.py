"""What HF `generate` knows of the tokens that it draws, where TRL calls it, and of stop strings, where harnesses do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

if TYPE_CHECKING:
    from transformers import GenerationConfig


def generating_with(
    model: nn.Module, processor: LogitsProcessor, criterion: StoppingCriteria, at_end: Callable[[Tensor], None]
) -> AbstractContextManager[object]:
    """In the block `generate` has one more processor, which misses the last token, and one more stopping criterion.

    `at_end` gets all tokens.
    """
    generate: Any = model.generate
    more: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([processor]),
        "stopping_criteria": StoppingCriteriaList([criterion]),
    }

    def generate_with(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **more, **kwargs)
        at_end(output)
        return output

    return patch.object(model, "generate", generate_with)


def no_stop_strings_without_tokenizer() -> None:
    """From now on `generate` without a tokenizer leaves out the stop strings that a model was saved with.

    It would refuse them. Our models have them, and lm-eval and inspect, which stop by criteria of their own, pass none.
    """
    usual: Any = GenerationMixin._get_stopping_criteria
    if usual.__module__ == __name__:
        return

    @wraps(usual, assigned=())
    def criteria(self: Any, generation_config: GenerationConfig, stopping_criteria: Any, tokenizer: Any = None) -> Any:
        if tokenizer is None:
            generation_config.stop_strings = None
        return usual(self, generation_config, stopping_criteria, tokenizer)

    GenerationMixin._get_stopping_criteria = criteria
