"""The memory and the time of a run, before it is started, on a machine without its GPUs."""
