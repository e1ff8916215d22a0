"""`python -m trl_ext.tools.estimate`: the estimate for a run that is about to start, without GPUs.

Reads a pickled (PlannedRun, bytes of a GPU) from standard input, which only `before_run.estimate_in_subprocess` writes,
and prints a line of JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from functools import partial

from datasets import disable_progress_bars

from trl_ext.tools.estimate.before_run import VERDICT
from trl_ext.tools.estimate.memory.limits import preempting, refusal
from trl_ext.tools.estimate.memory.step import estimate_memory
from trl_ext.tools.estimate.planned import NoEstimateError

if __name__ == "__main__":
    disable_progress_bars()
    asked, of_gpu = pickle.load(sys.stdin.buffer)
    try:
        memory = estimate_memory(asked, of_gpu)
        reason = refusal(asked, memory, partial(estimate_memory, capacity=of_gpu))
        slows = preempting(asked, memory)
    except NoEstimateError as error:
        sys.exit(str(error))
    verdict = {"refusal": reason, "peak": memory.peak, "bytes": memory.total(memory.peak), "slows": slows}
    verdict["paged"] = memory.paged
    print(f"\n{VERDICT}{json.dumps(verdict)}")
