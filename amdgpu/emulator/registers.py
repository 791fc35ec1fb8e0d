"""The registers of a group of waves that run in lockstep.

numpy costs about a microsecond per call whatever the size, so one call serves many waves: a vector register is an
array `[waves, lanes]`, a scalar register `[waves, 1]`, and both broadcast against each other. All waves of a group
stand at the same instruction. Where their control flow parts, `split` makes two groups, and `merge` joins groups
that have met again.

Registers start poisoned: each half of POISON is a NaN in float16 and bf16, the whole a NaN in float32, and as an
offset it leads far outside of every buffer.
"""

import functools

import numpy as np

POISON = 0xFFF7FFF5

#: Scalar register numbers, those of the hardware's operand encoding where it has one.
VCC, TTMP, M0, NULL, EXEC, SCALARS = 106, 108, 124, 125, 126, 128


class Waves:
    """Registers of `count` waves in lockstep.

    vgpr_u32[n], vgpr_i32[n], vgpr_f32[n]: views [waves, lanes] of vector register n.
    vgpr_u16[n][h] (also _i16, _f16): its low (h = 0) or high half.
    sgpr_u32[n], sgpr_i32[n], sgpr_f32[n]: views [waves, 1] of scalar register n; sgpr_u64[n] of the pair n, n + 1.
    scc: bool [waves, 1]. active: bool [waves, lanes], the lanes of EXEC; full: whether all of them are active.
    workgroup, wave: int64 [waves, 1], which workgroup of the batch and which wave in it each one is.
    storage: the memories that they share (`Storage`).
    signalled: bool [waves, 1], whether s_barrier_signal has come and s_barrier_wait not yet.
    """

    def __init__(self, vgprs, sgprs, scc, workgroup, wave, storage, signalled):
        self.vgprs, self.sgprs, self.scc = vgprs, sgprs, scc
        self.workgroup, self.wave, self.storage = workgroup, wave, storage
        self.signalled = signalled
        self.count, self.lanes = vgprs.shape[1:]
        self.vgpr_u32 = list(vgprs)
        self.vgpr_i32 = list(vgprs.view(np.int32))
        self.vgpr_f32 = list(vgprs.view(np.float32))
        self.sgpr_u32 = [sgprs[:, n : n + 1] for n in range(SCALARS)]
        self.sgpr_i32 = [s.view(np.int32) for s in self.sgpr_u32]
        self.sgpr_f32 = [s.view(np.float32) for s in self.sgpr_u32]
        self.sgpr_u64 = [sgprs[:, n : n + 2].view(np.uint64) for n in range(SCALARS - 1)]
        self.all_lanes = np.uint64(2**self.lanes - 1)
        self.exec_changed()

    def _halves(self, dtype):
        halves = self.vgprs.view(dtype).reshape(*self.vgprs.shape, 2)
        return list(zip(halves[..., 0], halves[..., 1], strict=True))

    # Made at first use: many kernels have no 16-bit operands.
    @functools.cached_property
    def vgpr_u16(self):
        return self._halves(np.uint16)

    @functools.cached_property
    def vgpr_i16(self):
        return self._halves(np.int16)

    @functools.cached_property
    def vgpr_f16(self):
        return self._halves(np.float16)

    @classmethod
    def start(cls, num_vgprs, lanes, workgroup, wave, storage):
        """Poisoned registers, all lanes active. workgroup, wave: int arrays [waves]."""
        count = len(wave)
        vgprs = np.full((num_vgprs, count, lanes), POISON, np.uint32)
        sgprs = np.full((count, SCALARS), POISON, np.uint32)
        sgprs[:, NULL] = 0
        sgprs[:, EXEC] = 0xFFFFFFFF
        sgprs[:, EXEC + 1] = 0xFFFFFFFF if lanes == 64 else 0
        false = np.zeros((count, 1), bool)
        workgroup, wave = (np.asarray(x, np.int64).reshape(count, 1) for x in (workgroup, wave))
        return cls(vgprs, sgprs, false, workgroup, wave, storage, false.copy())

    def exec_changed(self):
        """Recompute `active` and `full`; to be called after every write to EXEC."""
        mask = self.sgprs[:, EXEC : EXEC + 2]
        self.full = bool((mask.view(np.uint64) == self.all_lanes).all())
        self.active = self.read_mask(EXEC)

    def read_mask(self, n: int) -> np.ndarray:
        """The lane mask in scalar register n (and n + 1 with 64 lanes): bool [waves, lanes]."""
        words = np.ascontiguousarray(self.sgprs[:, n : n + self.lanes // 32])
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    def write_mask(self, n: int, mask: np.ndarray):
        """Write a lane mask, which must be False in inactive lanes, to scalar register n (and n + 1)."""
        if n == NULL:
            return
        packed = np.packbits(mask, axis=1, bitorder="little")
        self.sgprs[:, n : n + self.lanes // 32] = packed.view(np.uint32)
        if n == EXEC:
            self.exec_changed()

    def split(self, where: np.ndarray) -> tuple["Waves", "Waves"]:
        """Two groups: the waves where `where` (bool [waves]) holds, and the others."""
        return self._pick(where), self._pick(~where)

    def _pick(self, where):
        return Waves(
            np.ascontiguousarray(self.vgprs[:, where]),
            self.sgprs[where],
            self.scc[where],
            self.workgroup[where],
            self.wave[where],
            self.storage,
            self.signalled[where],
        )

    @staticmethod
    def merge(groups: list["Waves"]) -> "Waves":
        """One group of all waves, in the order of their workgroups."""
        wave = np.concatenate([g.wave for g in groups])
        workgroup = np.concatenate([g.workgroup for g in groups])
        order = np.lexsort((wave[:, 0], workgroup[:, 0]))
        return Waves(
            np.ascontiguousarray(np.concatenate([g.vgprs for g in groups], axis=1)[:, order]),
            np.concatenate([g.sgprs for g in groups])[order],
            np.concatenate([g.scc for g in groups])[order],
            workgroup[order],
            wave[order],
            groups[0].storage,
            np.concatenate([g.signalled for g in groups])[order],
        )
