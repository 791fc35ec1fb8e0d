"""How the work is cut: the window tiling, the V split, and one `plan` for each pass of the prefill and for decode.

A sequence of T tokens is N = ceil(T / C) chunks; W chunks are a window:

    tokens   | 0 .. C-1 | C .. 2C-1 |  ...              | ..  T-1 |
    chunks   |    0     |     1     |  ...   | W |  ...   |   N-1   |
    windows  |           0                   |     1 ...            |

The three passes run window by window over scratch for one window (or two, see below), so scratch is bounded by W, not
by T. Inside a window:

    locals    one program for each (chunk, batch, head)      parallel over everything: nothing here depends on the state
                                                             (three kernels; `blocks` takes several chunks a program;
                                                             or one, `prepare`, under `Config.overlap`)
    scan      one program for each (batch, head, V slice)    serial over the chunks; the columns of the state never mix,
                                                             so a slice of V is a problem of its own
    outputs   one program for each (chunk, batch, head)      parallel over everything: the states are known now
                                                             (or part of the scan: `Config.outputs_in_scan`)

Under `Config.overlap` the scan of a window, which leaves most of a large chip idle, shares its launch with the locals
of the next window (`beside`).

All index functions are pure integer arithmetic (+ - * // %) and serve Python ints and traced program ids alike.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gated_delta.tuning import Config


def num_chunks(seq_len: int, chunk_size: int, num_sequences: int | None = None) -> int:
    """N. With `num_sequences` packed sequences, the most that their ragged ends can need."""
    if num_sequences is None:
        return -(-seq_len // chunk_size)
    return (seq_len + num_sequences * (chunk_size - 1)) // chunk_size


def chunk_program(program, batch, heads):
    """(chunk in window, b, h) of a program of the locals or the outputs; neighbours read neighbouring heads."""
    return program // (batch * heads), program // heads % batch, program % heads


def scan_program(program, heads, dv_splits):
    """(b, h, V slice) of a program of the scan; the slices of a head are neighbours and share its keys in L2."""
    return program // (heads * dv_splits), program // dv_splits % heads, program % dv_splits


# Rows of the diagonal blocks that are inverted by substitution.
BLOCK = 16
# Columns of them, of one or several chunks, that a program inverts.
BLOCK_LANES = 256


def block_columns(program, lane, p):
    """((chunk in window, b, h), column) of a lane of a program of `blocks`. Lanes beyond the end repeat the last."""
    last = p.window_chunks * p.batch * p.heads * p.config.chunk_size - 1
    n = jnp.minimum(program * BLOCK_LANES + lane, last)
    return chunk_program(n // p.config.chunk_size, p.batch, p.heads), n % p.config.chunk_size


def group_of(head, heads, groups):
    """The key head that serves `head`: H // G consecutive heads share one."""
    return head // (heads // groups)


# Columns of `chunk_table`.
START, LENGTH, SEQUENCE, OPENS, CLOSES = range(TABLE_COLUMNS := 5)


