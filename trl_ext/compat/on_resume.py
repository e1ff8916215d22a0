"""Which settings a resumed run may change: ours say it at their fields, TRL's and transformers' are in a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from trl_ext.setting import OnResume, facts

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
        ours |= facts(part, lambda known: known.on_resume)
    return theirs | ours
