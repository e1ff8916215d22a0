r"""Padded micro-batches against one row without padding: how much padding there is, and what each layout takes.

    python -m scripts.benchmarks.varlen --json docs/results/varlen.json

First the padding in the micro-batches of a step as `Batching` plans them, without a model: it bounds what any layout
without padding can gain. Then forward and backward passes over the same micro-batches, in alternation: padded at the
end of each row (what a step does), and packed into one row, in which attention keeps the completions apart by a mask
(what transformers does with sdpa), by a call for each (registered here as an attention function), by one for all (what
shared prompts have; on a GPU FlashAttention's kernel for rows of any lengths), by nested tensors, or by FlexAttention.
On a GPU in bfloat16, and the time is the clock's.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_ext.runs.provenance import provenance
from trl_ext.step import Batching, MicroBatch, Rows, attention

from .random_model import SHAPES, save_random_model
from .step import Workload

WORKLOADS = {
    "the page's: 64 rollouts, mean 95": Workload(),
    "256 rollouts, mean 400, up to 1024": Workload(256, 8, 100, 400, 1024),
    "64 rollouts, mean 1500, up to 4096": Workload(64, 8, 100, 1500, 4096),
    "16 rollouts, mean 1500, up to 4096": Workload(16, 8, 100, 1500, 4096),
}


def step_of(work: Workload, vocabulary: int, ragged: bool = True) -> Rows:
    """The rows of a step, as TRL pads them; prompts of half to one and a half times the workload's length."""
    random = np.random.default_rng(4)
    lengths = torch.tensor(work.lengths())
    sizes = random.integers(work.prompt // 2, work.prompt * 3 // 2, work.rollouts // work.group)
    prompts = torch.tensor(np.repeat(sizes if ragged else sizes * 0 + work.prompt, work.group))
    width, longest = int(prompts.max()), int(lengths.max())
    rewards = torch.tensor(work.rewards()).view(-1, work.group)
    trained = torch.arange(longest) < lengths[:, None]
    return Rows(
        prompt_ids=torch.randint(3, vocabulary, (work.rollouts, width)),
        prompt_mask=(torch.arange(width) >= width - prompts[:, None]).long(),
        completion_ids=torch.randint(3, vocabulary, (work.rollouts, longest)),
        completion_mask=trained.long(),
        trained=trained,
        advantages=(rewards - rewards.mean(dim=1, keepdim=True)).view(-1, 1),
    )


def padding(plan: list[MicroBatch]) -> float:
    """The fraction of the tokens in contiguous rows that is padding."""
    lengths = [one.rows.prompt_mask.sum(dim=1) + one.rows.completion_mask.sum(dim=1) for one in plan]
    return 1 - sum(int(row.sum()) for row in lengths) / sum(len(row) * int(row.max()) for row in lengths)


def packed(rows: Rows) -> dict[str, Any]:
    """Arguments of the model for all rows of a micro-batch in one, and where each begins."""
    ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)
    real = torch.cat([rows.prompt_mask, rows.completion_mask], dim=1) > 0
    scored = torch.cat([torch.zeros_like(rows.prompt_mask), rows.trained.long()], dim=1) > 0
    lengths = real.sum(dim=1)
    labels = torch.roll(ids.masked_fill(~scored, -100)[real], -1)[None]
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None].to(ids.device)
    return {"input_ids": ids[real][None], "position_ids": positions, "shift_labels": labels, "lengths": lengths}


