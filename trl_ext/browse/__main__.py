"""`python -m trl_ext.browse`: a run's rollouts as one HTML file."""

from trl_ext.browse.command import main

main()
