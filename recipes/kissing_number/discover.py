"""A language model looks for kissing configurations; the exact verifier judges what it writes.

    python recipes/kissing_number/discover.py --base_url http://localhost:8000/v1 --strategy islands --max_calls 200
    python recipes/kissing_number/discover.py --strategy hybrid --max_seconds 3600 --concurrency 8
    python recipes/kissing_number/discover.py --task polisher --strategy refine --output_dir runs/kissing_polisher
    python recipes/kissing_number/discover.py ... --resume
    python recipes/kissing_number/discover.py --replay recipes/kissing_number/scripted/conversation_log.json

The key is read from OPENAI_API_KEY; a local server needs none. The folder runs/kissing_number then has report.md,
score.png, best.py and conversation_log.json with every message and verdict. Ctrl-C waits for requests in
flight; --resume resumes the run, and first judges unjudged answers. --replay needs no model: the answers of an
earlier run go through the same loop, sandbox and report. README.md in this folder describes the strategies.
"""

from __future__ import annotations

from polisher_problem import polisher
from problem import constructor

from trl_ext.tools.discovery.command import discover

if __name__ == "__main__":
    discover({"constructor": constructor, "polisher": polisher}, __doc__, "runs/kissing_number")
