"""`python -m trl_ext.hub`: push what an earlier run could not."""

from trl_ext.hub.push import main

main()
