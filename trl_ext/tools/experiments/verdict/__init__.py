"""A verdict for a new idea: the same tasks and seeds with and without it, until an interval decides."""
