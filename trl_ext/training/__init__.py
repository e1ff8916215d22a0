"""What every trainer has: settings, atomic checkpoints, validation, time budget, resuming."""
