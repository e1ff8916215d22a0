"""A run's folder and what is written into it: checkpoints, logs, plots, tables, summary; and the table of recipes."""
