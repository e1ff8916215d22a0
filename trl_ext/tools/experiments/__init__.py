"""Many runs: pipelines, the lab, the leaderboard, and sweeps."""
