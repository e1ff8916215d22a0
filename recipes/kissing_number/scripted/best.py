# Attempt 10, made by the answer. 499 points, minimum squared distance 36 >= maximum squared norm 36

from itertools import product
points = [[s if i == k else 0 for i in range(11)] for k in range(8) for s in (6, -6)]
for word in "0128 0146 0159 017A 023A 0256 0279 0349 0358 0367 045A 0478 1239 1245 126A 1347 135A 1368 1578 1679 2348 2357 2469 247A 2678 346A 3569 4568 4579 567A".split():
    for signs in product((3, -3), repeat=4):
        values = dict(zip((int(c, 11) for c in word), signs))
        points.append([values.get(i, 0) for i in range(11)])
points += [[0] * 8 + [4, 4, 2], [0] * 8 + [-4, -4, -2], [0] * 8 + [-4, 4, 2]]
