"""600 integer points of a kissing configuration in dimension 11, as `points`; construction.md has the argument.

On the sphere of radius 2h (h = HALF), where two points may have an inner product of at most 2h^2:

1. core, 496 points: +-2h on one of the coordinates 0..7, and +-h on each of 30 supports of four coordinates;
2. belts, 96 points: (+-h, +-h) on one of four pairs of coordinates leaves half of the squared norm for the coordinates
   8, 9, 10, where six vectors at right angles, +-w1, +-w2, +-w3, may share a pair and its signs. Sixteen choices of
   pair and signs, each with a frame of its own: two of them add at most |w|^2 = 2h^2 to an inner product;
3. cube, 8 points on the coordinates 8, 9, 10 alone: the directions farthest from all frames.

The core touches itself exactly. Turning the frames a little against each other gives all other pairs room, about 5e-6
of the squared radius, so that rounding to integers does no harm.
"""

from itertools import product
from math import isqrt

HALF = 10**8
RADIUS = 2 * HALF

SUPPORTS = """0128 0146 0159 017A 023A 0256 0279 0349 0358 0367 045A 0478 1239 1245 126A
              1347 135A 1368 1578 1679 2348 2357 2469 247A 2678 346A 3569 4568 4579 567A""".split()
PAIRS = ((0, 6), (1, 4), (2, 5), (3, 7))  # those that no support holds together with 8, 9 or 10

SHORTER = 600  # what the entries on a pair fall short of HALF, for the other three coordinates to be longer
MEAN = 250  # frame k is made of MEAN + k and MEAN - k, for 16 odd k: half a degree from one to the next


def vector(entries):
    """{coordinate: value} -> 11 integers."""
    return [entries.get(k, 0) for k in range(11)]


def core():
    axes = [vector({k: sign * RADIUS}) for k in range(8) for sign in (1, -1)]
    supports = [[int(digit, 16) for digit in support] for support in SUPPORTS]
    signs = list(product((HALF, -HALF), repeat=4))
    return axes + [vector(dict(zip(support, values, strict=True))) for support in supports for values in signs]


def frame(k, length):
    """Three orthogonal vectors of a length: (2, 2, -1), (-1, 2, 2), (2, -1, 2), turned around (1, 1, 1).

    The cyclic shifts of (x(x+y), y(x+y), -xy) are orthogonal, since the products of its entries add up to
    xy(x+y)^2 - xy^2(x+y) - x^2y(x+y) = 0, and of the integer norm x^2 + xy + y^2.
    """
    x, y = MEAN + k, MEAN - k
    a, b = x * (x + y) * length // (x * x + x * y + y * y), y * (x + y) * length // (x * x + x * y + y * y)
    c = -(x * y * length // (x * x + x * y + y * y))
    return (a, b, c), (c, a, b), (b, c, a)


def belts():
    entry = HALF - SHORTER
    length = isqrt(RADIUS**2 - 2 * entry**2)
    choices = product(PAIRS, (entry, -entry), (entry, -entry))
    return [
        vector({i: first, j: second, 8: sign * w[0], 9: sign * w[1], 10: sign * w[2]})
        for k, ((i, j), first, second) in zip(range(-15, 16, 2), choices, strict=True)
        for w in frame(k, length)
        for sign in (1, -1)
    ]


def cube():
    unit = isqrt(RADIUS**2 // 27)
    corners = ((3, 3, 3), (5, -1, -1), (-1, 5, -1), (-1, -1, 5))
    return [vector({8 + i: sign * unit * value for i, value in enumerate(c)}) for c in corners for sign in (1, -1)]


points = core() + belts() + cube()
