"""Kernels of others, as arms beside ours: `--peers`.

Pallas' own attention for GPUs, while jax has it; PyTorch's attention and fla's gated delta rule where `torch` and `fla`
(fla-core) are installed. None of them is a dependency: a peer that is missing, or that cannot do the case, is absent.

PyTorch reads jax's arrays where they lie (dlpack) and runs on a stream of its own. A call of it includes what its host
code takes, as a call through `jit` does.
"""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import numpy as np

from benchmarks.candidate import Candidate, PlainAttention


def fla(arguments: dict[str, Any], *, decode: bool) -> Candidate:
    """The gated delta rule of fla: by chunks, or token by token."""
    return TorchCandidate("fla", functools.partial(_fla, decode=decode), arguments, ours=False)


def attention(plain: PlainAttention) -> list[Candidate]:
    """Those that compute it; whether they are there shows when they are compiled."""
    if plain.window is not None:
        return []
    found = [plain.candidate("torch", functools.partial(_torch_attention, is_causal=plain.is_causal), TorchCandidate)]
    q, k, v = (plain.arguments[name] for name in "qkv")
    if q.shape[2] == k.shape[2] and q.shape[3] == v.shape[3] and q.shape[1] > 1:
        for keys in (64, 128):
            ours = functools.partial(_pallas_ops, causal=plain.is_causal, block_k=keys)
            found.append(plain.candidate(f"pallas.ops 128x{keys}", ours))
    return found


def _pallas_ops(*, q, k, v, scale, causal: bool, block_k: int) -> tuple[jax.Array]:
    try:
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    except ImportError as missing:
        raise NotImplementedError(f"this jax has no pallas.ops.gpu.attention: {missing}") from missing
    if q.shape[1] % 128 or k.shape[1] % block_k:
        raise NotImplementedError("pallas.ops attention has no tails")
    sizes = module.BlockSizes(block_q=128, block_k=block_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (module.mha(q, k, v, None, sm_scale=scale, causal=causal, block_sizes=sizes),)


def _torch_attention(*, q, k, v, scale, is_causal: bool) -> tuple:
    attend = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = attend(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return (o.transpose(1, 2),)


def _fla(*, decode: bool, cu_seqlens, state_v_first: bool, **arguments) -> tuple:
    if state_v_first:
        raise NotImplementedError("fla's states are [.., K, V]")
    rules = importlib.import_module("fla.ops.gated_delta_rule")
    rule = rules.fused_recurrent_gated_delta_rule if decode else rules.chunk_gated_delta_rule
    # fla counts with int64.
    return rule(**arguments, cu_seqlens=None if cu_seqlens is None else cu_seqlens.long())


@dataclasses.dataclass(frozen=True)
class TorchCandidate(Candidate):
    """A candidate whose function takes and returns tensors of PyTorch."""

    def compile(self) -> "TorchProgram":
        return TorchProgram(self)


class TorchProgram:
    """What `Candidate.compile` returns, as far as it is used.

    Raises:
      NotImplementedError: PyTorch, or a package that the function needs, is not installed.
    """

    def __init__(self, candidate: TorchCandidate):
        self.names = candidate.array_names()
        self.options = {name: x for name, x in candidate.arguments.items() if name not in self.names}
        self.function = candidate.function
        self.tensors: dict[int, tuple[jax.Array, Any]] = {}
        try:
            self.torch = importlib.import_module("torch")
        except ImportError as missing:
            raise NotImplementedError(str(missing)) from missing

    def __call__(self, *arrays: jax.Array) -> tuple["Output", ...]:
        tensors = {name: self._tensor(x) for name, x in zip(self.names, arrays, strict=True)}
        try:
            with self.torch.inference_mode():
                outputs = self.function(**tensors, **self.options)
        except ImportError as missing:
            raise NotImplementedError(str(missing)) from missing
        return tuple(Output(x, self.torch) for x in outputs)

    def _tensor(self, array: jax.Array):
        # Once for each array, for it takes the host tens of microseconds. Who keeps the array keeps its id.
        if id(array) not in self.tensors:
            self.tensors[id(array)] = array, self.torch.from_dlpack(jax.block_until_ready(array))
        return self.tensors[id(array)][1]

    def memory_analysis(self) -> None:
        """PyTorch does not say."""


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor that can be waited for, cut, and read, as a jax array."""

    tensor: Any
    torch: Any

    def block_until_ready(self) -> "Output":
        if self.tensor.is_cuda:
            self.torch.cuda.synchronize()
        return self

    def __getitem__(self, index) -> "Output":
        return Output(self.tensor[index], self.torch)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        # NumPy has no bf16.
        return self.tensor.float().cpu().numpy().astype(dtype or np.float32)
