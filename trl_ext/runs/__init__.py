"""A run's folder and what is written into it: checkpoints, logs, plots, summary; and the table of recipes."""
