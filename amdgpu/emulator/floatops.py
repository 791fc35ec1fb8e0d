"""Float comparisons, minima and maxima as the hardware defines them, for any float dtype."""

import operator

import numpy as np

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def maxnum(a, b):
    """IEEE maxNum: the other operand where one is NaN; +0 above -0."""
    r = np.fmax(a, b)
    return _order_zeros(r, a, b, np.bitwise_and)


def minnum(a, b):
    """IEEE minNum: the other operand where one is NaN; -0 below +0."""
    r = np.fmin(a, b)
    return _order_zeros(r, a, b, np.bitwise_or)


def _order_zeros(r, a, b, combine):
    zero = r == 0
    if zero.any():
        # Zeros differ in the sign bit only: the larger one is the AND of the bits, the smaller one the OR.
        unsigned = _BITS[r.dtype.itemsize]
        bits = combine(np.asarray(a).view(unsigned), np.asarray(b).view(unsigned)).view(r.dtype)
        r = np.where(zero & (a == b), bits, r)
    return r


def maximum(a, b):
    """IEEE 754-2019 maximum: NaN where either is NaN; +0 above -0."""
    return np.where(np.isnan(a) | np.isnan(b), np.asarray(a).dtype.type(np.nan), maxnum(a, b))


def minimum(a, b):
    """IEEE 754-2019 minimum: NaN where either is NaN; -0 below +0."""
    return np.where(np.isnan(a) | np.isnan(b), np.asarray(a).dtype.type(np.nan), minnum(a, b))


def median(a, b, c):
    """The middle one of three; where one is NaN, the smallest of the others."""
    # c, kept between the other two.
    low, high = np.minimum(a, b), np.maximum(a, b)
    middle = np.minimum(np.maximum(c, low), high)
    if a.dtype.kind != "f":
        return middle
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minnum(minnum(a, b), c), middle)


def _unordered(a, b):
    return np.isnan(a) | np.isnan(b)


def _negated(relation):
    return lambda a, b: ~relation(a, b)


#: Relations of the compare opcodes; "lg" is less or greater, "o" ordered and "u" unordered.
COMPARE = {
    # "ne" is the integers' name for neq.
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "lg": lambda a, b: ~((a == b) | _unordered(a, b)),
    "u": _unordered,
    "o": _negated(_unordered),
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}
# The negated ones hold for NaN.
COMPARE |= {f"n{name}": _negated(COMPARE[name]) for name in ("lt", "le", "gt", "ge", "eq", "lg")}
COMPARE["tru"] = COMPARE["t"]
