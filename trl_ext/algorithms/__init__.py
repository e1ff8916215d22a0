"""The axes of an algorithm as pure functions of tensors, and what flows between them; needs torch only."""
