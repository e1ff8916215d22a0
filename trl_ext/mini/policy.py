"""A base policy that is built locally: a small Qwen3 decoder and its tokenizer, pre-trained for about a minute.

It is a *base* model: it has read a task's training split worked out in many styles, so it can do the arithmetic
but keeps to the format that `r1_zero` asks for only part of the time. That gap is what GRPO closes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from trl_ext.generation.prompts import PLACEHOLDER, format_prompt, load_prompt
from trl_ext.io import digest_of_files, print_line, read_json, write_json
from trl_ext.mini.task import BasePolicyConfig, Task
from trl_ext.mini.tasks import TASKS, mini_math

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

EOS, PAD = "<|endoftext|>", "<|pad|>"

# Shares of the ways in which a response ends once the working `{s}` is written; `{w}` is an incorrect answer.
R1_ZERO_STYLES: dict[str, float] = {
    " {s} </think> <answer> {a} </answer>": 0.44,
    " {s} <answer> {a} </answer>": 0.16,  # thought never closed
    " {s} </think> {a}": 0.14,  # no answer tags
    " {s} </think> The answer is $\\boxed{{{a}}}$.": 0.12,
    " {s}": 0.06,
    " {s} </think> <answer> {a}": 0.05,  # answer never closed
    " </think> <answer> {w} </answer>": 0.03,  # a guess
}
TAGS = (" </think>", " <answer>", " </answer>")
PROMPT_PARTS = load_prompt("r1_zero").split(PLACEHOLDER)
QUESTION_ONLY_STYLES: dict[str, float] = {
    " {s} The answer is $\\boxed{{{a}}}$.": 0.5,
    " {s} The answer is {a}.": 0.3,
    " {s} </think> <answer> {a} </answer>": 0.2,
}


def make_base_policy(
    seed: int = 0,
    cache_dir: str | Path | None = None,
    config: BasePolicyConfig | None = None,
    progress: bool = True,
    task: str = "mini_math",
    options: Mapping[str, Any] | None = None,
) -> Path:
    """The directory of the base policy for `seed`, as transformers and vLLM load it; made now if it is not cached.

    Args:
        cache_dir: default `$TRL_EXT_CACHE`, else `~/.cache/trl_ext`.
        config: default the task's own.
        progress: draw a bar while training.
        task, options: of `TASKS`; what the policy has read.
    """
    embedded = TASKS.build(task, **(options or {}))()
    config = config or embedded.policy
    root = Path(cache_dir or os.environ.get("TRL_EXT_CACHE") or Path.home() / ".cache" / "trl_ext")
    source = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    read = [task, sorted({**TASKS.options(task), **(options or {})}.items())]
    source += [load_prompt("r1_zero"), load_prompt("question_only")]  # which it has read too
    key = json.dumps([hashlib.sha256("".join(source).encode()).hexdigest(), seed, asdict(config), *read])
    target = root / f"base-policy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{target.name}.lock"):  # of two runs that start together, one makes it
        if _is_as_made(target):
            return target
        scratch = root / f"making-{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        scratch.mkdir()
        try:
            tokenizer = train_tokenizer(config, seed, embedded)
            model = pretrain(tokenizer, config, seed, progress, embedded)
            tokenizer.save_pretrained(scratch)
            model.save_pretrained(scratch)
            made = {"key": key, "files": digest_of_files(scratch.iterdir())}
            write_json(scratch / "recipe.json", made)
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target


def _is_as_made(target: Path) -> bool:
    """Whether the folder holds a policy that is what was written; one that was changed since is made again."""
    recipe = target / "recipe.json"
    if not recipe.is_file():
        return False
    own = (path for path in target.iterdir() if path.is_file() and path != recipe)  # lighteval keeps a folder there
    is_same: bool = read_json(recipe)["files"] == digest_of_files(own)
    if not is_same:
        print_line(f"the base policy in {target} is not what was made there: it is made again")
    return is_same


def documents(seed: int, question_only_share: float, task: Task | None = None) -> Iterator[tuple[str, str]]:
    """Endless (prompt, response) texts over the training split; EOS is not written out."""
    task = task or mini_math()
    rng = Random(f"base policy {seed}")
    r1_zero, bare = load_prompt("r1_zero"), load_prompt("question_only")
    for row in task.problems("train", seed):
        is_bare = rng.random() < question_only_share
        styles = QUESTION_ONLY_STYLES if is_bare else R1_ZERO_STYLES
        (style,) = rng.choices(list(styles), list(styles.values()))
        working, answer = task.work(row, rng)
        response = style.format(s=working, a=answer, w=rng.randint(1, 99))
        yield format_prompt(bare if is_bare else r1_zero, row["problem"]), response


def train_tokenizer(config: BasePolicyConfig, seed: int, task: Task | None = None) -> "PreTrainedTokenizerFast":
    """Byte-level BPE with single digits and no split at spaces, so that constant text becomes a few tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    task = task or mini_math()
    tokenizer = Tokenizer(models.BPE())
    word = Regex("[A-Za-z]+[^A-Za-z0-9]*|[^A-Za-z0-9]+|[0-9]")  # a word takes the spaces and signs behind it along
    words = pre_tokenizers.Split(word, behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answered = " {solution} The answer is $\\boxed{{{answer}}}$."
    rows = islice(task.problems("train", seed), 4000)
    texts = (text for row in rows for text in (row["problem"], answered.format_map(row)))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([*TAGS, *PROMPT_PARTS, *task.tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=config.max_length,
        padding_side="left",
    )


def build_model(config: BasePolicyConfig, tokenizer: "PreTrainedTokenizerFast", seed: int) -> "Qwen3ForCausalLM":
    """A Qwen3 decoder with random weights; the global random state is left as it was."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(shape).float()


def pretrain(
    tokenizer: "PreTrainedTokenizerFast",
    config: BasePolicyConfig,
    seed: int,
    progress: bool,
    task: Task | None = None,
) -> "Qwen3ForCausalLM":
    """Next-token training on the responses, with a linear warm-up and a cosine to zero.

    The matrices between the layers go by Muon, which here gets further than AdamW in the same time
    (Jordan et al. 2024; the scaling of the step is that of arXiv:2502.16982), the embedding and the norms by AdamW.
    """
    import torch
    from tqdm import tqdm
    from transformers import get_cosine_schedule_with_warmup

    from trl_ext.compat.torch_on_cpu import muon_without_emulation

    model = build_model(config, tokenizer, seed)
    matrices = [w for w in model.model.layers.parameters() if w.ndim == 2]
    ours = {id(w) for w in matrices}
    others = [w for w in model.parameters() if id(w) not in ours]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    schedules = [get_cosine_schedule_with_warmup(o, config.steps // 20, config.steps) for o in optimizers]
    model.train()
    batches = _batches(tokenizer, config, seed, task)
    quiet = None if progress else True  # None: a bar in a terminal only
    bar = tqdm(batches, total=config.steps, desc="base policy", unit="step", disable=quiet)
    for ids, targets in bar:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        kept = targets >= 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), targets[kept])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with muon_without_emulation():
            for step in (*optimizers, *schedules):
                step.step()
        model.zero_grad()
        if bar.n % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


def _batches(
    tokenizer: "PreTrainedTokenizerFast", config: BasePolicyConfig, seed: int, task: Task | None = None
) -> Iterator[tuple["Tensor", "Tensor"]]:
    """`steps` pairs ids, targets (B, T); targets are -1 where there is no loss. Batches hold rows of similar length."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    pairs = list(islice(documents(seed, config.question_only_share, task), config.steps * config.batch))
    prompts = tokenizer([p for p, _ in pairs])["input_ids"]
    responses = tokenizer([r for _, r in pairs])["input_ids"]
    rows: list[Any] = [(p, [*r, tokenizer.eos_token_id]) for p, r in zip(prompts, responses, strict=True)]
    rng = Random(seed)
    window = 16 * config.batch
    for start in range(0, len(rows), window):
        block = sorted(rows[start : start + window], key=lambda row: len(row[0]) + len(row[1]))
        batches = [block[i : i + config.batch] for i in range(0, len(block), config.batch)]
        rng.shuffle(batches)
        for batch in batches:
            ids = [torch.tensor((p + r)[:-1]) for p, r in batch]
            targets = [torch.tensor([-1] * (len(p) - 1) + r) for p, r in batch]
            yield (
                pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
                pad_sequence(targets, batch_first=True, padding_value=-1),
            )
