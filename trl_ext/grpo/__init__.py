"""GRPO: the configuration, the trainer, and the plan of an optimizer step."""
