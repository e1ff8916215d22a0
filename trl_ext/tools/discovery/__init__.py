"""Propose, verify, refine: a language model writes programs, an exact verifier judges them, the best are kept.

`problem` defines problems, `sandbox` runs untrusted programs, `client` asks a model, `strategies` choose the next
request, and `loop` connects them. Nothing here needs TRL, vLLM or torch.
"""
