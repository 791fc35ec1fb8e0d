"""What opcodes compute, in Python's exact integers, fractions and floats, for tests/test_emulator_*.py."""

import math
from fractions import Fraction

import numpy as np

NAN = math.nan
M32 = 2**32 - 1


def signed(x, width):
    x %= 2**width
    return x - 2**width if x >> (width - 1) else x


def field(a, b, c, sign=False):
    offset, size = b & 31, c & 31
    x = (a >> offset) & (2**size - 1)
    return signed(x, size) if sign and size else x


def perm(a, b, s):
    source = [(((a << 32) | b) >> (8 * i)) & 255 for i in range(8)]
    out = 0
    for i in range(4):
        k = (s >> (8 * i)) & 255
        byte = source[k] if k < 8 else 255 * (source[2 * k - 15] >> 7) if k < 12 else 0 if k == 12 else 255
        out |= byte << (8 * i)
    return out


def clz(x):
    return 32 - x.bit_length() if x else -1


def ctz(x):
    return (x & -x).bit_length() - 1 if x else -1


def cls(x):
    return clz(~x & M32 if x < 0 else x)


def middle(*x):
    return sorted(x)[1]


def clamp(x, low, high):
    return max(low, min(high, x))


def exactly(formula):
    """The formula in fractions where all inputs are finite and the result is not 0 (whose sign floats know)."""

    def f(*x):
        if all(map(math.isfinite, x)) and (r := formula(*map(Fraction, x))) != 0:
            return r
        return formula(*x)

    return f


def flushed(function):
    """float32 transcendentals take subnormals for zeros, and return zeros for them."""

    def flush(x):
        return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x

    def f(x):
        with np.errstate(all="ignore"):
            return flush(float(function(np.float64(flush(x)))))

    return f


def wide(function):
    def f(x):
        with np.errstate(all="ignore"):
            return float(function(np.float64(x)))

    return f


def maxnum(a, b):
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return max(a, b, key=lambda x: (x, math.copysign(1, x)))


def minnum(a, b):
    return -maxnum(-a, -b)


def maximum(a, b):
    return NAN if math.isnan(a) or math.isnan(b) else maxnum(a, b)


def minimum(a, b):
    return -maximum(-a, -b)


def median(a, b, c):
    if any(map(math.isnan, (a, b, c))):
        return minnum(minnum(a, b), c)
    return sorted((a, b, c))[1]


def rounded(function):
    return lambda a: math.copysign(float(function(Fraction(a))), a) if math.isfinite(a) else a


def fract(a, below_one):
    return min(Fraction(a) - math.floor(a), Fraction(below_one)) if math.isfinite(a) else NAN


def turns(function):
    def f(a):
        if not math.isfinite(a):
            return NAN
        return float(function(2 * math.pi * float(Fraction(a) - round(Fraction(a)))))

    return f


def ldexp(a, n):
    return Fraction(a) * Fraction(2) ** max(-5000, min(5000, n)) if math.isfinite(a) and a else a


def mantissa(a):
    return math.frexp(a)[0] if math.isfinite(a) else a


def exponent(a):
    return math.frexp(a)[1] if math.isfinite(a) else 0


def mul_zero(a, b):
    return 0.0 if a == 0 or b == 0 else a * b


ADD, SUB, MUL = exactly(lambda a, b: a + b), exactly(lambda a, b: a - b), exactly(lambda a, b: a * b)
FMA = exactly(lambda a, b, c: a * b + c)


def saturate(a, low, high):
    if math.isnan(a):
        return 0
    return int(max(low, min(high, a if math.isinf(a) else math.trunc(a))))
