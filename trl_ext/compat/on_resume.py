"""Which settings a resumed run may change.

Our settings declare it in their type, `Annotated[int, OnResume.MAY_CHANGE]` (their metadata goes to argparse); changing
one without a declaration makes it another experiment. TRL's and transformers' settings are in a table.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from enum import Enum


class OnResume(Enum):
    """The meaning of a different value in a resumed run."""

    MAY_CHANGE = "changes what is logged or saved, or when, but not what is learned"
    LENGTH = "may change if the learning rate's schedule has no end"
    VALIDATION = "changes how validations are measured"
    VALIDATION_AS_USED = "the same, recorded only when used; a record may lack it"
    OF_PROCESS = "belongs to the process, not to the run"


_THEIRS = {
    OnResume.LENGTH: "max_steps num_train_epochs",
    OnResume.VALIDATION: "generation_kwargs min_p repetition_penalty top_k top_p",
    OnResume.OF_PROCESS: "disable_tqdm resume_from_checkpoint",
    OnResume.MAY_CHANGE: "output_dir project report_to run_name dataloader_pin_memory include_num_input_tokens_seen "
    "restore_callback_states_from_checkpoint skip_memory_metrics trackio_space_id vllm_gpu_memory_utilization "
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
}
_THEIR_BOOKKEEPING = ("do_", "eval_", "hub_", "log_", "logging_", "push_to_hub", "save_")


def on_resume(classes: Iterable[type]) -> dict[str, OnResume]:
    """The settings of these dataclasses by name, without those that make it another experiment."""
    ours: dict[str, OnResume] = {}
    theirs: dict[str, OnResume] = {}
    for part in classes:
        names = {f.name for f in dataclasses.fields(part)}
        theirs |= {name: OnResume.MAY_CHANGE for name in names if name.startswith(_THEIR_BOOKKEEPING)}
        theirs |= {name: meaning for meaning, known in _THEIRS.items() for name in names & set(known.split())}
        for name, hint in typing.get_type_hints(part, include_extras=True).items():
            declared = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, OnResume)]
            ours |= dict.fromkeys([name] if declared else [], *declared)
    return theirs | ours
