"""Operations counted one by one, and the polynomial through four sizes."""

from __future__ import annotations

import numpy as np
import torch

from trl_ext.tools.estimate.costs.operations import Counter, Polynomial, Work, fit


def test_products_views_and_the_rest_are_told_apart() -> None:
    left, right = torch.zeros(2, 3), torch.zeros(3, 4)
    with Counter() as counter:
        product = left @ right  # 2 x 2 x 3 x 4 FLOPs on 6 + 12 + 8 numbers
        product.view(8)
        product + product  # 3 x 8 numbers
    assert counter.totals.tolist() == [48, 4 * 26, 4 * 24, 3]


def test_products_that_add_in_place_are_counted() -> None:
    total, left, right = torch.zeros(2, 4), torch.zeros(2, 3), torch.zeros(3, 4)
    with Counter() as counter:
        total.addmm_(left, right)
    assert counter.totals[0] == 48


def test_an_embedding_reads_its_rows_and_not_the_table() -> None:
    table = torch.zeros(1000, 8)
    with Counter() as counter:
        torch.nn.functional.embedding(torch.tensor([1, 2]), table)
    assert counter.totals[2] == 2 * 2 * 8 * 4


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    query, key = torch.zeros(1, 4, 5, 8, requires_grad=True), torch.zeros(1, 4, 7, 8, requires_grad=True)
    with Counter() as forward:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert forward.totals[0] == 2 * (2 * 4 * 5 * 7 * 8)
    with Counter() as backward:
        out.sum().backward()
    assert backward.totals[0] == 5 * (2 * 4 * 5 * 7 * 8)


def test_four_sizes_fix_the_four_terms() -> None:
    truth = np.array([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2], [30, 0, 0, 0]])
    found = fit(lambda q, past: truth @ np.array([1, q, q * (q + past), q + past]))
    assert np.allclose(found.coefficients, truth)
    # three rows of 10 queries and 20 keys: 1 + 2 * 30 + 3 * 600 + 4 * 60
    assert round(found(3, 10, 20).flops) == 2101


def test_work_adds_up_and_multiplies() -> None:
    once = Work(flops=1, product_bytes=2, other_bytes=3, operations=4, wire_bytes=5)
    assert once + once == once * 2
    one = Polynomial(np.ones((4, 4)))
    assert ((one + one) - one)(1, 1, 1) == one(1, 1, 1)