def per_segment(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """A call of the causal kernel for each completion."""
    query, key, value = attention.in_autocast_dtype(query, key, value)
    segments = zip(*(x.split(kwargs["lengths"].tolist(), dim=2) for x in (query, key, value)), strict=True)
    outputs = [scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True) for one in segments]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def at_once(module: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """As completions attend to shared prompts."""
    sizes = kwargs["lengths"].tolist()
    lengths = attention.Lengths(sizes, sizes, query.device)
    return attention.by_row(module, query, attention.keys_with(lengths, key), value, None)


def nested(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Nested tensors in the jagged layout."""
    query, key, value = attention.in_autocast_dtype(query, key, value)
    repeats = query.shape[1] // key.shape[1]
    lengths = kwargs["lengths"].to(query.device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    parts = [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)]
    jagged = [
        torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1).contiguous(), offsets).transpose(1, 2)
        for x in parts
    ]
    return scaled_dot_product_attention(*jagged, is_causal=True).transpose(1, 2).values()[None], None


def flex(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """FlexAttention with a mask function of documents."""
    query, key, value = attention.in_autocast_dtype(query, key, value)
    mask = block_mask(tuple(kwargs["lengths"].tolist()), query.device)
    output = torch.compile(flex_attention, dynamic=True)(query, key, value, block_mask=mask, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


@functools.lru_cache(maxsize=1)
def block_mask(lengths: tuple[int, ...], device: torch.device) -> BlockMask:
    """Of a micro-batch, for all of its layers."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    n = len(document)
    return create_block_mask(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None, None, n, n, device)


LAYOUTS: dict[str, Callable[..., Any] | None] = {
    "padded at the end": None,
    "packed, masked": None,
    "packed, a call for each": per_segment,
    "packed, all rows at once": at_once,
    "packed, nested tensors": nested,
    "packed, FlexAttention": flex,
}


def loss_of(model: Any, name: str, batch: MicroBatch) -> Tensor:
    """The sum of advantage times log-probability over the trained tokens."""
    rows = batch.rows
    if name == "padded at the end":
        logp, _ = batch.log_probs(model, model)
        return (logp * rows.advantages * rows.trained).sum()
    given = packed(rows)
    weight = torch.repeat_interleave(rows.advantages[:, 0], given["lengths"])
    lengths = {} if LAYOUTS[name] is None else {"lengths": given["lengths"]}
    del given["lengths"]
    return (model(**given, **lengths, attention_mask=None, fused_lm_head=True).log_probs[0] * weight).sum()


def time_layouts(model: Any, plan: list[MicroBatch], repeats: int) -> dict[str, Any]:
    """Per layout: seconds of a step, its ratio to the padded one, and the difference of the gradient."""
    on_gpu = model.device.type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    gradients: dict[str, Tensor] = {}
    failed: dict[str, str] = {}
    for _ in tqdm(range(repeats + 1), leave=False):
        for name in LAYOUTS.keys() - failed.keys():
            model.set_attn_implementation(name.replace(" ", "_") if LAYOUTS[name] else "sdpa")
            model.zero_grad()
            began = now(on_gpu)
            try:
                for batch in plan:
                    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                        loss = loss_of(model, name, batch)
                    loss.backward()
            except (RuntimeError, NotImplementedError, ValueError) as error:
                failed[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
                continue
            seconds[name].append(now(on_gpu) - began)
            gradients[name] = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
    plain = gradients["padded at the end"]
    figures: dict[str, Any] = {name: {"failed": said} for name, said in failed.items()}
    for name in LAYOUTS.keys() - failed.keys():
        ratio = median(a / b for a, b in zip(seconds["padded at the end"][1:], seconds[name][1:], strict=True))
        difference = ((gradients[name] - plain).abs().max() / plain.abs().max()).item()
        figures[name] = {"seconds": median(seconds[name][1:]), "ratio": ratio, "gradient_difference": difference}
    return {name: figures[name] for name in LAYOUTS}


def now(on_gpu: bool) -> float:
    """Seconds: of this process on its core, or on the clock, when the GPU has done what it was given."""
    if not on_gpu:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measure, print, and write the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1m", help="of a random model (default: 1m)")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--workload", choices=WORKLOADS, default=next(iter(WORKLOADS)), help="(default: the page's)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # its CPU time is what other work on the machine changes least
    figures: dict[str, Any] = {"padding": {}}
    plans = {name: Batching(rows=work.micro).plan(step_of(work, 4096)) for name, work in WORKLOADS.items()}
    for name, plan in plans.items():
        figures["padding"][name] = padding(plan)
        print(f"{name}: {padding(plan):.1%} of {len(plan)} micro-batches is padding")
    for name, function in LAYOUTS.items():
        if function is not None:
            AttentionInterface.register(name.replace(" ", "_"), function)
            AttentionMaskInterface.register(name.replace(" ", "_"), lambda *_, **__: None)
    with tempfile.TemporaryDirectory() as scratch:
        model = AutoModelForCausalLM.from_pretrained(save_random_model(Path(scratch), args.shape), dtype=torch.float32)
    add_fused_lm_head(model.to(device), outputs=("log_probs", "entropy"))
    rows = step_of(WORKLOADS[args.workload], 4096)
    moved = replace(rows, **{name: value.to(device) for name, value in rows.tensors().items()})
    plan = Batching(rows=WORKLOADS[args.workload].micro).plan(moved)
    figures["layouts"] = time_layouts(model, plan, args.repeats)
    for name, one in figures["layouts"].items():
        print(f"{name:<26}", json.dumps(one))
    if args.json:
        args.json.write_text(
            json.dumps({"shape": args.shape, "workload": args.workload, **figures, **provenance()}, indent=2) + "\n",
            "utf-8",
        )


if __name__ == "__main__":
    main()
