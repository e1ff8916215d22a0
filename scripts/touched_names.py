"""Which names of other libraries the package touches, and which of them a version of a library lacks.

Reads sources, and imports none of them, so a version that cannot run here (vLLM for a GPU) is checked as well:

    python scripts/touched_names.py                                  # what is installed here
    pip download --no-deps vllm==0.25.1 -d wheels && unzip -q wheels/vllm-0.25.1*.whl -d old
    python scripts/touched_names.py old

What the package imports is found by itself; `MEMBERS` and `TEXTS` add what no import shows.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "trl_ext"
LIBRARIES = ("vllm", "transformers", "peft", "accelerate", "trl")

# Modules whose names transformers collects when it is imported.
_MODELS = [
    f"transformers.models.{name}"
    for name in ("auto.configuration_auto", "auto.modeling_auto", "auto.tokenization_auto", "auto.processing_auto",
                 "qwen3.configuration_qwen3", "qwen3.modeling_qwen3")
]  # fmt: skip

# By module and class: its methods, fields and attributes, with the parameters that a method is called with.
MEMBERS = {
    "vllm.entrypoints.llm:LLM": (
        "generate(prompts,sampling_params,use_tqdm) reset_prefix_cache wake_up(tags) sleep(level) llm_engine"
    ),
    "vllm.v1.engine.llm_engine:LLMEngine": "model_executor",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "driver_worker",
    "vllm.v1.worker.gpu_worker:Worker": "model_runner _weight_update_active start_weight_update finish_weight_update",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "reload_weights(weights_iterator) model",
    "vllm.engine.arg_utils:EngineArgs": (
        "model dtype seed max_model_len max_num_batched_tokens max_num_seqs gpu_memory_utilization enforce_eager "
        "enable_chunked_prefill enable_prefix_caching quantization distributed_executor_backend trust_remote_code "
        "enable_sleep_mode model_impl logprobs_mode max_logprobs worker_extension_cls weight_transfer_config "
        "tensor_parallel_size"
    ),
    "vllm.sampling_params:SamplingParams": (
        "n temperature top_p top_k min_p repetition_penalty max_tokens min_tokens stop seed logprobs "
        "include_stop_str_in_output structured_outputs"
    ),
    "vllm.sampling_params:StructuredOutputsParams": "regex",
    "vllm.outputs:CompletionOutput": "text token_ids cumulative_logprob finish_reason logprobs",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (
        "init_transfer_engine(init_info) start_weight_update finish_weight_update receive_weights(update_info) "
        "update_weights(update_info) parse_update_info shutdown model model_config device init_info_cls update_info_cls"
    ),
    "vllm.distributed.weight_transfer.base:WeightTransferInitInfo": "",
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo": "",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": "_registry register_engine",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": "process_weights_after_loading",
}

# By a folder of the library: what stands somewhere in its files, such as a server's routes.
TEXTS = {
    "vllm/entrypoints": (
        '"/collective_rpc" "/start_weight_update" "/update_weights" "/finish_weight_update" "/reset_prefix_cache" '
        '"/server_info" "/tokenize" "/v1/models" "/v1/completions" "/health"'
    ),
    "vllm/envs.py": '"VLLM_CPU_KVCACHE_SPACE" "VLLM_SERVER_DEV_MODE"',
    "vllm/config/model.py": "hf_text_config",
    "vllm/v1/sample/ops/topk_topp_sampler.py": "TopKTopPSampler forward_cpu apply_top_k_top_p logprobs_mode",
}

# By an abstract class: ours in its file, whose methods have to be all that any version leaves abstract.
IMPLEMENTED = {
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": "generation/weight_transfer.py:HttpWeightTransfer"
}


def imported() -> set[tuple[str, str]]:
    """(module, name) of every import of a library in the package."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
                names |= {(str(node.module), alias.name) for alias in node.names}
    return names


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _file_of(root: Path, module: str) -> Path | None:
    place = root.joinpath(*module.split("."))
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def has_name(root: Path, module: str, name: str) -> bool:
    """Whether the module defines, imports or lazily loads the name, or the name is a module in it."""
    file = _file_of(root, module)
    if file is None:
        return False
    if _file_of(root, f"{module}.{name}"):
        return True
    if module == "transformers" and any(has_name(root, models, name) for models in _MODELS):
        return True
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(name in (a.asname, a.name) for a in node.names):
            return True
        if isinstance(node, ast.Constant) and node.value == name:  # in a table of what is loaded when it is used
            return True
    return False


