"""GRPO: the configuration, the trainer, and what a rollout becomes."""
