"""Facts per GPU architecture, and the architecture that code is being traced for.

An architecture id is what compilers call the chip (`gfx942`, `sm_90`), never a product name: several products
share one.

Sources, by the short name that stands beside each fact in `ARCHITECTURES`:

- CDNA3: "AMD Instinct MI300 Instruction Set Architecture" (sections 2 and 3: wavefronts, registers, LDS).
- CDNA4: "AMD Instinct CDNA4 Instruction Set Architecture", the same sections.
- RDNA3: "RDNA3 Instruction Set Architecture" (RDNA3.5 for gfx1151, RDNA4 for gfx1201: the same tables).
- LLVM: https://llvm.org/docs/AMDGPUUsage.html (kernel descriptor) and the subtarget functions of
  llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp (`getVGPRAllocGranule`, `getTotalNumVGPRs`,
  `getLdsDwGranularity`, `getMaxWavesPerEU`, `getMaxWorkGroupsPerCU`).
- MESA: src/amd/common/ac_gpu_info.c (`lds_alloc_granularity`).
- MI300X, MI355X: AMD's data sheets and the CDNA3 and CDNA4 white papers.
- HW: ROCm's hardware specifications, https://rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html.
"""

import dataclasses

import jax

KIB = 1024
MIB = 1024 * KIB


@dataclasses.dataclass(frozen=True)
class Arch:
    """What one architecture offers. Counts are per device in its whole (unpartitioned, SPX) mode.

    A workgroup is scheduled on a CU of four SIMDs on gfx9. On gfx11 and gfx12 a CU has two SIMDs, and two CUs
    form a workgroup processor (WGP); in WGP mode, the compilers' default, a workgroup spreads over all four.
    """

    id: str
    # The product that the counts below describe; others with the same id have fewer CUs.
    product: str
    # Lanes of a wave as Triton compiles for the chip.
    wave_size: int
    xcds: int
    cus: int
    cus_per_wgp: int
    simds_per_cu: int
    # The L2 that one workgroup sees: of its own XCD, bytes.
    l2_bytes: int
    # LDS: the most one workgroup may ask for, what a CU has, and the step in which it is given out, bytes.
    lds_bytes_per_workgroup: int
    lds_bytes_per_cu: int
    lds_granule: int
    # 32-bit vector registers: the most a wave may use in each lane (on gfx9 half of them accumulation
    # registers), what a SIMD has for each lane of `wave_size`, and the step in which they are given out.
    vgprs_per_wave: int
    vgprs_per_simd: int
    vgpr_granule: int
    # Scalar registers: addressable in a wave, what a SIMD has, and the step. On gfx11 and gfx12 every wave
    # gets a full set, so they never limit occupancy: `sgprs_per_simd` is None.
    sgprs_per_wave: int
    sgprs_per_simd: int | None
    sgpr_granule: int
    max_waves_per_simd: int
    # Workgroups of more than one wave that a CU can hold: it has that many barriers (a WGP twice as many).
    max_workgroups_per_cu: int
    # Whether there are matrix instructions for fp32 operands. All chips here have them for 16 and 8 bits.
    fp32_matrix: bool
    # Whether an instruction rounds fp32 to bf16.
    rounds_to_bf16: bool
    # Wait states after v_exp_f32 before a vector instruction may read its result, where assembly text has to keep them
    # itself. None: not looked up, so no such text is written for the chip.
    exp2_wait_states: int | None
    source: str


