"""Every change that is made to TRL, vLLM or torch from outside, and nothing else."""
