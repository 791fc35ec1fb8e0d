"""The orders of workgroups, enumerated: every tile once, and which die reads which keys."""

import numpy as np
import pytest

from flash import grid

SWEEP = [
    (B, H, G, Q, X)
    for H in (*range(1, 17), 20, 24, 32, 40, 48, 64, 96, 128)
    for G in range(1, H + 1)
    if H % G == 0
    for Q in (1, 2, 3, 7, 8, 16, 63, 64)
    for B in (1, 2, 3, 4)
    for X in (1, 4, 8)
]


def tiles(order, B, H, G, Q, X):
    """(b, h, q) of every workgroup."""
    return grid.ORDERS[order](np.arange(B * H * Q), B, H, G, Q, X)


def fault_of(order, shape):
    """What is wrong with an order for one shape; None where every tile is computed once."""
    B, H, G, Q, X = shape
    b, h, q = order(np.arange(B * H * Q), B, H, G, Q, X)
    inside = (b >= 0) & (b < B) & (h >= 0) & (h < H) & (q >= 0) & (q < Q)
    if not inside.all():
        return "outside"
    return None if np.unique((b * H + h) * Q + q).size == B * H * Q else "twice"


@pytest.mark.parametrize("order", grid.ORDERS)
def test_orders_are_bijections(order):
    for shape in SWEEP:
        H, X = shape[1], shape[4]
        if order == "swizzled_head_first" and H % X:
            with pytest.raises(ValueError, match=f"X = {X} dies, got H = {H}"):
                grid.check_order(order, H, X)
        else:
            assert fault_of(grid.ORDERS[order], shape) is None, shape


@pytest.mark.parametrize("order", grid.ORDERS)
def test_a_planted_off_by_one_is_seen(order):
    def broken(w, *shape):
        b, h, q = grid.ORDERS[order](w, *shape)
        return b, h, (q + (w == 3)) % shape[3]

    assert fault_of(broken, (1, 8, 2, 4, 4)) == "twice"


def test_kv_group_first_keeps_a_kv_head_on_one_die():
    for B, H, G, Q, X in SWEEP:
        if B * G % X == 0:
            b, h, _ = tiles("kv_group_first", B, H, G, Q, X)
            die = np.arange(B * H * Q) % X
            group = b * G + grid.group_of(h, H, G)
            # One die for each KV head: as many (KV head, die) pairs as KV heads.
            assert np.unique(group * X + die).size == B * G, (B, H, G, Q, X)


def work_by_die(order, B, H, G, Q, X):
    """Causal work, q + 1 for query block q, by die: its maximum over its mean."""
    _, _, q = tiles(order, B, H, G, Q, X)
    work = np.bincount(np.arange(q.size) % X, weights=q + 1, minlength=X)
    return work.max() / work.mean()


def test_causal_work_is_even_where_kv_heads_are():
    for shape in SWEEP:
        B, _, G, _, X = shape
        if B * G % X == 0:
            assert work_by_die("kv_group_first", *shape) == 1


@pytest.mark.parametrize("Q", [8, 16, 64])
def test_head_first_gives_late_blocks_to_the_last_die(Q):
    """With Q a multiple of X, die x has the blocks q = x, x + X, ...: its work is 1 + (X - 1) / (Q + 1) of the mean."""
    X = 8
    assert work_by_die("head_first", 1, 64, 64, Q, X) == pytest.approx(1 + (X - 1) / (Q + 1), rel=1e-12)


def test_swizzle_keeps_a_head_on_one_die():
    b, h, _ = tiles("swizzled_head_first", 2, 16, 4, 8, 8)
    assert np.unique((b * 16 + h) * 8 + np.arange(h.size) % 8).size == 2 * 16


@pytest.mark.parametrize("order", grid.ORDERS)
def test_pictures_are_true(order):
    """The table in the docstring is the order at B = 1, H = 4, G = 2, Q = 2, X = 2."""
    rows = [line.split("|")[1].split() for line in grid.ORDERS[order].__doc__.splitlines() if "|" in line]
    picture = {(h, q): int(w) for h, row in enumerate(rows) for q, w in enumerate(row)}
    _, h, q = tiles(order, 1, 4, 2, 2, 2)
    assert {(int(a), int(b)): w for w, (a, b) in enumerate(zip(h, q, strict=True))} == picture
