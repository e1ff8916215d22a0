"""`python -m trl_ext.tools.foresight`: foresees what a run that is about to start hands over, without GPUs.

Reads a pickled (RunShape, bytes of a GPU) from standard input, which only `before_run.foresee_apart` writes, and prints
a line of JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from functools import partial

from datasets import disable_progress_bars

from trl_ext.tools.foresight.before_run import VERDICT
from trl_ext.tools.foresight.memory.limits import preempting, refusal
from trl_ext.tools.foresight.memory.step import foresee
from trl_ext.tools.foresight.shape import UnforeseenError

if __name__ == "__main__":
    disable_progress_bars()
    asked, of_gpu = pickle.load(sys.stdin.buffer)
    try:
        found = foresee(asked, of_gpu)
        reason = refusal(asked, found, partial(foresee, capacity=of_gpu))
        slows = preempting(asked, found)
    except UnforeseenError as error:
        sys.exit(str(error))
    verdict = {"refusal": reason, "peak": found.peak, "bytes": found.total(found.peak), "slows": slows}
    print(f"\n{VERDICT}{json.dumps(verdict)}")
