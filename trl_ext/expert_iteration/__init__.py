"""Expert iteration: sample, keep what is correct, fine-tune, repeat."""
