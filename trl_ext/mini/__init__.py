"""The embedded default: a math task and a tiny policy that are made on the spot."""
