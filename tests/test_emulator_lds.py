"""LDS: loads, stores, transposing loads, loads from global memory, bounds, and missing barriers."""

import numpy as np
import pytest
from emulator_harness import ALL, BYTES, CDNA4, GFX9, RDNA, assembles, descriptor, loaded, pointer, registers, run_lines

from amdgpu.emulator import EmulatorError, assemble
from amdgpu.emulator.launch import run_waves
from amdgpu.emulator.lds import LDS, access_granule
from amdgpu.emulator.memory import Lds, Memory, Scratch, Storage
from amdgpu.emulator.registers import Waves
from amdgpu.emulator.target import LANES

OLD = 0xA5A5A5A5


def lds_name(name, arch):
    return name if arch not in GFX9 else name.replace("ds_load", "ds_read").replace("ds_store", "ds_write")


@pytest.mark.parametrize("name, size, signed", [
    ("u8", 1, False), ("i8", 1, True), ("u16", 2, False), ("i16", 2, True),
    ("b32", 4, False), ("b64", 8, False), ("b96", 12, False), ("b128", 16, False),
])  # fmt: skip
@pytest.mark.parametrize("arch", ALL)
def test_lds_loads(arch, name, size, signed):
    lanes = LANES[arch]
    line = lds_name(f"ds_load_{name} {registers(4, size)}, v0 offset:16", arch)
    assembles(line, arch)
    content = BYTES[:2048]
    offset = np.random.default_rng(4).integers(0, 1000, lanes) // size * size
    setup = [lds_name(f"ds_store_b32 v1, v2 offset:{256 * i}", arch) for i in range(2048 // 256)] if lanes == 64 else [
        lds_name(f"ds_store_b32 v1, v2 offset:{128 * i}", arch) for i in range(2048 // 128)]  # fmt: skip
    program = []
    vgprs = [(0, offset), (1, np.arange(lanes) * 4)]
    words = content.view(np.uint32).reshape(-1, lanes)
    for i, (text, row) in enumerate(zip(setup, words, strict=True)):
        program.append(text.replace("v2", f"v{20 + i}"))
        vgprs.append((20 + i, row))
    active = 0xFFFFFFFFFFFFF0FF
    masks = [f"s_mov_b32 exec_lo, {active % 2**32:#x}"] if lanes == 32 else [
        f"s_mov_b32 exec_lo, {active % 2**32:#x}", "s_mov_b32 exec_hi, -1"]  # fmt: skip
    w = run_lines(
        [*program, *masks, line], arch, [*vgprs, *((i, OLD) for i in range(4, 8))], lds_bytes=2048, num_vgprs=64
    )
    for lane in range(lanes):
        got = sum(int(w.vgpr_u32[4 + i][0, lane]) << 32 * i for i in range(max(1, size // 4)))
        if active >> lane & 1:
            assert got == loaded(content[offset[lane] + 16 :], size, signed)
        else:
            assert got == int.from_bytes(np.full(max(1, size // 4), OLD, np.uint32).tobytes(), "little")


def read_back(arch, stores, vgprs, count=1):
    """Run stores of one wave, then read LDS's first 64 * count words."""
    lanes = LANES[arch]
    step = lanes * 4
    loads = [lds_name(f"ds_load_b32 v{40 + i}, v60 offset:{step * i}", arch) for i in range(64 * count // lanes)]
    w = run_lines([*stores, *loads], arch, [*vgprs, (60, np.arange(lanes) * 4)], lds_bytes=256 * count, num_vgprs=64)
    return np.concatenate([w.vgpr_u32[40 + i][0] for i in range(len(loads))]).view(np.uint8)


@pytest.mark.parametrize("name, size, high", [
    ("b8", 1, False), ("b16", 2, False), ("b32", 4, False), ("b64", 8, False), ("b96", 12, False), ("b128", 16, False),
    ("b8_d16_hi", 1, True), ("b16_d16_hi", 2, True),
])  # fmt: skip
@pytest.mark.parametrize("arch", ALL)
def test_lds_stores(arch, name, size, high):
    lanes = LANES[arch]
    line = lds_name(f"ds_store_{name} v0, {registers(4, size)} offset:32", arch)
    assembles(line, arch)
    where = np.random.default_rng(5).permutation(lanes) * 16
    data = np.random.default_rng(6).integers(0, 2**32, (4, lanes), np.uint64).astype(np.uint32)
    got = read_back(arch, [line], [(0, where), *((4 + i, d) for i, d in enumerate(data))], 5)
    want = np.full(1280, 0xFF, np.uint8)
    for lane in range(lanes):
        raw = np.ascontiguousarray(data[:, lane]).view(np.uint8)[2 if high else 0 :]
        want[where[lane] + 32 :][:size] = raw[:size]
    # LDS is poisoned where nothing was stored.
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size, bits", [(4, "b32"), (8, "b64")])
@pytest.mark.parametrize("stride", ["", "_stride64"])
@pytest.mark.parametrize("arch", ALL)
def test_lds_pairs(arch, size, bits, stride):
    """Two accesses whose offsets count elements, or 64 of them."""
    st = "st64" if stride else ""
    store, load = f"ds_store_2addr{stride}_{bits}", f"ds_load_2addr{stride}_{bits}"
    if arch in GFX9:
        store, load = f"ds_write2{st}_{bits}", f"ds_read2{st}_{bits}"
    words = size // 4
    lines = [f"{store} v0, {registers(2, size)}, {registers(4, size)} offset0:1 offset1:3",
             f"{load} {registers(8, 2 * size)}, v0 offset0:3 offset1:1"]  # fmt: skip
    for line in lines:
        assembles(line, arch)
    lanes = LANES[arch]
    factor = size * (64 if stride else 1)
    # Elements of different lanes must not overlap.
    where = np.arange(lanes) * (size if stride else 4 * size)
    data = np.random.default_rng(7).integers(0, 2**32, (4, lanes), np.uint64).astype(np.uint32)
    check = lds_name(f"ds_load_b32 v16, v0 offset:{factor}", arch)
    w = run_lines([*lines, check], arch, [(0, where), *((2 + i, d) for i, d in enumerate(data))],
                  lds_bytes=int(where.max()) + 4 * factor, num_vgprs=20)  # fmt: skip
    for i in range(words):
        np.testing.assert_array_equal(w.vgpr_u32[8 + i][0], data[2 + i])
        np.testing.assert_array_equal(w.vgpr_u32[8 + words + i][0], data[i])
    np.testing.assert_array_equal(w.vgpr_u32[16][0], data[0])


@pytest.mark.parametrize("arch", RDNA)
def test_lds_loads_of_one_half(arch):
    names = ("u16_d16", "u16_d16_hi", "u8_d16", "i8_d16_hi", "u8_d16_hi", "i8_d16")
    lines = ["ds_store_b32 v0, v1", *[f"ds_load_{name} v{n}, v0" for n, name in enumerate(names, 4)]]
    for line in lines:
        assembles(line, arch)
    lanes = LANES[arch]
    w = run_lines(lines, arch, [(0, np.arange(lanes) * 4), (1, 0x123489AB), *((i, OLD) for i in range(4, 10))],
                  lds_bytes=4 * lanes)  # fmt: skip
    assert [int(w.vgpr_u32[i][0, 5]) for i in range(4, 10)] == [
        0xA5A589AB, 0x89ABA5A5, 0xA5A500AB, 0xFFABA5A5, 0x00ABA5A5, 0xA5A5FFAB]  # fmt: skip


@pytest.mark.parametrize("bits", [16, 8])
def test_lds_transposing_loads(bits):
    """Each 16 lanes address the rows of a (64 / bits) x 16 tile piece by piece; lane i receives column i."""
    rows, element = 64 // bits, {16: np.uint16, 8: np.uint8}[bits]
    tiles = np.random.default_rng(8).integers(0, 2**bits, (4, rows, 16)).astype(element)
    # Rows lie 64 bytes apart, tiles 1024.
    content = np.zeros(4096, np.uint8)
    for t, r in np.ndindex(4, rows):
        content[1024 * t + 64 * r :][: 2 * bits] = tiles[t, r].view(np.uint8)
    lane = np.arange(64)
    pieces = 16 * bits // 64
    address = 1024 * (lane // 16) + 64 * (lane % 16 // pieces) + 8 * (lane % 16 % pieces)
    line = f"ds_read_b64_tr_b{bits} v[2:3], v0"
    assembles(line, CDNA4[0])
    stores = [f"ds_write_b32 v1, v{8 + i} offset:{256 * i}" for i in range(16)]
    words = content.view(np.uint32).reshape(16, 64)
    w = run_lines([*stores, line], "gfx950", [(0, address), (1, lane * 4), *((8 + i, r) for i, r in enumerate(words))],
                  lds_bytes=4096)  # fmt: skip
    got = np.stack([w.vgpr_u32[2][0], w.vgpr_u32[3][0]], axis=1).copy().view(element)
    for i in range(64):
        np.testing.assert_array_equal(got[i], tiles[i // 16, :, i % 16])


def test_loads_from_global_memory_into_lds():
    memory = Memory()
    _, low, high = pointer(memory, BYTES)
    _, resource = descriptor(memory, BYTES, 2048, "gfx950", writable=False)
    lines = ["s_mov_b32 m0, 64", "global_load_lds_dwordx4 v[0:1], off offset:16", "s_mov_b32 m0, 0x800",
             "buffer_load_dword v2, s[4:7], 0 offen lds", "ds_read_b128 v[8:11], v3 offset:80",
             "ds_read_b32 v12, v4 offset:2048"]  # fmt: skip
    for line in lines:
        assembles(line, "gfx950")
    lane = np.arange(64)
    offset = lane[::-1] * 16
    w = run_lines(lines, "gfx950", [(0, low + offset), (1, high), (2, np.where(lane == 5, 2**31, lane * 8)),
                                    (3, lane * 16), (4, lane * 4)],
                  resource, memory=memory, lds_bytes=4096)  # fmt: skip
    words = BYTES.view(np.uint32)
    for i in range(64):
        start = (offset[i] + 16) // 4
        assert [int(w.vgpr_u32[8 + k][0, i]) for k in range(4)] == words[start : start + 4].tolist()
        assert w.vgpr_u32[12][0, i] == (0 if i == 5 else words[2 * i])


@pytest.mark.parametrize("offset", [0, 4])
def test_lds_accesses_are_bounded(offset):
    for line in ("ds_read_b64 v[2:3], v0 offset:{}", "ds_write_b64 v0, v[2:3] offset:{}"):
        run_lines([line.format(0)], "gfx942", [(0, np.arange(64) * 8)], lds_bytes=512)
        with pytest.raises(EmulatorError, match=r"LDS .* of 8 bytes out of bounds: bytes 4 to 515 of 512"):
            run_lines([line.format(4)], "gfx942", [(0, np.arange(64) * 8)], lds_bytes=512)
    with pytest.raises(EmulatorError, match="LDS load of 4 bytes out of bounds"):
        run_lines(
            ["ds_read_b32 v2, v0 offset:4"], "gfx942", [(0, np.where(np.arange(64) == 9, 2**32 - 4, 0))], lds_bytes=512
        )


EXCHANGE = ["ds_write_b32 v0, v1", "s_waitcnt lgkmcnt(0)", "s_barrier", "ds_read_b32 v2, v3"]


def exchange(lines, waves=4):
    own = np.arange(64 * waves).reshape(waves, 64) * 4
    other = np.roll(own, 1, axis=0)
    return run_lines(lines, "gfx942", [(0, own), (1, own), (3, other)], waves=waves, lds_bytes=own.size * 4), other


def test_waves_exchange_data_across_a_barrier():
    w, other = exchange(EXCHANGE)
    np.testing.assert_array_equal(w.vgpr_u32[2], other)


def test_a_missing_barrier_is_an_error():
    """Waves run in lockstep, so the values would be right."""
    with pytest.raises(EmulatorError, match="another wave wrote since the last barrier"):
        exchange([line for line in EXCHANGE if line != "s_barrier"])
    with pytest.raises(EmulatorError, match="another wave read since the last barrier"):
        exchange([*EXCHANGE, "ds_write_b32 v0, v1"])
    exchange([*EXCHANGE, "s_barrier", "ds_write_b32 v0, v1"])
    # One wave needs none.
    exchange([line for line in EXCHANGE if line != "s_barrier"], waves=1)


def test_waves_may_store_the_same_bytes():
    """Replicated stores are no race; reading one's own after another wave's is."""
    same = np.tile(np.arange(64) * 4, (4, 1))
    run_lines(["ds_write_b32 v0, v0", "ds_read_b32 v2, v0"], "gfx942", [(0, same)], waves=4, lds_bytes=256)


def test_halves_of_a_word_belong_to_different_waves():
    where = np.arange(128).reshape(2, 64) * 2
    lines = ["ds_write_b16 v0, v1", "ds_read_u16 v2, v0"]
    w = run_lines(lines, "gfx942", [(0, where), (1, where)], waves=2, lds_bytes=256)
    np.testing.assert_array_equal(w.vgpr_u32[2], where)


def test_workgroups_have_lds_of_their_own():
    program = assemble(["ds_write_b32 v0, v1", "ds_read_b32 v2, v0", "s_endpgm"], "gfx942")
    storage = Storage(Memory(), Lds(3, 256, 4), Scratch(3, 64, 0), 1)
    w = Waves.start(3, 64, np.arange(3), np.zeros(3, int), storage)
    w.vgpr_u32[0][...] = np.arange(64) * 4
    w.vgpr_u32[1][...] = np.arange(3)[:, None]
    _, (w,) = run_waves(program, w)
    np.testing.assert_array_equal(w.vgpr_u32[2], np.broadcast_to(np.arange(3)[:, None], (3, 64)))


def test_granule_is_the_smallest_access():
    assert access_granule({"ds_read_b128", "ds_write_b32", "v_mov_b32"}) == 4
    assert access_granule({"ds_read_b64", "ds_write_b16_d16_hi"}) == 2
    assert access_granule({"ds_load_u8", "ds_store_b64"}) == 1


def test_every_lds_opcode_has_a_case():
    stems = {f"{v}_{n}" for v in ("read", "load") for n in ("u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128")}
    stems |= {f"{v}_{n}" for v in ("write", "store") for n in ("b8", "b16", "b32", "b64", "b96", "b128")}
    stems |= {f"load_{n}_d16{h}" for n in ("u8", "i8", "u16") for h in ("", "_hi")}
    stems |= {f"{v}_{n}_d16_hi" for v in ("write", "store") for n in ("b8", "b16")}
    stems |= {f"{v}{s}_{n}" for v in ("read2", "write2") for s in ("", "st64") for n in ("b32", "b64")}
    stems |= {f"{v}_2addr{s}_{n}" for v in ("load", "store") for s in ("", "_stride64") for n in ("b32", "b64")}
    stems |= {"read_b64_tr_b16", "read_b64_tr_b8"}
    assert {o.removeprefix("ds_") for o in LDS} == stems
