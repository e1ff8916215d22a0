"""Many runs: pipelines, the lab, the leaderboard, sweeps, and a plan for a time budget."""
