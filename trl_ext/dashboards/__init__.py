"""Progress in a terminal or a notebook, and what wandb, trackio and TensorBoard get."""
