"""Published shapes have the published numbers of parameters, and an unknown model is refused with what to give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trl_ext.errors import InputError
from trl_ext.tools.estimate.networks import network_of, prompt_lengths, published

# As the weights on the Hub have them; those of Qwen3-0.6B without the second copy of the tied embedding.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_its_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(network_of(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_every_published_shape_is_tested_and_has_a_source() -> None:
    assert set(published()["models"]) == set(PARAMETERS)
    assert all(model["source"] for model in published()["models"].values())


def test_a_folders_own_configuration_comes_first(tmp_path: Path) -> None:
    Qwen3Config(hidden_size=64, num_hidden_layers=3).save_pretrained(tmp_path)
    assert network_of(str(tmp_path)).num_hidden_layers == 3


def test_an_unknown_model_is_refused_with_what_to_give() -> None:
    with pytest.raises(InputError, match=r"no-such/model.*hf download no-such/model config.json"):
        network_of("no-such/model")


def test_prompts_are_as_long_as_their_dataset_has_them() -> None:
    assert prompt_lengths("DigitalLearningGmbH/MATH-lighteval")[1] == 1750
    assert prompt_lengths("of_my_own.jsonl") == (200.0, 400)
