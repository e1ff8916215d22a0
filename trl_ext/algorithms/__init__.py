"""The axes of an algorithm as pure functions of tensors, and the data that they exchange; needs torch only."""
