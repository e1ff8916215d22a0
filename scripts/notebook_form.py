"""docs/grpo_colab.ipynb: docs/grpo.ipynb for a free GPU of Colab or Kaggle, with a real model and an adapter.

python -m scripts.notebook_form                 # write it
python -m scripts.run_notebook --form --output form.ipynb STEPS=2 'MODEL="smollm2"'   # run it, here on a CPU

Texts and cells are those of docs/grpo.ipynb but for the passages below, and no outputs are kept: none of it was run on
such a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, FORM = DOCS / "grpo.ipynb", DOCS / "grpo_colab.ipynb"

_REPLACED = {  # each stands once in the source
    """\
# GRPO in a notebook
""": """\
# GRPO in a notebook, on a T4
""",
    """\
advantages, log-probabilities, curves. Run it from top to bottom: about five minutes on two CPU cores, faster on a GPU
(on Colab: Runtime, Change runtime type). The policy has 0.9 million parameters and is made on the spot, so nothing is
downloaded but packages.""": """\
advantages, log-probabilities, curves. Choose a GPU (Colab: Runtime, Change runtime type; Kaggle: Settings, Accelerator)
and run it from top to bottom. The policy is a real model with a LoRA adapter. A T4 has no bfloat16, so it computes in
float16 there; vLLM samples where it supports the card, else HF generate. It was run as a whole on a CPU, with
SmolLM2-135M, and not yet on a T4.""",
    """\
if importlib.util.find_spec("trl_ext") is None:
    %pip install --quiet {SOURCE} matplotlib
""": """\
if importlib.util.find_spec("trl_ext") is None:
    %pip install --quiet {SOURCE}
    if shutil.which("nvidia-smi"):
        %pip install --quiet "vllm>=0.25,<=0.31"
    # If pip has replaced torch or numpy: restart the session, and run this cell again.
""",
    """\
import importlib.util
import warnings
""": """\
import importlib.util
import os
import shutil
import warnings

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of Kaggle's two cards: a notebook is one process
""",
    """\
