"""The command `trl-ext`, and what files in `recipes/` call: command line, checks before a model, assembly, summary."""
