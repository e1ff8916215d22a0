"""What the entropy of all sampled tokens costs: generation with and without its estimate, and a pass for the exact one.

    python -m scripts.benchmarks.sampled_entropy
    python -m scripts.benchmarks.sampled_entropy --shape qwen2.5-math-1.5b --rows 64 --tokens 512

In alternation on the same seeds, so that the ratios are of pairs; both generations have to give the same completions.
The exact entropy of rows that the optimizer step leaves out would take the forward pass that is timed here over all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scripts.benchmarks.random_model import SHAPES, save_random_model
from trl_ext.functional import compute_entropy
from trl_ext.generation.completion import entropy_estimates
from trl_ext.generation.hf import hf_generate
from trl_ext.generation.token_logprobs import TokenLogProbs
from trl_ext.runs.provenance import provenance

PASS_ROWS = 8  # of a forward pass


def clock() -> float:
    """Seconds; on a CPU those of this process, which other programs do not change."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def exact_entropy(model: Any, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> float:
    """The mean entropy at all completion tokens, by forward passes; prompts and completions are of one length each."""
    entropies, start = [], len(prompt_ids[0]) - 1
    ids = torch.tensor([p + c for p, c in zip(prompt_ids, completion_ids, strict=True)], device=model.device)
    for part in ids.split(PASS_ROWS):
        entropies += compute_entropy(model(part).logits[:, start:-1]).flatten().tolist()
    return mean(entropies)


def one_round(model: Any, tokenizer: Any, prompt_ids: list[list[int]], tokens: int, seed: int) -> dict[str, float]:
    """Seconds of the three, and both entropies."""
    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=1,
                              pad_token_id=0)  # fmt: skip
    seconds: dict[str, float] = {}
    samples = {}
    ways = {"generation": None, "with the estimate": TokenLogProbs(len(prompt_ids))}
    for name in sorted(ways, reverse=bool(seed % 2)):  # who is first alternates
        torch.manual_seed(seed)
        began = clock()
        samples[name] = hf_generate(model, tokenizer, prompt_ids, config, logps=ways[name])
        seconds[name] = clock() - began
    drawn = samples["generation"]
    assert samples["with the estimate"] == drawn
    began = clock()
    exact = exact_entropy(model, prompt_ids, drawn)
    seconds["a forward pass over all rows"] = clock() - began
    recorder = ways["with the estimate"]
    assert recorder is not None
    estimates = entropy_estimates(drawn, recorder.rows())
    return seconds | {"exact": exact, "estimate": mean(value for value in estimates if value is not None)}


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="6m", help="of a model with random weights (default: 6m)")
    parser.add_argument("--rows", type=int, default=64, help="completions (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion (default: 64)")
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds, after one to warm up (default: 6)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_random_model(Path(scratch), args.shape)
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder).to(device),
            AutoTokenizer.from_pretrained(folder),
        )
    prompt_ids = [[3 + (7 * row + i) % 500 for i in range(32)] for row in range(args.rows)]
    rounds = [one_round(model, tokenizer, prompt_ids, args.tokens, seed) for seed in range(args.rounds + 1)][1:]
    ratios = {name: [seconds[name] / seconds["generation"] for seconds in rounds]
              for name in ("with the estimate", "a forward pass over all rows")}  # fmt: skip
    print(f"{'generation':<32} {median(seconds['generation'] for seconds in rounds):>7.2f} s")
    for name, values in ratios.items():
        print(f"{name:<32} {median(values):>7.3f} of generation ({min(values):.3f} to {max(values):.3f})")
    print(f"entropy: exact {mean(f['exact'] for f in rounds):.4f}, estimate {mean(f['estimate'] for f in rounds):.4f}")
    if args.json:
        figures = {"settings": {name: getattr(args, name) for name in ("shape", "rows", "tokens")}, "rounds": rounds,
                   "ratios": ratios, **provenance()}  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
