"""The state of a run's optimizer: the real one makes it on fake tensors, or its source says what it keeps.

bitsandbytes' paged optimizers have state that CUDA moves to the host's memory where the GPU's is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import check_target_module_exists

from trl_ext.tools.estimate.memory.ledger import Answered
from trl_ext.tools.estimate.memory.optimizer_sources import SHARED, BySource, Weight, by_source
from trl_ext.tools.estimate.planned import NoEstimateError

_PAGED_FROM = 100_000  # elements of a weight whose state bitsandbytes pages


class SourcedOptimizer(torch.optim.Optimizer):
    """Keeps of each parameter, from its first step on, as much as the optimizer whose source it follows.

    What that one allocates for the time of a step is not known.

    Args:
        weights: each parameter, as the source has to know it.
    """

    def __init__(self, weights: Mapping[nn.Parameter, Weight], source: BySource) -> None:
        super().__init__(list(weights), {})
        self.weights, self.source = weights, source
        self.shared: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        """Make the state, once."""
        for parameter, weight in self.weights.items():
            if parameter.grad is None or parameter in self.state:
                continue
            for name, size in self.source.kept(weight).items():
                tensor = self.shared.get(name)
                if tensor is None:
                    tensor = torch.empty(size, dtype=torch.uint8, device=parameter.device)
                if name.startswith(SHARED):
                    self.shared[name] = tensor
                self.state[parameter][name] = tensor


def name_of(config: TrainingArguments) -> str:
    """The run's `optim`."""
    return str(getattr(config.optim, "value", config.optim))


def make_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """A trainer's optimizer, whose step is estimated.

    Raises:
        NoEstimateError: what a step of it takes is not known.
    """
    _modeled(trainer.args)
    return optimizer_of(trainer)


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    """A trainer's optimizer, or in the place of one that cannot be asked one with the state that its source says."""
    source = by_source(name_of(trainer.args))
    if source is None:
        trainer.optimizer_cls_and_kwargs = _asked(trainer.args, trainer.model)
        return trainer.create_optimizer()
    trainer.optimizer = SourcedOptimizer(dict(_weights(trainer.model, trainer.args)), source)
    return trainer.optimizer


def flat_state(config: TrainingArguments, elements: int) -> tuple[int, int]:
    """Bytes of state of so many weights in one of DeepSpeed's flat partitions, in float32, and of them the paged ones.

    Raises:
        NoEstimateError: what a step of it takes is not known, or it needs matrices.
    """
    source = _modeled(config)
    if source is not None and source.package in ("galore_torch", "apollo_torch"):
        raise NoEstimateError(f"optim {name_of(config)} projects matrices, and ZeRO has flat partitions of weights")
    with FakeTensorMode(allow_non_fake_inputs=True), Answered(lambda mask: mask[0]):
        flat = nn.Parameter(torch.empty(elements))
        flat.grad = torch.empty_like(flat)
        if source is None:
            make, options = _asked(config)
            optimizer = make([flat], **options)
        else:
            optimizer = SourcedOptimizer({flat: Weight((elements,), 4, options=_options(config))}, source)
        optimizer.step()
        return bytes_of(state_tensors(optimizer)), paged_bytes(config, optimizer)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of its state."""
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def paged_bytes(config: TrainingArguments, optimizer: torch.optim.Optimizer) -> int:
    """Of the state, those that CUDA moves to the host's memory where the GPU's is full."""
    if "paged" not in name_of(config):  # which is what transformers goes by
        return 0
    tensors = [(p, t) for p, state in optimizer.state.items() for t in tree_leaves(state) if isinstance(t, Tensor)]
    return bytes_of(tensor for weight, tensor in tensors if tensor.numel() >= weight.numel() >= _PAGED_FROM)


def source_line(config: TrainingArguments) -> str | None:
    """What is said of an optimizer that was not asked; None if it was."""
    source = by_source(name_of(config))
    if source is None:
        return None
    return (
        f"optim {name_of(config)}: bytes of state by its source ({source.source}), not measured: {source.said} "
        "(n elements of a weight, m and l sides of a matrix, r its rank); what its step allocates in addition is not "
        "counted"
    )


def _modeled(config: TrainingArguments) -> BySource | None:
    source = by_source(name_of(config))
    if source is not None and source.unmodeled:
        raise NoEstimateError(f"optim {name_of(config)}: {source.unmodeled}")
    if source is not None and {"proj", "proj_type"} & _options(config).keys():
        raise NoEstimateError(f"optim {name_of(config)}: what it keeps with another proj or proj_type is not known")
    return source


def _asked(config: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
    """The real optimizer and its settings, without pages of memory, which CUDA would have to make."""
    try:
        make, options = Trainer.get_optimizer_cls_and_kwargs(config, model)
    except ImportError as error:
        raise NoEstimateError(f"optim {name_of(config)}: {' '.join(str(error).split())}") from error
    if find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim.optimizer import GlobalOptimManager

        GlobalOptimManager.get_instance().initialize()  # it has places of other optimizers' embeddings, by number
    return make, options | ({"is_paged": False} if "is_paged" in options else {})


def _options(config: TrainingArguments) -> dict[str, str]:
    """Of `optim_args`."""
    pairs = [pair.partition("=") for pair in (config.optim_args or "").replace(" ", "").split(",") if pair]
    return {name: value for name, _, value in pairs}


def _weights(model: nn.Module, config: TrainingArguments) -> Iterator[tuple[nn.Parameter, Weight]]:
    """The parameters that are trained; those that are projected as transformers picks them."""
    targets, options = config.optim_target_modules, _options(config)
    takes_all = isinstance(targets, str) and targets.replace("_", "-") == "all-linear"
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    projected = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and targets and (takes_all or check_target_module_exists(targets, name))
    }
    for name, one in model.named_parameters():  # a weight that two modules share has the name of the first
        if one.requires_grad:
            yield one, Weight(tuple(one.shape), one.element_size(), name in projected, one in embeddings, options)