def chunk_table(cu_seqlens, seq_len, chunk_size):
    """Where the chunks of packed sequences lie: int32 `[N, 5]`, one row a chunk.

    Columns: first token; tokens (0 for chunks that are not needed); sequence; whether the chunk is its sequence's
    first, and its last. Offsets that do not ascend give unspecified rows, always inside of the sequence.
    """
    sequences = cu_seqlens.size - 1
    starts = jnp.clip(cu_seqlens, 0, seq_len)
    lengths = jnp.maximum(starts[1:] - starts[:-1], 0)
    counts = -(-lengths // chunk_size)
    ends = jnp.cumsum(counts)
    chunk = jnp.arange(num_chunks(seq_len, chunk_size, sequences), dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, chunk, side="right").astype(jnp.int32), sequences - 1)
    in_sequence = chunk - (ends - counts)[sequence]
    length = jnp.clip(lengths[sequence] - in_sequence * chunk_size, 0, chunk_size)
    start = jnp.minimum(starts[sequence] + in_sequence * chunk_size, seq_len)
    opens, closes = (in_sequence == 0) & (length > 0), in_sequence == counts[sequence] - 1
    return jnp.stack([x.astype(jnp.int32) for x in (start, length, sequence, opens, closes)], axis=1)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts of one call.

    `sequences` is R for packed sequences, else None. `has_initial`: initial states are given; `keeps_states`: final
    states are asked for; both are `[rows, H, K, V]`, or V before K with `state_v_first`. `l2norm`: q and k are divided
    by their norms.
    """

    batch: int
    seq_len: int
    groups: int
    heads: int
    key_size: int
    value_size: int
    dtype: jnp.dtype
    config: Config
    sequences: int | None = None
    has_initial: bool = False
    keeps_states: bool = False
    state_v_first: bool = False
    l2norm: bool = False

    @property
    def chunks(self) -> int:
        return num_chunks(self.seq_len, self.config.chunk_size, self.sequences)

    @property
    def windows(self) -> int:
        return -(-self.chunks // self.config.window_chunks)

    @property
    def window_chunks(self) -> int:
        """Chunks of a window: all windows have the same size, so that the last one is not mostly empty."""
        return -(-self.chunks // self.windows)

    @property
    def overlaps(self) -> bool:
        return self.config.overlap and self.windows > 1

    @property
    def carry_rows(self) -> int:
        """Rows of the buffer that takes the state from window to window; 0: one window needs none.

        Where final states are asked for, their buffer is it: a row for each sequence.
        """
        if self.keeps_states:
            return self.state_rows
        return self.batch if self.windows > 1 else 0

    @property
    def state_rows(self) -> int:
        """Rows of initial and final states: one for each batch row, or for each packed sequence."""
        return self.batch if self.sequences is None else self.sequences

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """One row of states, in the user's layout."""
        H, K, V = self.heads, self.key_size, self.value_size
        return (H, V, K) if self.state_v_first else (H, K, V)

    @property
    def in_place(self) -> bool:
        """Whether o is written piece by piece into a buffer that exists before."""
        return self.windows > 1 or self.sequences is not None

    @property
    def key_tile(self) -> int:
        return tile_size(self.key_size)

    @property
    def slice_size(self) -> int:
        return self.value_size // self.config.dv_splits

    @property
    def slice_tile(self) -> int:
        return tile_size(self.slice_size)

    @property
    def terms(self) -> int:
        """How many values of the input dtype stand for one element of `solve`; bf16 needs two (see kernel.py)."""
        return 2 if self.dtype == jnp.bfloat16 else 1

    @property
    def scaled(self) -> bool:
        """fp16 holds states and updates relative to powers of two (see kernel.py)."""
        return self.dtype == jnp.float16

    @property
    def query_terms(self) -> bool:
        """Whether `query_in` is stored as terms of bf16, which the scan adds up by a product (see kernel.py)."""
        return self.l2norm and self.config.outputs_in_scan and self.dtype != jnp.float32


def tile_size(size: int) -> int:
    """The power of two >= 16 that a tile of `size` columns takes in a kernel; the rest is masked."""
    return max(16, pl.next_power_of_2(size))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `pl.pallas_call` is told about one pass, or about several (`beside`); operands and results go by name."""

    grid: tuple[int, ...]
    num_warps: int
    in_specs: dict[Any, pl.BlockSpec]
    out_specs: dict[Any, pl.BlockSpec]
    out_shape: dict[Any, jax.ShapeDtypeStruct]


def scratch(p: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """The buffers of one window, by name, in the order in which the passes write them."""
    window = (p.window_chunks, p.batch, p.heads)
    c = p.config.chunk_size
    f32, dtype = jnp.float32, p.dtype
    buffers = {
        # inside of the locals
        "gram": ((*window, c, c), f32),
        "blocks": ((*window, c, BLOCK), f32),
        "strength": ((*window, c), f32),
        # locals -> scan; `key_in` -> outputs too, without l2norm
        "solve": ((*window, p.terms, c, c), dtype),
        "key_in": ((*window, c), f32),
        "key_out": ((*window, c), f32),
        "decay": (window, f32),
        # locals -> outputs
        "score": ((*window, c, c), dtype),
    }
    if p.l2norm:
        # Three terms and, for a product's tile, 13 rows of zeros.
        buffers["query_in"] = ((*window, BLOCK, c), jnp.bfloat16) if p.query_terms else ((*window, c), f32)
    if p.scaled:
        buffers["key_power"] = (window, f32)
    if not p.config.outputs_in_scan:
        # scan -> outputs
        buffers["update"] = ((*window, p.value_size, c), dtype)
        buffers["state"] = ((*window, p.value_size, p.key_size), dtype)
        if p.scaled:
            buffers["power"] = ((*window, p.value_size), f32)
    return {name: jax.ShapeDtypeStruct(*spec) for name, spec in buffers.items()}


TO_SOLVE = ("gram", "strength")
INSIDE_LOCALS = (*TO_SOLVE, "blocks")


def locals_to_scan(p: Problem) -> tuple[str, ...]:
    """Without `solve`, which is not `plan_locals`'."""
    return ("key_in", "key_out", "decay", *(("key_power",) if p.scaled else ()))


