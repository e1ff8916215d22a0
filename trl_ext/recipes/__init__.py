"""What the files in `recipes/` call: command line, checks before a model loads, assembly, summary."""
