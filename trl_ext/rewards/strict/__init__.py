r"""Is an answer mathematically right? Accepts equal values in any usual spelling and pays for nothing else.

Rules where mathematics leaves a choice:

* Units, currency signs and `x =` may be left out on either side; where both sides have them they must agree
  (`1 \text{ km}` is `1000` m). A listed noun follows the same rule (`5 apples`); other words after a number are
  accepted only where the truth has them. `5\text{ hundred}` is 500.
* `44\%` as truth accepts `44%`, `44` and `0.44`; `44` and `0.44` as truth do not accept `44%`, nor 5 `5 cents`.
* A time that looks like `10:30` is compared as it stands, other ratios by their proportion (`6:4` is `3:2`).
* Lists without brackets and sets are unordered, and a set of one is its element; tuples, intervals, ratios and matrices
  are ordered, and their brackets count.
* Several answers are right only where the truth has as many: `9 or 8` is not `9`.
* Decimals are exact: `0.333` is not `1/3`. Mixed numbers are sums: `3\frac{1}{2}` is `7/2`.
* A numeral with a base needs the same digits, and the base only where both sides give it.
"""

from trl_ext.rewards.strict.compare import Comparison, can_read, compare

__all__ = ["Comparison", "can_read", "compare"]
