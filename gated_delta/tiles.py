"""What kernels of the gated delta rule share: tiles, their loads and stores, products, and the call of a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gated_delta import grid
from gated_delta.grid import Problem


class Axis(NamedTuple):
    """One axis of a tile: where its elements are, and which of them exist (None: all)."""

    index: jax.Array
    mask: jax.Array | None


def columns(start, size, tile_size) -> Axis:
    """`size` consecutive elements from `start`, in a tile of `tile_size`."""
    offset = lax.iota(jnp.int32, tile_size)
    return Axis(start + offset, None if size == tile_size else offset < size)


def tile_mask(rows: Axis, cols: Axis, also=None):
    """The mask of a 2-D tile, None where all of it exists; `also` is a scalar condition."""
    masks = [rows.mask, cols.mask, also]
    views = [
        m[i] if m.ndim else m for m, i in zip(masks, ((..., None), (None, ...), ...), strict=True) if m is not None
    ]
    if not views:
        return None
    mask = views[0]
    for view in views[1:]:
        mask = mask & view
    return jnp.broadcast_to(mask, (rows.index.size, cols.index.size))


def load(ref, mask):
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0.0)


def load_tile(ref, at, rows: Axis, cols: Axis):
    """The tile ref[*at, rows, cols]; 0 where it does not exist."""
    return load(ref.at[*at, rows.index[:, None], cols.index[None, :]], tile_mask(rows, cols))


def store_tile(ref, at, rows: Axis, cols: Axis, value):
    plgpu.store(ref.at[*at, rows.index[:, None], cols.index[None, :]], value, mask=tile_mask(rows, cols))


def load_tokens(ref, at, rows: Axis):
    """Per-token numbers ref[*at, rows] in fp32."""
    return load(ref.at[*at, rows.index], rows.mask).astype(jnp.float32)


def token_rows(p: Problem, ins, chunk) -> tuple[Axis, Axis]:
    """The tokens of a chunk, to load and to store; chunks count from the first of all windows.

    A load beyond the last token reads that one again: a mask would cost the scan a branch and an address for each few
    rows. With g = beta = 0 such a row is inert, and its output is not stored. Only packed sequences mask their loads:
    what lies beyond is another sequence's, and may be NaN.
    """
    offset = lax.iota(jnp.int32, p.config.chunk_size)
    if p.sequences is None:
        rows = chunk * p.config.chunk_size + offset
        return Axis(jnp.minimum(rows, p.seq_len - 1), None), Axis(rows, rows < p.seq_len)
    known = jnp.minimum(chunk, p.chunks - 1)
    length = jnp.where(chunk < p.chunks, ins["table"][known, grid.LENGTH], 0)
    rows = Axis(ins["table"][known, grid.START] + offset, offset < length)
    return rows, rows


def dot(x, y, precision: lax.Precision | lax.DotAlgorithmPreset = lax.Precision.DEFAULT):
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision, preferred_element_type=jnp.float32)


def product_precision(p: Problem, architecture):
    """How a product of q, k, v, states and updates keeps fp32 accuracy for fp32 inputs.

    By default it would be a single TF32 (or XF32) product. Never None, which is what `jax.default_matmul_precision`
    says.
    """
    if p.dtype != jnp.float32:
        return lax.Precision.DEFAULT
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if is_nvidia(architecture) else lax.Precision.HIGHEST


def is_nvidia(architecture):
    return architecture is not None and architecture.startswith("sm")


def split_terms(x, dtype, terms):
    """x (fp32) as a sum of `terms` values of `dtype`, the largest first: one, or two of bf16.

    The first of two is cut off, not rounded: cutting is one instruction where rounding to bf16 may be six, and the
    second, which is rounded, takes what is left.
    """
    if terms == 1:
        return [x.astype(dtype)]
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    first = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    rest = x - lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return [first, rest.astype(jnp.bfloat16)]


def transposed(x, architecture):
    """x^T in fp32 of a tile [C, V / dv_splits].

    On NVIDIA GPUs by the matrix unit, as I x^T, which is exact: each element times 1, and zeros. The result is where
    other products leave theirs, and x is copied ahead as their operands are. An exchange between lanes through shared
    memory is in the way of all loads before it: the scan spilled. A NaN or infinity spreads over its row of x.
    """
    if x.dtype == jnp.float32 or not is_nvidia(architecture):
        return x.astype(jnp.float32).T
    row, col = (lax.broadcasted_iota(jnp.int32, (x.shape[1], x.shape[1]), d) for d in range(2))
    return dot((row == col).astype(x.dtype), x.T)


def terms_of_rows(x):
    """x [C] in fp32 as a tile [16, C] of bf16 whose rows add up to it: three terms, and zeros."""
    first, _ = split_terms(x, jnp.bfloat16, 2)
    terms = [first, *split_terms(x - first.astype(jnp.float32), jnp.bfloat16, 2)]
    row = lax.broadcasted_iota(jnp.int32, (grid.BLOCK, x.size), 0)
    tile = jnp.zeros((grid.BLOCK, x.size), jnp.bfloat16)
    for n, term in enumerate(terms):
        tile = jnp.where(row == n, term[None, :], tile)
    return tile


def sum_of_terms(tile, rows):
    """The x of `terms_of_rows` in each of `rows` rows, by a product with ones: for the reasons of `transposed`."""
    return dot(jnp.ones((rows, tile.shape[0]), tile.dtype), tile)


def call(body, name, p: Problem, plan: grid.Plan, operands: dict, interpret):
    """`pl.pallas_call` with operands and results by name; a result that is an operand too is updated in place."""
    ins, outs = sorted(plan.in_specs), sorted(plan.out_specs)
    # Under shard_map a result varies over the mesh axes that its operands vary over (see `vary_alike`).
    varies = jax.typeof(operands[ins[0]]).manual_axis_type
    return pl.pallas_call(
        body,
        grid=plan.grid,
        in_specs=[plan.in_specs],
        out_specs=plan.out_specs,
        out_shape={
            n: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=varies) for n, s in plan.out_shape.items()
        },
        input_output_aliases={i: outs.index(n) for i, n in enumerate(ins) if n in outs},
        compiler_params=plgpu.CompilerParams(num_warps=plan.num_warps, num_stages=p.config.num_stages),
        interpret=interpret,
        name=name,
    )({n: operands[n] for n in ins})
