"""A language model looks for Golomb rulers: the smallest example of your own problem for the discovery loop.

python recipes/golomb_ruler/discover.py --base_url http://localhost:8000/v1 --strategy islands --max_calls 50

The folder runs/golomb_ruler then has report.md, best.py and conversation_log.json.
"""

from __future__ import annotations

from problem import ruler

from trl_ext.tools.discovery.command import discover

if __name__ == "__main__":
    discover({"ruler": ruler}, __doc__, "runs/golomb_ruler")
