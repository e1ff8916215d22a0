"""A language model behind an OpenAI-compatible endpoint: retries, a budget, and a key that stays secret."""
