"""Training on responses that were chosen: supervised fine-tuning on reasoning traces, and expert iteration."""
