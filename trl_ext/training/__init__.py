"""What every trainer has: settings, atomic checkpoints, validation, time budget, resuming, and what dashboards get."""
