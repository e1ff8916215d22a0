"""Prompt templates, and prompts to completions, by HF generate or vLLM, with the tokens' log-probabilities."""
