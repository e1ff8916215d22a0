"""The rollout browser: `python -m trl_ext.browse RUN` writes a run's rollouts as one HTML file, without a network."""
