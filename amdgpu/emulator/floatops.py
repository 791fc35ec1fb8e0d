"""Float comparisons, minima and maxima as the hardware defines them, for any float dtype."""

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
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    if a.dtype.kind != "f":
        return middle
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minnum(minnum(a, b), c), middle)


def _unordered(a, b):
    return np.isnan(a) | np.isnan(b)


#: Relations of the compare opcodes. The negated ones (nlt ...) hold for NaN; "lg" is less or greater.
COMPARE = {
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}
COMPARE["tru"] = COMPARE["t"]
