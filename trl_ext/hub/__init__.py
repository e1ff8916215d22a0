"""Pushing to the Hugging Face Hub with a model card; `python -m trl_ext.hub` repeats a push."""
