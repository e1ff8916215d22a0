"""Every change that is made to TRL, vLLM or torch from outside, and the names that earlier versions here had."""
