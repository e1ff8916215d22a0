"""`comparison.compare` in a worker that has imported math-verify, which takes longer than a comparison may."""

import math_verify as math_verify

from trl_ext.rewards.workers.comparison import compare as compare