ARCHITECTURES = (
    Arch(
        id="gfx942",
        product="MI300X",
        wave_size=64,  # CDNA3
        xcds=8,  # MI300X: eight XCDs of 38 CUs, each with an L2 of 4 MiB (MI300A has six)
        cus=304,
        cus_per_wgp=1,
        simds_per_cu=4,  # CDNA3
        l2_bytes=4 * MIB,
        lds_bytes_per_workgroup=64 * KIB,  # CDNA3
        lds_bytes_per_cu=64 * KIB,
        lds_granule=512,  # LLVM
        vgprs_per_wave=512,  # CDNA3: 256 + 256 accumulation, one file
        vgprs_per_simd=512,
        vgpr_granule=8,  # LLVM
        sgprs_per_wave=102,  # CDNA3
        sgprs_per_simd=800,  # LLVM
        sgpr_granule=16,
        max_waves_per_simd=8,  # LLVM
        max_workgroups_per_cu=16,
        fp32_matrix=True,  # CDNA3: v_mfma_f32_16x16x4_f32
        rounds_to_bf16=False,
        exp2_wait_states=1,  # LLVM: hasTransForwardingHazard
        source="CDNA3 ISA; LLVM AMDGPU usage; MI300X data sheet",
    ),
    Arch(
        id="gfx950",
        product="MI355X",
        wave_size=64,  # CDNA4
        xcds=8,  # MI355X: eight XCDs of 32 CUs, each with an L2 of 4 MiB
        cus=256,
        cus_per_wgp=1,
        simds_per_cu=4,
        l2_bytes=4 * MIB,
        lds_bytes_per_workgroup=160 * KIB,  # CDNA4
        lds_bytes_per_cu=160 * KIB,
        lds_granule=1280,  # LLVM: 320 words
        vgprs_per_wave=512,
        vgprs_per_simd=512,
        vgpr_granule=8,  # LLVM
        sgprs_per_wave=102,
        sgprs_per_simd=800,
        sgpr_granule=16,
        max_waves_per_simd=8,
        max_workgroups_per_cu=16,
        fp32_matrix=True,  # CDNA4: v_mfma_f32_16x16x4_f32
        rounds_to_bf16=True,  # CDNA4: v_cvt_pk_bf16_f32
        exp2_wait_states=1,  # LLVM: hasTransForwardingHazard
        source="CDNA4 ISA; LLVM AMDGPU usage; MI355X data sheet",
    ),
    Arch(
        id="gfx1100",
        product="Radeon RX 7900 XTX",
        wave_size=32,  # RDNA3 (64 exists too; Triton compiles for 32)
        xcds=1,
        cus=96,  # HW
        cus_per_wgp=2,  # RDNA3
        simds_per_cu=2,
        l2_bytes=6 * MIB,  # HW
        lds_bytes_per_workgroup=64 * KIB,  # RDNA3: 128 KiB a WGP, 64 KiB a workgroup
        lds_bytes_per_cu=64 * KIB,
        lds_granule=1024,  # MESA
        vgprs_per_wave=256,  # RDNA3
        vgprs_per_simd=1536,  # LLVM: the 1.5 times larger file
        vgpr_granule=24,
        sgprs_per_wave=106,  # RDNA3
        sgprs_per_simd=None,
        sgpr_granule=128,
        max_waves_per_simd=16,  # LLVM
        max_workgroups_per_cu=16,
        fp32_matrix=False,  # RDNA3: WMMA takes 16 bits and fewer
        rounds_to_bf16=False,
        exp2_wait_states=None,
        source="RDNA3 ISA; LLVM AMDGPU usage; ROCm hardware table",
    ),
    Arch(
        id="gfx1151",
        product="Radeon 8060S (Ryzen AI Max+ 395)",
        wave_size=32,  # RDNA3.5
        xcds=1,
        cus=40,  # HW
        cus_per_wgp=2,
        simds_per_cu=2,
        l2_bytes=2 * MIB,  # HW
        lds_bytes_per_workgroup=64 * KIB,  # RDNA3.5
        lds_bytes_per_cu=64 * KIB,
        lds_granule=1024,  # MESA
        vgprs_per_wave=256,  # RDNA3.5
        vgprs_per_simd=1536,  # LLVM: 1.5 times, unlike gfx1150
        vgpr_granule=24,
        sgprs_per_wave=106,
        sgprs_per_simd=None,
        sgpr_granule=128,
        max_waves_per_simd=16,
        max_workgroups_per_cu=16,
        fp32_matrix=False,  # RDNA3.5: WMMA takes 16 bits and fewer
        rounds_to_bf16=False,
        exp2_wait_states=0,
        source="RDNA3.5 ISA; LLVM AMDGPU usage; ROCm hardware table",
    ),
    Arch(
        id="gfx1201",
        product="Radeon RX 9070 XT",
        wave_size=32,  # RDNA4
        xcds=1,
        cus=64,  # HW
        cus_per_wgp=2,
        simds_per_cu=2,
        l2_bytes=8 * MIB,  # HW
        lds_bytes_per_workgroup=64 * KIB,  # RDNA4
        lds_bytes_per_cu=64 * KIB,
        lds_granule=1024,  # MESA
        vgprs_per_wave=256,  # RDNA4
        vgprs_per_simd=1536,  # LLVM
        vgpr_granule=24,
        sgprs_per_wave=106,
        sgprs_per_simd=None,
        sgpr_granule=128,
        max_waves_per_simd=16,
        max_workgroups_per_cu=16,
        fp32_matrix=False,  # RDNA4: WMMA takes 16 bits and fewer
        rounds_to_bf16=False,
        exp2_wait_states=None,
        source="RDNA4 ISA; LLVM AMDGPU usage; ROCm hardware table",
    ),
)

KNOWN = tuple(row.id for row in ARCHITECTURES)


def facts(arch: str) -> Arch:
    """The facts of an architecture id such as `gfx942`.

    Raises:
        ValueError: the id is not in the table; the message lists those that are.
    """
    for row in ARCHITECTURES:
        if row.id == arch:
            return row
    raise ValueError(f"arch: got {arch!r}, known architectures are {', '.join(KNOWN)}")


def xcds(arch: str) -> int:
    """Dies with an L2 of their own; workgroups of a 1-D grid go round them, number `w` to die `w % xcds(arch)`.

    1 for NVIDIA, a CPU, and every id that is not in the table.
    """
    return next((row.xcds for row in ARCHITECTURES if row.id == arch), 1)


def current_arch() -> str:
    """The architecture that a function is being traced for; read it at trace time, for instance inside `jit`.

    1. The kind of the abstract device, where one is set (`jax.sharding.use_abstract_mesh`) and it starts with
       `gfx`: ahead-of-time lowering for a chip that is not there.
    2. Else what the default device reports: `gfx942` on AMD, `sm_90` on NVIDIA of compute capability 9.0.
    3. Else `"cpu"`: no GPU, or none that says what it is.

    Never raises.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    kind = getattr(abstract, "device_kind", None)
    if isinstance(kind, str) and kind.startswith("gfx"):
        return _bare(kind)
    try:
        # jax.config's attributes are made when jax is imported: a type checker does not see them.
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        # `jax.default_device` takes a device or the name of a platform.
        device = default if hasattr(default, "platform") else jax.devices(default)[0]
    except RuntimeError:
        # No backend could start.
        return "cpu"
    capability = getattr(device, "compute_capability", None)
    if not isinstance(capability, str) or device.platform == "cpu":
        return "cpu"
    if capability.startswith("gfx"):
        return _bare(capability)
    return "sm_" + capability.replace(".", "")


def _bare(arch: str) -> str:
    # "gfx942:sramecc+:xnack-" names features of the build after the id.
    return arch.split(":")[0]
