"""Several machines: what a launch asked for, one folder that every host sees, and lost hosts in one line."""