def locals_to_outputs(p: Problem) -> tuple[str, ...]:
    """Without l2norm `query_in` would be `key_in`, which then serves both."""
    return ("score", "query_in" if p.l2norm else "key_in")


def plan_locals(p: Problem) -> Plan:
    """Pass (a): reads q, k, g, beta of a chunk; writes M, and what the scan and the outputs multiply with."""
    tokens = _token_specs(p, lambda program: chunk_program(program, p.batch, p.heads)[1:])
    chunk, buffers = _chunk_specs(p), scratch(p)
    written = (*TO_SOLVE, *locals_to_scan(p), *locals_to_outputs(p))
    return Plan(
        grid=(p.window_chunks * p.batch * p.heads,),
        num_warps=_warps_for(p, p.config.chunk_size // 16),
        in_specs=_position_specs(p) | _pick(tokens, ("q", "k", "g", "beta")),
        out_specs=_pick(chunk, written),
        out_shape=_pick(buffers, written),
    )


def plan_blocks(p: Problem) -> Plan:
    """Pass (a): reads M of all chunks; writes the inverses of the diagonal blocks."""
    buffers = scratch(p)

    def whole(name):
        return pl.BlockSpec(buffers[name].shape, lambda program: (0,) * 5)

    columns = p.window_chunks * p.batch * p.heads * p.config.chunk_size
    return Plan(
        grid=(-(-columns // BLOCK_LANES),),
        num_warps=4,
        in_specs={"gram": whole("gram")},
        out_specs={"blocks": whole("blocks")},
        out_shape=_pick(buffers, ("blocks",)),
    )


def plan_solve(p: Problem) -> Plan:
    """Pass (a): reads M and the inverses of its diagonal blocks; writes `solve`."""
    chunk = _chunk_specs(p)
    return Plan(
        grid=(p.window_chunks * p.batch * p.heads,),
        num_warps=_warps_for(p, 1),
        in_specs=_pick(chunk, (*TO_SOLVE, "blocks")),
        out_specs=_pick(chunk, ("solve",)),
        out_shape=_pick(scratch(p), ("solve",)),
    )


def plan_prepare(p: Problem) -> Plan:
    """Pass (a) as one kernel, under `Config.overlap`: what `plan_locals`, `plan_blocks` and `plan_solve` write.

    It has the scan's number of warps where it is launched alone too: windows must not change a bit.
    """
    plan = dataclasses.replace(plan_locals(p), num_warps=p.config.num_warps)
    chunk, buffers = _chunk_specs(p), scratch(p)
    plan.out_specs.update(_pick(chunk, ("blocks", "solve")))
    plan.out_shape.update(_pick(buffers, ("blocks", "solve")))
    return plan


def plan_scan(p: Problem) -> Plan:
    """Pass (b): carries the state over a window; writes each chunk's first state and its updates, or its outputs."""
    tokens = _token_specs(p, lambda program: scan_program(program, p.heads, p.config.dv_splits)[:2])
    window, buffers = _window_specs(p), scratch(p)
    plan = Plan(
        grid=(p.batch * p.heads * p.config.dv_splits,),
        num_warps=p.config.num_warps,
        in_specs=_position_specs(p) | _pick(tokens, ("k", "v")) | _pick(window, ("solve", *locals_to_scan(p))),
        out_specs=_pick(window, scan_to_outputs(p)),
        out_shape=_pick(buffers, scan_to_outputs(p)),
    )
    if p.config.outputs_in_scan:
        plan.in_specs.update(_pick(tokens, ("q",)) | _pick(window, locals_to_outputs(p)))
        plan.out_specs["o"], plan.out_shape["o"] = tokens["v"], output_shape(p)
        if p.in_place:
            plan.in_specs["o"] = tokens["v"]
    if p.has_initial:
        plan.in_specs["initial_state"] = _state_spec(p, p.state_rows)
    if p.carry_rows:
        plan.in_specs["carry"] = plan.out_specs["carry"] = _state_spec(p, p.carry_rows)
        plan.out_shape["carry"] = carry_shape(p)
    return plan


def starts(plans: list[Plan]) -> list[int]:
    """The first program of each plan in a launch that runs the programs of one after those of another."""
    return [sum(plan.grid[0] for plan in plans[:n]) for n in range(len(plans))]


def beside(plans: list[Plan]) -> Plan:
    """One launch of several passes. What a plan calls `name` is (its place in `plans`, name) here."""

    def merged(field):
        return {(n, name): x for n, plan in enumerate(plans) for name, x in getattr(plan, field).items()}

    def placed(n, spec):
        # The programs of the others name a block too: the nearest one.
        start, size = starts(plans)[n], plans[n].grid[0]
        return pl.BlockSpec(spec.block_shape, lambda program: spec.index_map(jnp.clip(program - start, 0, size - 1)))

    specs = {field: merged(field) for field in ("in_specs", "out_specs")}
    if len(plans) > 1:
        specs = {field: {key: placed(key[0], spec) for key, spec in x.items()} for field, x in specs.items()}
    return Plan((sum(plan.grid[0] for plan in plans),), plans[0].num_warps, out_shape=merged("out_shape"), **specs)


def plan_outputs(p: Problem) -> Plan:
    """Pass (c): reads q, the chunk's first state and its updates; writes this window's rows of o."""
    tokens = _token_specs(p, lambda program: chunk_program(program, p.batch, p.heads)[1:])
    chunk = _chunk_specs(p)
    plan = Plan(
        grid=(p.window_chunks * p.batch * p.heads,),
        num_warps=_warps_for(p, p.config.chunk_size // 16 * (p.slice_tile // 16)),
        in_specs=_position_specs(p)
        | _pick(tokens, ("q",))
        | _pick(chunk, locals_to_outputs(p))
        | _pick(chunk, scan_to_outputs(p)),
        out_specs={"o": tokens["v"]},
        out_shape={"o": output_shape(p)},
    )
    if p.in_place:
        plan.in_specs["o"] = tokens["v"]
    return plan


def plan_decode(p: Problem) -> Plan:
    """The decode kernel: one program for each (sequence, head, V slice) walks that sequence's few tokens.

    States come and go in place where both are asked for.
    """
    splits = p.config.dv_splits

    def place(program):
        sequence, head, _ = scan_program(program, p.heads, splits)
        return (sequence if p.sequences is None else 0), head

    def state(program):
        sequence, head, _ = scan_program(program, p.heads, splits)
        return sequence, head, 0, 0

    tokens = _token_specs(p, place)
    plan = Plan(
        grid=(p.state_rows * p.heads * splits,),
        num_warps=p.config.num_warps,
        in_specs=_pick(tokens, ("q", "k", "v", "g", "beta")),
        out_specs={"o": tokens["v"]},
        out_shape={"o": output_shape(p)},
    )
    if p.sequences is not None:
        plan.in_specs["cu_seqlens"] = pl.BlockSpec((p.sequences + 1,), lambda program: (0,))
        plan.in_specs["o"] = tokens["v"]
    if p.has_initial:
        plan.in_specs["state"] = pl.BlockSpec((None, None, *p.state_shape[1:]), state)
    if p.keeps_states:
        plan.out_specs["state"] = pl.BlockSpec((None, None, *p.state_shape[1:]), state)
        plan.out_shape["state"] = jax.ShapeDtypeStruct((p.state_rows, *p.state_shape), jnp.float32)
    return plan


def output_shape(p: Problem) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((p.batch, p.seq_len, p.heads, p.value_size), p.dtype)


def scan_to_outputs(p: Problem) -> tuple[str, ...]:
    if p.config.outputs_in_scan:
        return ()
    return ("update", "state", "power") if p.scaled else ("update", "state")


def carry_shape(p: Problem) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((p.carry_rows, *p.state_shape), jnp.float32)


def scratch_bytes(p: Problem) -> int:
    """What a prefill allocates besides its results: one window's buffers, the table, and a carry where windows > 1.

    What only the kernels of the locals use is free again when the scan stores for the outputs. Under `overlap` the
    scan reads one window's buffers while those of the next are written.
    """
    window = scratch(p)
    inside, later = ([window.pop(name) for name in names] for names in (INSIDE_LOCALS, scan_to_outputs(p)))
    buffers = [*window.values(), *max(inside, later, key=_bytes)]
    if p.overlaps:
        buffers += window.values()
    if p.sequences is not None:
        buffers.append(jax.ShapeDtypeStruct((p.chunks, TABLE_COLUMNS), jnp.int32))
    if p.carry_rows and not p.keeps_states:
        buffers.append(carry_shape(p))
    return _bytes(buffers)


def _bytes(buffers) -> int:
    return sum(b.size * b.dtype.itemsize for b in buffers)


def _state_spec(p: Problem, rows: int) -> pl.BlockSpec:
    """States as the scan sees them: all rows of one head; the body picks a row and a slice of V."""

    def all_rows(program):
        _, head, _ = scan_program(program, p.heads, p.config.dv_splits)
        return 0, head, 0, 0

    return pl.BlockSpec((rows, None, *p.state_shape[1:]), all_rows)


def _warps_for(p: Problem, tiles: int) -> int:
    """Warps of a pass whose products have so many 16 x 16 tiles in parallel; more would repeat each other's work.

    Products without a matrix instruction (fp32 on gfx11) have no tiles: they take as many as the scan.
    """
    return max(min(4, tiles), p.config.num_warps if p.dtype == jnp.float32 else 1)


def _pick(table: dict, names) -> dict:
    return {name: table[name] for name in names}


def _position_specs(p: Problem) -> dict[str, pl.BlockSpec]:
    """The number of the window, and for packed sequences the table of chunks.

    Under `overlap` it is the numbers of three windows, of which a launch takes one, or one for each of its passes.
    """
    specs = {"window": pl.BlockSpec((3 if p.overlaps else 1,), lambda program: (0,))}
    if p.sequences is not None:
        specs["table"] = pl.BlockSpec((p.chunks, TABLE_COLUMNS), lambda program: (0, 0))
    return specs


def _token_specs(p: Problem, place: Callable) -> dict[str, pl.BlockSpec]:
    """All tokens of one batch row and one head, which `place` finds for a program as (b, h)."""

    def key_head(program):
        b, h = place(program)
        return b, 0, group_of(h, p.heads, p.groups), 0

    def value_head(program):
        b, h = place(program)
        return b, 0, h, 0

    keys = pl.BlockSpec((None, p.seq_len, None, p.key_size), key_head)
    values = pl.BlockSpec((None, p.seq_len, None, p.value_size), value_head)
    gates = pl.BlockSpec((None, p.seq_len, None), lambda program: value_head(program)[:3])
    return {"q": keys, "k": keys, "v": values, "g": gates, "beta": gates}


def _chunk_specs(p: Problem) -> dict[str, pl.BlockSpec]:
    """One chunk's part of each scratch buffer, for the passes with a program for each chunk."""

    def spec(shape):
        def one_chunk(program):
            return *chunk_program(program, p.batch, p.heads), *(0,) * (len(shape) - 3)

        return pl.BlockSpec((None, None, None, *shape[3:]), one_chunk)

    return {name: spec(buffer.shape) for name, buffer in scratch(p).items()}


def _window_specs(p: Problem) -> dict[str, pl.BlockSpec]:
    """All chunks of one head in each scratch buffer, for the scan."""

    def spec(shape):
        def one_head(program):
            b, h, _ = scan_program(program, p.heads, p.config.dv_splits)
            return 0, b, h, *(0,) * (len(shape) - 3)

        return pl.BlockSpec((shape[0], None, None, *shape[3:]), one_head)

    return {name: spec(buffer.shape) for name, buffer in scratch(p).items()}
