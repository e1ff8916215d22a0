"""The memory of a GPU over an optimizer step and a rollout, from the real trainer on fake tensors."""
