"""Whether a vLLM engine's response depends on what it is sampled with: its tokens' log-probabilities, bit by bit.

    python -m scripts.benchmarks.batch_invariance
    python -m scripts.benchmarks.batch_invariance --max_num_seqs 1 --no_prefix_caching
    python -m scripts.benchmarks.batch_invariance --deterministic --model runs/my_run

Without a model, one of random weights. With --deterministic the engine is that of an evaluation with this setting.
Prompts are random tokens; each is sampled alone, once more with its own blocks cached, and among others.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from accelerate import PartialState

from scripts.benchmarks.random_model import SHAPES, save_random_model
from trl_ext.generation.determinism import (
    CPU,
    EVALUATION,
    check_covered,
    device_of,
    enable_full_determinism,
    engine_arguments,
    prepare_process,
)
from trl_ext.generation.vllm_start import device_settings, place_in_environment, starting_vllm

TOKENS, CONTEXT = 32, 160
PROMPTS, OTHERS = (4, 33, 64, 90), (1, 4, 15, 63)


def main() -> None:
    """Print for each prompt how many of its response's log-probabilities are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--shape", default="6m", choices=SHAPES, help="of random weights")
    parser.add_argument("--max_num_seqs", type=int, help="requests that are decoded at a time")
    parser.add_argument("--no_prefix_caching", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="with what the setting of this name switches on")
    asked = parser.parse_args()
    engine: dict[str, Any] = {"dtype": "float32"} if device_of(use_cpu=False) == CPU else {"dtype": "bfloat16"}
    if asked.deterministic:
        row = check_covered(EVALUATION, device_of(use_cpu=False))
        prepare_process(EVALUATION, row)
        enable_full_determinism(0)
        engine = engine_arguments(row, None)
    if asked.max_num_seqs:
        engine["max_num_seqs"] = asked.max_num_seqs
    if asked.no_prefix_caching:
        engine["enable_prefix_caching"] = False
    with tempfile.TemporaryDirectory() as folder:
        measure(asked.model or str(save_random_model(Path(folder), asked.shape)), engine)


def measure(model: str, engine: dict[str, Any]) -> None:
    """Print a line for each prompt."""
    from vllm import LLM, SamplingParams

    if device_of(use_cpu=False) == CPU:  # as in an evaluation: in this process
        engine["distributed_executor_backend"] = "external_launcher"
    arguments = {**device_settings(CONTEXT), **engine, "max_model_len": CONTEXT}
    with starting_vllm(), place_in_environment(PartialState()):
        llm = LLM(model=model, skip_tokenizer_init=True, seed=0, **arguments)
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(8, 2000) for _ in range(length)]

    def sampled(rows: list[list[int]], place: int) -> list[float]:
        seeds = [7 if i == place else 100 + i for i in range(len(rows))]
        given = {"max_tokens": TOKENS, "min_tokens": TOKENS, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        params = [SamplingParams(seed=seed, **given) for seed in seeds]
        answers = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        output = answers[place].outputs[0]
        return [of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)]

    for target in map(prompt, PROMPTS):
        llm.reset_prefix_cache()
        alone = sampled([target], 0)
        found = {"once more": sampled([target], 0)}
        for others in OTHERS:
            rows = [prompt(rng.randrange(2, 90)) for _ in range(others)]
            rows.insert(place := rng.randrange(others + 1), target)
            llm.reset_prefix_cache()
            found[f"among {others}"] = sampled(rows, place)
        counts = [f"{what} {sum(a == b for a, b in zip(alone, now, strict=True))}" for what, now in found.items()]
        worst = max(abs(a - b) for now in found.values() for a, b in zip(alone, now, strict=True))
        print(f"prompt of {len(target)}: of {TOKENS} tokens equal {', '.join(counts)}; largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
