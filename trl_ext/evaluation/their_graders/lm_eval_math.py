"""lm-eval's `hendrycks_math`."""

from __future__ import annotations

from lm_eval.tasks.hendrycks_math.utils import process_results


def hendrycks_math(response: str, reference: str) -> tuple[bool, str]:
    """What stands between the first and the last dollar sign, compared as a text that is tidied up."""
    return bool(process_results({"solution": rf"\boxed{{{reference}}}"}, [response])["exact_match"]), ""
