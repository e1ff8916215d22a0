"""What another value of a setting means when a run is resumed.

A setting of ours says so in its type, `Annotated[int, OnResume.MAY_CHANGE]` (its metadata goes to argparse); one that
says nothing makes it another experiment. TRL's and transformers' fields cannot say it: they stand in a table.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from enum import Enum


class OnResume(Enum):
    """What it means that a resumed run has another value."""

    MAY_CHANGE = "changes what is written down or when, and not what is learned"
    LENGTH = "may change where the schedule of the learning rate has no end"
    YARDSTICK = "validations are measured otherwise"
    YARDSTICK_AS_USED = "the same, noted as it is used; a record without it says nothing"
    OF_PROCESS = "is of this process and not of the run"


_THEIRS = {
    **dict.fromkeys(("max_steps", "num_train_epochs"), OnResume.LENGTH),
    **dict.fromkeys(("generation_kwargs", "min_p", "repetition_penalty", "top_k", "top_p"), OnResume.YARDSTICK),
    **dict.fromkeys(("disable_tqdm", "resume_from_checkpoint"), OnResume.OF_PROCESS),
    **dict.fromkeys(
        ("output_dir", "project", "report_to", "run_name", "dataloader_pin_memory", "include_num_input_tokens_seen",
         "restore_callback_states_from_checkpoint", "skip_memory_metrics", "trackio_space_id",
         "vllm_gpu_memory_utilization"),
        OnResume.MAY_CHANGE,
    ),
}  # fmt: skip
_THEIR_BOOKKEEPING = ("do_", "eval_", "hub_", "log_", "logging_", "push_to_hub", "save_")


def on_resume(classes: Iterable[type]) -> dict[str, OnResume]:
    """What the settings of these dataclasses mean, by name; those that make it another experiment are left out."""
    ours: dict[str, OnResume] = {}
    theirs: dict[str, OnResume] = {}
    for part in classes:
        names = {f.name for f in dataclasses.fields(part)}
        theirs |= {name: OnResume.MAY_CHANGE for name in names if name.startswith(_THEIR_BOOKKEEPING)}
        theirs |= {name: _THEIRS[name] for name in names & set(_THEIRS)}
        for name, hint in typing.get_type_hints(part, include_extras=True).items():
            said = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, OnResume)]
            ours |= dict.fromkeys([name] if said else [], *said)
    return theirs | ours
