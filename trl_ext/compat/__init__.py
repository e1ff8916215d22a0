"""Every change that is made to TRL, vLLM or torch from outside, one function each:

* `startup`: at import, vLLM's message about Triton and DeepSpeed's about a missing GPU are silenced on a CPU;
  `use_all_cores` gives torch the cores that `accelerate launch` takes away.
* `lazy_vllm.load_vllm`: TRL's modules get vLLM's names when an engine is used, not wherever vLLM is installed.
* `trl_engine.backend_made_by`: `GRPOTrainer` makes our vLLM backend instead of TRL's.
* `trl_engine.engine_started_with`: vLLM's `LLM` gets settings that TRL does not pass.
* `trl_engine.requests_with`: requests get parameters of their own, seeds for example.
* `trl_scoring.old_log_probs_left_out`: while a rollout is scored, TRL computes no old log-probabilities.
* `torch_devices.load_to_numbered_cpus`: `torch.load` maps to cpu:0.
* `torch_groups.set_default_group_timeout`: DeepSpeed's process groups on CPUs get the run's `ddp_timeout`.

And two tables: `renamed`: the names that settings had in earlier versions of this package; `on_resume`: what the
settings of TRL and transformers mean for a run that is resumed.
"""
