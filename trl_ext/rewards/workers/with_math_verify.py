"""`comparison.compare` in a worker that has imported math-verify, which takes longer than a comparison may."""

import importlib

from trl_ext.rewards.workers.comparison import compare as compare

importlib.import_module("math_verify")  # of an extra, and not used by name here
