"""The second half of pass (a): A = (I + M)^-1 for the strictly lower triangular M [C, C] of each chunk.

    blocks    forward substitution inside the 16 x 16 diagonal blocks: one column a lane, a row after the other
    solve     the blocks below: X_ij = -Y_i (M_ij Y_j + ... + M_i,i-1 X_i-1,j), by products; then `solve` = A diag(beta)

M and the blocks pass through memory: a lane of the first step reads what other lanes of the locals wrote, and the
second wants the columns as a tile. In registers both would pass through exchanges between lanes, fifteen times
(`benchmarks/NOTES.md`). So they are kernels of their own, or parts of one with barriers (`kernel.prepare_body`).
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from gated_delta import grid
from gated_delta.grid import BLOCK, Problem
from gated_delta.tiles import columns, dot, is_nvidia, load_tile, load_tokens, split_terms, store_tile


def product(x, y, p: Problem, architecture):
    """x y of two blocks in fp32: to fp32's accuracy for fp32 inputs, else to 2^-16 of it, by three bf16 products."""
    if p.dtype == jnp.float32:
        # Six bf16 products are as accurate as three TF32 products, and need fewer registers.
        preset = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        return dot(x, y, preset if is_nvidia(architecture) else lax.Precision.HIGHEST)
    (x, x_rest), (y, y_rest) = split_terms(x, jnp.bfloat16, 2), split_terms(y, jnp.bfloat16, 2)
    return dot(x, y) + (dot(x, y_rest) + dot(x_rest, y))


def blocks_body(program, window, ins, outs, *, p: Problem):
    """X of (I + M_block) X = I for the diagonal blocks of several chunks: lane j has column j of its chunk."""
    substitute(ins["gram"], outs["blocks"], *grid.block_columns(program, lax.iota(jnp.int32, grid.BLOCK_LANES), p))


def substitute(gram, blocks, chunk, column):
    """The work of `blocks_body`: a lane has column `column` of chunk `chunk`, an index into both buffers."""
    first = column // BLOCK * BLOCK
    x = []
    for i in range(BLOCK):
        row = jnp.where(column % BLOCK == i, 1.0, 0.0)
        for s in range(i):
            row = row - plgpu.load(gram.at[*chunk, first + i, first + s]) * x[s]
        x.append(row)
    for i in range(BLOCK):
        plgpu.store(blocks.at[*chunk, first + i, column % BLOCK], x[i])


def solve_body(program, window, ins, outs, *, p: Problem, architecture):
    """One chunk of one head: from the inverses Y_i of the diagonal blocks to that of the whole, times diag(beta)."""
    count = p.config.chunk_size // BLOCK
    block = [columns(i * BLOCK, BLOCK, BLOCK) for i in range(count)]
    inverses = [load_tile(ins["blocks"], (), rows, block[0]) for rows in block]
    for j in range(count):
        x = {j: inverses[j]}
        for i in range(j + 1, count):
            # M is loaded where it is used: all of its blocks at once would spill.
            below = [load_tile(ins["gram"], (), block[i], block[k]) for k in range(j, i)]
            terms = [product(m, x[k], p, architecture) for k, m in enumerate(below, j)]
            x[i] = -product(inverses[i], functools.reduce(jnp.add, terms), p, architecture)
        strength = load_tokens(ins["strength"], (), block[j])
        for i in range(count):
            solve = x[i] * strength[None, :] if i >= j else jnp.zeros((BLOCK, BLOCK), jnp.float32)
            for term, part in enumerate(split_terms(solve, p.dtype, p.terms)):
                store_tile(outs["solve"], (term,), block[i], block[j], part)
