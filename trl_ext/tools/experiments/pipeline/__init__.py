"""A pipeline: stages that train one model after another, resumable."""