STEPS = 40  #""": """\
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # any causal model of the Hub, or a folder
STEPS = 40  #""",
    """\
ROLLOUTS = 128  #""": """\
ROLLOUTS = 64  #""",
    """\
PROBLEMS = 256  #""": """\
PROBLEMS = 128  #""",
    """\
MAX_TOKENS = 80  # of a completion
PRETRAINING = 780  # steps that make the base policy, in about a minute
""": """\
MAX_TOKENS = 128  # of a completion
BY_HAND = 2  # problems of the step that is made by hand
""",
    """\
mini-MATH is an endless generator of small problems in the shape of MATH. The base policy can do the arithmetic, but it
keeps to the format of the prompt, `r1_zero`, only part of the time.""": """\
mini-MATH is an endless generator of small problems in the shape of MATH. The prompt `r1_zero` asks for a format that
the model was not trained for. What is trained is a LoRA adapter; the model itself stays as it is.

Cards compute in bfloat16 from Ampere on, in float16 before that. The trainer finds that out by itself; here it decides
in which dtype the model is loaded, and whether vLLM is asked for, which needs compute capability 7.5.""",
    """\
from transformers import AutoModelForCausalLM, AutoTokenizer
""": """\
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
""",
    """\
from trl_ext.generation.prompts import format_prompt, load_prompt
from trl_ext.mini.policy import BasePolicyConfig, make_base_policy
""": """\
from trl_ext.generation.model_source import loadable
from trl_ext.generation.prompts import format_prompt, load_prompt
""",
    """\
folder = make_base_policy(seed=0, config=BasePolicyConfig(steps=PRETRAINING))
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).to(device)
""": """\
folder = loadable(MODEL)
device = "cuda" if torch.cuda.is_available() else "cpu"
card = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
dtype = torch.bfloat16 if card >= (8, 0) else torch.float16 if device == "cuda" else torch.float32
engine = {
    "use_vllm": "auto" if card >= (7, 5) else "false",
    "vllm_gpu_memory_utilization": 0.2,  # two trainers have an engine each
    "vllm_max_model_length": 512,
}
adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter).to(device)
""",
    """\
print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}")""": """\
trained, parameters = model.get_nb_trainable_parameters()
print(f"{trained:,} of {parameters:,} parameters are trained, on {device}, in the trainer next to {dtype}")""",
    """\
`trl_ext.functional` has the course's functions under their names. A rollout first: eight problems, eight completions
each, graded""": """\
`trl_ext.functional` has the course's functions under their names. A rollout first: a few problems, eight completions
each, graded""",
    """\
chosen = [row for row in train_rows[:8] for _ in range(GROUP)]
""": """\
chosen = [row for row in train_rows[:BY_HAND] for _ in range(GROUP)]
""",
    """\
sampling, gradient accumulation, logging, checkpoints, several ranks and GPUs, and it computes only the rows that have a
gradient. `preset` names a published algorithm; every axis can be set on its own.""": """\
sampling, gradient accumulation, logging, checkpoints, several ranks and GPUs, and it computes only the rows that have a
gradient. `preset` names a published algorithm; every axis can be set on its own. A small model is hardly ever paid at
first, so there is a second reward, a fifth of the first one, for an answer that stands anywhere in the response.""",
    """\
def accuracy(trainer):
""": """\
model = optimizer = None  # the trainers load their own


def accuracy(trainer):
""",
    """\
def train(name, **algorithm):
""": """\
def mentions(completions, answer, **_):
    return [float(right in text) for text, right in zip(completions, answer, strict=True)]


def train(name, **algorithm):
""",
    """\
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=tokenizer,
        reward_funcs=REWARDS["strict"],
""": """\
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        peft_config=adapter,
        processing_class=tokenizer,
        reward_funcs=[REWARDS["strict"], mentions],
""",
    """\
            output_dir=f"runs/notebook/{name}", max_steps=STEPS, learning_rate=3e-4, warmup_steps=5,
""": """\
            output_dir=f"runs/notebook/{name}", max_steps=STEPS, learning_rate=1e-4, warmup_steps=5,
            reward_weights=[1.0, 0.2],
""",
    """\
train_batch_size=ROLLOUTS, micro_train_batch_size=ROLLOUTS // 2, sampling_max_tokens=MAX_TOKENS,
            stop=["</answer>"], gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
            dataloader_pin_memory=False, seed=0, **algorithm,
""": """\
train_batch_size=ROLLOUTS, micro_train_batch_size=GROUP, sampling_max_tokens=MAX_TOKENS,
            stop=["</answer>"], gradient_checkpointing=True, logging_steps=1, save_strategy="no", report_to="none",
            dataloader_pin_memory=False, seed=0, **engine, **algorithm,
""",
    "The [tutorial](tutorial.md) has": "The tutorial, docs/tutorial.md, has",
}


def form() -> Any:
    """The notebook for Colab and Kaggle, without outputs.

    Raises:
        ValueError: docs/grpo.ipynb has a replaced passage not at all, or several times.
    """
    notebook = nbformat.read(SOURCE, as_version=4)
    for old, new in _REPLACED.items():
        found = [cell for cell in notebook.cells if old in f"{cell.source}\n"]
        if len(found) != 1 or f"{found[0].source}\n".count(old) != 1:
            raise ValueError(f"{SOURCE.name} has this passage in {len(found)} cells, not once in one:\n{old}")
        found[0].source = f"{found[0].source}\n".replace(old, new)[:-1]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata |= {"accelerator": "GPU", "colab": {"gpuType": "T4"}}
    return notebook


def written() -> str:
    """What docs/grpo_colab.ipynb holds."""
    return str(nbformat.writes(form())) + "\n"


if __name__ == "__main__":
    FORM.write_text(written(), encoding="utf-8")
