"""Loads and stores of global memory, buffers and scratch, scalar loads: bytes, halves, bounds."""

import numpy as np
import pytest
from emulator_harness import (
    ALL,
    BYTES,
    GFX9,
    GFX12,
    RDNA,
    assembles,
    descriptor,
    loaded,
    pointer,
    registers,
    run_lines,
    suffix,
)

from amdgpu.emulator import EmulatorError, assemble
from amdgpu.emulator.memory import Memory
from amdgpu.emulator.target import LANES

OLD = 0xA5A5A5A5


@pytest.mark.parametrize("name, size, signed", [
    ("u8", 1, False), ("i8", 1, True), ("u16", 2, False), ("i16", 2, True),
    ("b32", 4, False), ("b64", 8, False), ("b96", 12, False), ("b128", 16, False),
])  # fmt: skip
@pytest.mark.parametrize("arch", ALL)
def test_global_loads(arch, name, size, signed):
    """At a 64-bit address in registers, and at a scalar base plus a 32-bit offset."""
    lanes, memory = LANES[arch], Memory()
    _, low, high = pointer(memory, BYTES)
    # Any alignment.
    offset = np.random.default_rng(1).integers(0, 1000, lanes)
    op = f"global_load_{suffix(name, arch)}"
    lines = [f"{op} {registers(8, size)}, v[0:1], off offset:12", f"{op} {registers(12, size)}, v2, s[0:1] offset:16"]
    for line in lines:
        assembles(line, arch)
    vgprs = [(0, low + offset), (1, high), (2, offset), *((i, OLD) for i in range(8, 16))]
    w = run_lines(lines, arch, vgprs, [(0, low), (1, high)], memory=memory, num_vgprs=16)
    for lane in range(lanes):
        for first, extra in ((8, 12), (12, 16)):
            want = loaded(BYTES[offset[lane] + extra :], size, signed)
            got = sum(int(w.vgpr_u32[first + i][0, lane]) << 32 * i for i in range(max(1, size // 4)))
            assert got == want


@pytest.mark.parametrize("name, size", [(f"b{8 * n}", n) for n in (1, 2, 4, 8, 12, 16)])
@pytest.mark.parametrize("arch", ALL)
def test_global_stores(arch, name, size):
    lanes, memory = LANES[arch], Memory()
    address, low, high = pointer(memory, BYTES, writable=True)
    offset = np.random.default_rng(2).permutation(lanes) * 20 + 1
    op = f"global_store_{suffix(name, arch)}"
    line = f"{op} v[0:1], {registers(8, size)}, off offset:8"
    other = f"{op} v2, {registers(8, size)}, s[0:1] offset:2040"
    for text in (line, other):
        assembles(text, arch)
    data = np.random.default_rng(3).integers(0, 2**32, (4, lanes), np.uint64).astype(np.uint32)
    active = 0xFFFFFFFFFFFFFFF5
    w = run_lines([line, other], arch,
                  [(0, low + offset), (1, high), (2, offset), *((8 + i, d) for i, d in enumerate(data))],
                  [(0, low), (1, high), (126, active % 2**32), (127, active >> 32)], memory=memory)  # fmt: skip
    want = BYTES.copy()
    for lane in range(lanes):
        if active >> lane & 1:
            raw = np.ascontiguousarray(data[:, lane]).view(np.uint8)[:size]
            for extra in (8, 2040):
                want[offset[lane] + extra :][:size] = raw
    np.testing.assert_array_equal(memory.content(address), want)
    assert w.full is False


@pytest.mark.parametrize("arch", RDNA)
def test_16_bit_loads_keep_the_other_half(arch):
    memory = Memory()
    _, low, high = pointer(memory, BYTES)
    lines = [f"global_load_d16_{name} v{n}, v[0:1], off" for n, name in enumerate(("b16", "hi_b16", "u8", "hi_i8"), 4)]
    for line in lines:
        assembles(line, arch)
    w = run_lines(lines, arch, [(0, low), (1, high), *((n, OLD) for n in range(4, 8))], memory=memory)
    half, byte = int(BYTES[0]) | int(BYTES[1]) << 8, int(BYTES[0])
    signed = (byte ^ 128) - 128
    assert [int(w.vgpr_u32[i][0, 0]) for i in range(4, 8)] == [
        0xA5A50000 | half, half << 16 | 0xA5A5, 0xA5A50000 | byte, signed % 2**16 << 16 | 0xA5A5]  # fmt: skip


@pytest.mark.parametrize("line", ["global_load_short_d16 v4, v[0:1], off", "ds_read_u16_d16 v4, v0"])
def test_16_bit_loads_on_gfx9_are_refused(line):
    """With ECC they do not keep the other half, so the compiler does not use them."""
    assembles(line, "gfx942")
    with pytest.raises(EmulatorError, match=r"ECC|unknown opcode"):
        assemble([line, "s_endpgm"], "gfx942")


@pytest.mark.parametrize("arch", ALL)
def test_16_bit_stores_of_the_high_half(arch):
    memory = Memory()
    address, low, high = pointer(memory, BYTES, writable=True)
    names = ("short_d16_hi", "byte_d16_hi") if arch in GFX9 else ("d16_hi_b16", "d16_hi_b8")
    lines = [f"global_store_{name} v[0:1], v8, off offset:{64 + 2 * i}" for i, name in enumerate(names)]
    for line in lines:
        assembles(line, arch)
    run_lines(lines, arch, [(0, low), (1, high), (8, 0x12345678)], memory=memory)
    assert memory.content(address)[64:68].tolist() == [0x34, 0x12, 0x34, BYTES[67]]


@pytest.mark.parametrize("arch", ALL)
def test_scalar_loads(arch):
    memory = Memory()
    _, low, high = pointer(memory, BYTES)
    names = {1: "b32", 2: "b64", 4: "b128", 8: "b256", 16: "b512"}
    if arch in GFX9:
        names = {1: "dword", 2: "dwordx2", 4: "dwordx4", 8: "dwordx8", 16: "dwordx16"}
    words = BYTES.view(np.uint32)
    for count, name in names.items():
        first, second = (f"s[{n}:{n + count - 1}]" if count > 1 else f"s{n}" for n in (16, 32))
        lines = [f"s_load_{name} {first}, s[0:1], 0x40"]
        if arch not in GFX9:
            lines.append(f"s_load_{name} {second}, s[0:1], s2 offset:0x10")
        for line in lines:
            assembles(line, arch)
        # Two waves with bases of their own.
        bases = np.array([low, low + 256], np.uint32)
        w = run_lines(lines, arch, [], [(0, bases), (1, high), (2, 0x20)], memory=memory, waves=2)
        for wave, start in enumerate((16, 16 + 64)):
            assert w.sgprs[wave, 16 : 16 + count].tolist() == words[start : start + count].tolist()
            if arch not in GFX9:
                assert w.sgprs[wave, 32 : 32 + count].tolist() == words[start - 4 : start - 4 + count].tolist()


@pytest.mark.parametrize("arch", ALL)
def test_buffers_ignore_lanes_beyond_their_range(arch):
    """What lies beyond num_records reads 0 and is not written; that is how the compiler masks lanes."""
    memory, lanes = Memory(), LANES[arch]
    address, resource = descriptor(memory, BYTES, 1024, arch)
    zero = "0" if arch not in GFX12 else "null"
    load, store = (f"buffer_{v}_{suffix('b64', arch)}" for v in ("load", "store"))
    lines = [f"{load} v[2:3], v0, s[4:7], {zero} offen offset:8", f"{store} v[2:3], v1, s[4:7], {zero} offen"]
    for line in lines:
        assembles(line, arch)
    source = np.where(np.arange(lanes) % 3 == 0, 0x80000000, np.arange(lanes) * 8)
    target = np.where(np.arange(lanes) % 5 == 0, 0x80000000, np.arange(lanes) * 8 + 512)
    w = run_lines(lines, arch, [(0, source), (1, target), (2, OLD), (3, OLD)], resource, memory=memory)
    want = BYTES.copy()
    for lane in range(lanes):
        value = np.zeros(8, np.uint8) if lane % 3 == 0 else BYTES[lane * 8 + 8 :][:8]
        assert w.vgpr_u32[2][0, lane] == value[:4].view(np.uint32)[0]
        assert w.vgpr_u32[3][0, lane] == value[4:].view(np.uint32)[0]
        if lane % 5:
            want[lane * 8 + 512 :][:8] = value
    np.testing.assert_array_equal(memory.content(address), want)


def test_buffer_scalar_offset():
    memory = Memory()
    _, resource = descriptor(memory, BYTES, 1024, "gfx942")
    line = "buffer_load_ushort v1, v0, s[4:7], s8 offen offset:2"
    assembles(line, "gfx942")
    w = run_lines([line], "gfx942", [(0, np.arange(64))], [*resource, (8, 100)], memory=memory)
    assert w.vgpr_u32[1][0, 3] == int(BYTES[105]) | int(BYTES[106]) << 8


@pytest.mark.parametrize("word, value, arch, message", [
    (3, 0x21027000, "gfx1151", "not raw"), (1, 0xC0000000, "gfx1151", "swizzled"),
    (1, 0x80000000, "gfx942", "swizzled"),
])  # fmt: skip
def test_other_buffers_are_refused(word, value, arch, message):
    memory = Memory()
    _, resource = descriptor(memory, BYTES, 1024, arch)
    n, old = resource[word]
    resource[word] = (n, old | value if word == 1 else value)
    with pytest.raises(EmulatorError, match=message):
        run_lines(
            [f"buffer_load_{suffix('b32', arch)} v1, v0, s[4:7], 0 offen"], arch, [(0, 0)], resource, memory=memory
        )


@pytest.mark.parametrize("arch", ALL)
def test_scratch_is_private_to_each_lane(arch):
    lanes = LANES[arch]
    name = suffix("b32", arch)
    lines = [
        f"scratch_store_{name} off, v0, off offset:4",
        f"scratch_store_{name} v1, v2, off",
        f"scratch_load_{name} v4, off, off offset:4",
        f"scratch_load_{name} v5, off, s0 offset:4",
    ]
    for line in lines:
        assembles(line, arch)
    data = np.arange(2 * lanes).reshape(2, lanes)
    w = run_lines(lines, arch, [(0, data), (1, 8), (2, data + 1000)], [(0, 4)], waves=2, private_segment_fixed_size=16)
    np.testing.assert_array_equal(w.vgpr_u32[4], data)
    np.testing.assert_array_equal(w.vgpr_u32[5], data + 1000)
    with pytest.raises(EmulatorError, match="scratch load of 4 bytes out of bounds"):
        run_lines([f"scratch_load_{name} v4, off, off offset:16"], arch, private_segment_fixed_size=16)


# ---- bounds


@pytest.mark.parametrize("offset", [-1, -4, 4093, 2**31, -(2**31)])
@pytest.mark.parametrize("verb", ["load_dword v4, v[0:1], off", "store_dword v[0:1], v4, off"])
def test_global_accesses_are_bounded(offset, verb):
    memory = Memory()
    memory.add(np.zeros(2**16, np.uint8), True)
    address = memory.add(BYTES, True)
    memory.add(np.zeros(2**16, np.uint8), True)
    where = np.full(64, address, np.int64)
    where[17] += offset
    vgprs = [(0, where & 0xFFFFFFFF), (1, where >> 32), (4, 0)]
    with pytest.raises(EmulatorError, match=r"line 1: global_.*of 4 bytes out of bounds"):
        run_lines([f"global_{verb}"], "gfx942", vgprs, memory=memory)
    # The same address in an inactive lane is no access.
    run_lines([f"global_{verb}"], "gfx942", vgprs, [(126, 2**32 - 1 - 2**17)], memory=memory)


def test_uninitialised_registers_are_no_address():
    with pytest.raises(EmulatorError, match="out of bounds"):
        memory = Memory()
        memory.add(BYTES, True)
        run_lines(["global_load_dword v4, v[0:1], off"], "gfx942", memory=memory)


def test_inputs_are_not_writable():
    memory = Memory()
    _, low, high = pointer(memory, BYTES)
    with pytest.raises(EmulatorError, match="store to buffer 0, which is an input"):
        run_lines(["global_store_dword v[0:1], v4, off"], "gfx942", [(0, low), (1, high)], memory=memory)


def test_one_instruction_may_reach_several_buffers():
    memory = Memory()
    first, second = memory.add(BYTES, False), memory.add(BYTES[::-1].copy(), False)
    where = np.where(np.arange(64) % 2, first, second) + np.arange(64) * 4
    w = run_lines(["global_load_dword v4, v[0:1], off"], "gfx942", [(0, where & 0xFFFFFFFF), (1, where >> 32)],
                  memory=memory)  # fmt: skip
    want = np.where(np.arange(64) % 2, BYTES.view(np.uint32)[:64], BYTES[::-1].copy().view(np.uint32)[:64])
    np.testing.assert_array_equal(w.vgpr_u32[4][0], want)


def test_scalar_loads_are_bounded():
    memory = Memory()
    _, low, high = pointer(memory, BYTES)
    with pytest.raises(EmulatorError, match="load of 16 bytes out of bounds"):
        run_lines(["s_load_dwordx4 s[4:7], s[0:1], 0xff8"], "gfx942", [], [(0, low), (1, high)], memory=memory)


@pytest.mark.parametrize(
    "line, arch, message",
    [
        ("global_load_dword v0, v[2:3], off lds", "gfx942", "modifiers"),
        ("buffer_load_dword v0, v1, s[0:3], 0 idxen", "gfx942", "modifiers"),
        ("ds_read_b32 v0, v1 gds", "gfx942", "modifiers"),
        ("ds_add_u32 v0, v1", "gfx942", "unknown opcode"),
        ("buffer_load_format_x v0, v1, s[0:3], 0 offen", "gfx942", "unknown opcode"),
        ("s_buffer_load_dword s0, s[4:7], 0x0", "gfx942", "unknown opcode"),
        ("s_load_dwordx4 s[0:1], s[4:5], 0x0", "gfx942", "2 registers for 4 words"),
    ],
)
def test_what_is_not_modelled_is_refused(line, arch, message):
    with pytest.raises(EmulatorError, match=message):
        assemble([line, "s_endpgm"], arch)
