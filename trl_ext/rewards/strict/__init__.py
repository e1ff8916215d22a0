r"""Is an answer mathematically correct? Accepts equal values in any usual spelling and nothing else.

Rules where mathematics leaves a choice:

* Units, currency signs and names (`x =`, `|PQ| =`, `(a, b) =`) may be left out on either side; where both sides have
  them they must agree (`1 \text{ km}` is `1000` m). A listed noun follows the same rule (`5 apples`); other words after
  a number are accepted only where the reference has them. `5\text{ hundred}` is 500.
* `44\%` as reference accepts `44%`, `44` and `0.44`; `44` and `0.44` as reference do not accept `44%`, nor 5 `5 cents`,
  except 44 where the problem is known and asks "what percent".
* `3 ft 2 in` is one length, `38 in`, and no number. Degrees may be Celsius or Fahrenheit, as the reference says, and
  pounds a mass or money.
* A text like `10:30` or `3 pm` is a time of day, of 12 or 24 hours, except after `a:b =`; other
  ratios are compared by proportion (`6:4` is `3:2`).
* Lists without brackets and sets are unordered, and a set of one is its element; tuples, intervals, ratios and matrices
  are ordered, and their brackets count. `100,200` is a number, or a list in this order; `(100,200)` is a point, and so
  are `x=100, y=200` in the order of the alphabet and `P(100,200)`. `]1,2[` is the open interval.
* A chain is its last exact member, if its members agree: `y = 4+5 = 9`, `2/7 \approx 0.29`.
* A condition on one unknown is the set of its solutions: `-2x > -6` is `x < 3` is `(-\infty, 3)`,
  `|x| < 2` is `(-2, 2)`, `x \ne 3` is `\mathbb{R}\setminus\{3\}`. One on several unknowns may be a
  multiple: `-2x-2y > -6` is `x+y < 3`.
* Several answers are correct only where the reference has as many: `9 or 8` is not `9`.
* `12 345` is a number. Decimals are exact: `0.333` is not `1/3`. Mixed numbers are sums: `3\frac{1}{2}` is `7/2`.
* A numeral with a base needs the same digits and the base.
* An answer is worked out as far as the reference answer is: `17+25`, `\frac{84}{2}` and `\sqrt{1764}` are not 42,
  `2x+4=10` is not `x=3`, `x+y=6+7` not `x+y=13`, `3(x+4)` not `3x+12`, `x^2+x` not `x(x+1)`. What the reference has
  left to do may be left.
  Powers, factorials and binomials of numbers count as worked out from a million on, and powers of ten: `2^{64}`,
  `20!`, `10^6`, and not `2^{10}` for 1024 or `\binom{10}{3}` for 120. Fractions that are not whole need not be reduced,
  nor radicals simplified; with `worked_out=False` equality is enough.
* Numbers too large to write out are compared by their residues: `1/2004!`. A value for all integers may have another
  parameter where one side says that it is one: `n\pi, n\in\mathbb{Z}` is `k\pi`.
"""

from trl_ext.rewards.strict.compare import PERCENTAGE, compare, is_readable
from trl_ext.rewards.strict.result import Result
from trl_ext.rewards.strict.same_form import has_same_form
from trl_ext.rewards.strict.worked_out import NOT_EXPANDED, NOT_FACTORED

__all__ = ["NOT_EXPANDED", "NOT_FACTORED", "PERCENTAGE", "Result", "compare", "has_same_form", "is_readable"]
