"""What people watch a run with: its progress in a terminal or a notebook, and wandb, trackio and TensorBoard."""
