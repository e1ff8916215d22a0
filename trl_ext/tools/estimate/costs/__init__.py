"""What the phases of a run compute and move, and the seconds that this takes on a device."""
