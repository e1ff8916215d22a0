"""What people watch: progress, wandb, trackio and TensorBoard."""
