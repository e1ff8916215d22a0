"""The rollout browser: a run's rollouts as one HTML file, without a network."""
