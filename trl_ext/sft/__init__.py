"""Supervised fine-tuning on reasoning traces."""
