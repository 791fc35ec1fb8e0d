"""The second half of pass (a): A = (I + M)^-1 for the strictly lower triangular M [C, C] of each chunk.

    blocks    forward substitution inside the 16 x 16 diagonal blocks: one column a lane, a row after the other
    solve     block doubling: with Y the inverse of the diagonal blocks of n rows, Y (I - M_off Y) is that of the
              blocks of 2 n rows; then `solve` = A diag(beta)

Two kernels, because a lane of the first reads what other lanes of the locals wrote, and the second wants the columns
as a tile. In one kernel both would pass through exchanges between lanes, fifteen times (`benchmarks/NOTES.md`).
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from gated_delta import grid
from gated_delta.grid import BLOCK, Problem
from gated_delta.tiles import dot, is_nvidia, split_terms


def product(x, y, p: Problem, architecture):
    """x y for fp32 [C, C]: to fp32's accuracy for fp32 inputs, else to 2^-16 of it, by three bf16 products."""
    if p.dtype == jnp.float32:
        # Six bf16 products are as accurate as three TF32 products, and need fewer registers.
        preset = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        return dot(x, y, preset if is_nvidia(architecture) else lax.Precision.HIGHEST)
    (x, x_rest), (y, y_rest) = split_terms(x, jnp.bfloat16, 2), split_terms(y, jnp.bfloat16, 2)
    return dot(x, y) + (dot(x, y_rest) + dot(x_rest, y))


def blocks_body(program, window, ins, outs, *, p: Problem):
    """X of (I + M_block) X = I for the diagonal blocks of several chunks: lane j has column j of its chunk."""
    chunk, column = grid.block_columns(program, lax.iota(jnp.int32, grid.BLOCK_LANES), p)
    first = column // BLOCK * BLOCK
    x = []
    for i in range(BLOCK):
        row = jnp.where(column % BLOCK == i, 1.0, 0.0)
        for s in range(i):
            row = row - plgpu.load(ins["gram"].at[*chunk, first + i, first + s]) * x[s]
        x.append(row)
    for i in range(BLOCK):
        plgpu.store(outs["blocks"].at[*chunk, first + i, column % BLOCK], x[i])


def solve_body(program, window, ins, outs, *, p: Problem, architecture):
    """One chunk of one head: from the inverses of the diagonal blocks to that of the whole, times diag(beta)."""
    c = p.config.chunk_size
    row, col = (lax.broadcasted_iota(jnp.int32, (c, c), d) for d in range(2))
    y = plgpu.load(ins["blocks"].at[row, col % BLOCK], mask=row // BLOCK == col // BLOCK, other=0.0)
    n = BLOCK
    while n < c:
        below = (row // n % 2 == 1) & (col // n == row // n - 1)
        off = plgpu.load(ins["gram"].at[row, col], mask=below, other=0.0)
        y = product(y, jnp.where(row == col, 1.0, 0.0) - product(off, y, p, architecture), p, architecture)
        n *= 2
    solve = y * ins["strength"][...][None, :]
    for term, part in enumerate(split_terms(solve, p.dtype, p.terms)):
        outs["solve"][term] = part
