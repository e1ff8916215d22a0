"""Propose, verify, refine: a language model writes programs, an exact verifier judges them, the best are kept.

`problem` says what a problem is, `sandbox` runs a program nobody has read, `client` asks a model, `strategies` decide
what to ask next, and `loop` puts them together. Nothing here needs TRL, vLLM or torch.
"""
