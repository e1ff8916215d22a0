"""Programs around a training, which nothing that trains imports: many runs, estimates, and searches for programs."""