def _members(root: Path, module: str, name: str) -> Iterator[tuple[str, set[str]]]:
    """What a class and its bases have in their file or in a file that it imports them from, with the parameters."""
    file = _file_of(root, module)
    for node in ast.walk(_tree(file)) if file else ():
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names) and not node.level:
            yield from _members(root, str(node.module), name)
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for base in node.bases:
            yield from _members(root, module, ast.unparse(base).partition("[")[0])
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                every = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
                yield part.name, {argument.arg for argument in every}
            elif isinstance(part, ast.AnnAssign):
                yield ast.unparse(part.target).removeprefix("self."), set()
            elif isinstance(part, ast.Assign):
                yield from ((ast.unparse(target).removeprefix("self."), set()) for target in part.targets)


def left_abstract(root: Path) -> list[str]:
    """The abstract methods that our subclasses do not define, so that none of these could be made."""
    lacks = []
    for owner, ours in IMPLEMENTED.items():
        (module, name), (place, own) = owner.split(":"), ours.split(":")
        file = _file_of(root, module)
        base = [n for n in _tree(file).body if isinstance(n, ast.ClassDef) and n.name == name] if file else []
        mine = [n for n in ast.walk(_tree(PACKAGE / place)) if isinstance(n, ast.ClassDef) and n.name == own]
        defined = {method.name for c in mine for method in c.body if isinstance(method, ast.FunctionDef)}
        for method in (n for c in base for n in c.body if isinstance(n, ast.FunctionDef)):
            is_abstract = any(ast.unparse(d).endswith("abstractmethod") for d in method.decorator_list)
            if is_abstract and method.name not in defined:
                lacks.append(f"{module}.{name}.{method.name} (abstract, and {own} does not define it)")
    return lacks


def missing(root: Path) -> list[str]:
    """What the package touches and the libraries in this folder, as far as it has them, do not have."""
    there = [library for library in LIBRARIES if (root / library).is_dir()]
    lacks = [f"{module}.{name}" for module, name in sorted(imported()) if not has_name(root, module, name)]
    lacks += left_abstract(root)
    for owner, listed in MEMBERS.items():
        module, name = owner.split(":")
        has: dict[str, set[str]] = {}
        for member, parameters in _members(root, module, name):
            has[member] = has.get(member, set()) | parameters
        if not has and not has_name(root, module, name):
            lacks.append(f"{module}.{name}")
        for member, _, called_with in (entry.rstrip(")").partition("(") for entry in listed.split()):
            absent = [p for p in called_with.split(",") if p and p not in has.get(member, ())]
            if member not in has or absent:
                lacks.append(f"{module}.{name}.{member}{absent or ''}")
    for place, texts in TEXTS.items():
        files = [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py"))
        every = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        lacks += [f"{place}: {text}" for text in texts.split() if text not in every]
    return [line for line in lacks if line.replace("/", ".").partition(".")[0] in there]


def main() -> None:
    """Print what each folder's libraries lack; ends with 1 if anything is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(sysconfig.get_paths()["purelib"])
    parser.add_argument("folders", nargs="*", type=Path, default=[here], help="folders of unpacked wheels")
    all_missing = {folder: missing(folder) for folder in parser.parse_args().folders}
    for folder, lines in all_missing.items():
        print(f"{folder.name}: {'nothing is missing' if not lines else ', '.join(lines)}")
    raise SystemExit(any(all_missing.values()))


if __name__ == "__main__":
    main()
