"""Every patch of TRL, transformers, vLLM and torch, one function each:

* `startup.silence_misleading_messages`: no message of vLLM about Triton and of DeepSpeed about a missing GPU on a CPU.
* `startup.use_all_cores`: undoes the limit of one core that `accelerate launch` sets.
* `lazy_vllm.load_vllm`: TRL imports vLLM when an engine is used, not whenever vLLM is installed.
* `trl_engine.backend_made_by`: `GRPOTrainer` creates our vLLM backend instead of TRL's.
* `trl_engine.engine_started_with`: vLLM's `LLM` gets settings that TRL does not pass.
* `trl_engine.requests_with`: each request gets its own parameters, such as seeds.
* `vllm_steps.steps_counted`: a vLLM engine reports each step.
* `trl_scoring.only_what_is_used`: the two below, where they apply.
* `trl_scoring.old_log_probs_left_out`: TRL scores a rollout without old log-probabilities.
* `trl_scoring.texts_left_on_ranks`: TRL gathers a rollout's texts only for a table that is printed.
* `given.record_in_parser`: settings that TRL's parser makes know which of them were given.
* `layers.caches_kept`: layers get the KV cache under gradient checkpointing.
* `layers.attend_by`: a function attends in the place of sdpa, such as within rows of different lengths in one.
* `compilation.compile_layers`: torch.compile for each layer in place, not for a wrapper around the model.
* `compilation.uncompiled`: `generate` calls these layers as if they were not compiled.
* `quantized.keep_gradients`: bitsandbytes' 4-bit layers on a CPU keep the layout that has a gradient.
* `weight_casts.casts_made_again`: a graph keeps no copies of the weights in autocast's dtype.
* `trl_head.tiles_in_cache`: on a CPU, tiles of the LM head's logits fit into the caches.
* `trl_head.head_as_on_gpu`: TRL's LM head on fake tensors computes as its GPU kernels would have it.
* `trl_head.head_recorded`: what TRL's LM head is applied to can be noted.
* `trl_head.head_within`: the head's passes run within a block, which counts them apart.
* `fake_modules.parameters_replaced`: a module of fake tensors can be moved and converted.
* `fake_modules.rows_not_packed`: on fake tensors, no row is taken for several in one.
* `fake_modules.reference_made_by`: `GRPOTrainer` gets its reference model instead of loading it.
* `hf_sampling.generating_with`: HF `generate` has one more processor and criterion where TRL calls it.
* `vllm_draws.draw_by_cumulative_sums`: vLLM on a CPU draws a token by one random number.
* `tracker_names.draw_by_step_in_trackio`: trackio draws by the optimizer step, not by the number of logs.
* `tracker_names.keep_names_of_ours`: trackers show `validation/...`, `sampling/...` and others without `train/`.
* `torch_on_cpu.loading_to_numbered_cpus`: `torch.load` maps to cpu:0.
* `torch_on_cpu.set_default_group_timeout`: DeepSpeed's process groups on CPUs get the run's `ddp_timeout`.
* `torch_on_cpu.skip_deepspeeds_operator_of_inference`: a training does not compile what only inference calls.
* `torch_on_cpu.tell_deepspeed_of_the_group`: DeepSpeed counts the ranks of a group on CPUs before a model is loaded.
* `torch_on_cpu.muon_without_emulation`: torch's Muon multiplies in float32 on a CPU without bfloat16.

Importing a module patches nothing. Most patches hold within a block; those that have to hold for longer are in
`install`. One thing cannot wait for a call: our trainers inherit TRL's, so `lazy_vllm`, which they import first,
decides whether importing TRL imports vLLM. Where TRL has been imported before, it changes nothing.

And a table, `on_resume`: which settings a resumed run may change.
"""

from __future__ import annotations

import functools


@functools.cache
def install() -> None:
    """Install the patches that have no block to hold in; once per process, however often it is called.

    * `given.record_in_parser`, since a preset fills what was not given, and a parser passes every field. A parser is
      made before any trainer, so this is called where the recipes read their settings, and by any parser of TRL's that
      is made for one of our configs.
    * `tracker_names.keep_names_of_ours` and `draw_by_step_in_trackio`, since transformers' callbacks send whatever is
      logged, in `train`, in `evaluate` and after both: the constructors of our trainers call this.
    """
    from trl_ext.compat.given import record_in_parser
    from trl_ext.compat.tracker_names import draw_by_step_in_trackio, keep_names_of_ours

    record_in_parser()
    keep_names_of_ours()
    draw_by_step_in_trackio()
