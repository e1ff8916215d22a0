"""Pushing to the Hugging Face Hub with a model card."""
