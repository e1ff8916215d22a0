"""Models that see: the loss is computed with the images that the rollout was sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen3Config,
)
from trl import GRPOConfig, GRPOTrainer

from tests.support.tiny import WORDS, tiny_model, tiny_tokenizer, train, weight_difference
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer


class Seeing:
    """A Llava of 8x8 images made here: its model, its processor and problems whose images differ."""

    WORDS = (*WORDS, "<image>")

    @staticmethod
    def model() -> LlavaForConditionalGeneration:
        torch.manual_seed(0)
        text = Qwen3Config(**{**tiny_model().config.to_dict(), "vocab_size": len(Seeing.WORDS) + 1})
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision = CLIPVisionConfig(**size, image_size=8, patch_size=4)
        image = Seeing.WORDS.index("<image>")
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image, pad_token_id=0)
        return LlavaForConditionalGeneration(config)

    @staticmethod
    def processor() -> LlavaProcessor:
        content = "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }}{% endif %}"
        tokenizer = tiny_tokenizer(Seeing.WORDS)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        return LlavaProcessor(
            image_processor=CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
            tokenizer=tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template="{% for m in messages %}{% for c in m['content'] %}" + content + "{% endfor %}{% endfor %}",
        )

    @staticmethod
    def problems() -> Dataset:
        images = [Image.new("RGB", (8, 8), (30 * i, 255 - 30 * i, 128)) for i in range(8)]
        return Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"{i} + b ="}], "image": image} for i, image in enumerate(images)]
        )


@pytest.mark.slow
def test_a_model_that_sees_trains_with_its_images_as_in_trl(tmp_path: Path) -> None:
    def length(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(c[0]["content"])) for c in completions]

    given = {"max_steps": 2, "train_dataset": Seeing.problems(), "processing_class": Seeing.processor()}
    given["generation_kwargs"] = {"suppress_tokens": [Seeing.WORDS.index("<image>")]}
    trls = train(GRPOTrainer, GRPOConfig, tmp_path, length, **given, loss_type="grpo", model=Seeing.model())
    axes = {"preset": "grpo_clip", "advantage_options": {"eps": 1e-4}}
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, length, **given, **axes, model=Seeing.model())
    assert weight_difference(trls.model, Seeing.model()) > 1e-3
    assert weight_difference(trls.model, ours.model) < 1e-6  # float32, SGD: other orders of summation
    projectors = (model.model.multi_modal_projector for model in (ours.model, Seeing.model()))
    assert weight_difference(*projectors) > 1e-5  # nothing but an image reaches it
