"""The console command `trl-ext`: every program by its name, and `init` for a project of your own."""
