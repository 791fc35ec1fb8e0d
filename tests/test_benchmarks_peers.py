"""`python -m benchmarks --peers`, `--growth`, and `--orders` as on a GPU.

PyTorch is not installed for the tests: a stand-in of a few lines takes its place, with tensors of NumPy.
"""

import contextlib
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import candidates, growth, results, run, timing
from flash import grid
from references import cases, flash

FULL = cases.FlashCase("full", "", 1, 64, 64, 4, 2, 16, 16)
MHA = dataclasses.replace(FULL, name="mha", G=4)
STEP = cases.GqaCase("step", "", 2, 1, 40, 4, 2, 16, 16, sinks="uniform")
PROMPT = cases.GatedDeltaCase("prompt", "", 1, 40, 1, 2, 16, 16)
CAUSAL = dataclasses.replace(FULL, causal=True)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """As much of a tensor as the peers use."""

    x: np.ndarray
    is_cuda: bool = True

    shape = property(lambda self: self.x.shape)

    def transpose(self, i, j):
        return Tensor(self.x.swapaxes(i, j))

    def __getitem__(self, index):
        return Tensor(self.x[index])

    def float(self):
        return Tensor(self.x.astype(np.float32))

    def cpu(self):
        return self

    def numpy(self):
        return self.x

    def long(self):
        return Tensor(self.x.astype(np.int64))


class Torch(ModuleType):
    """Counts what is taken over from jax and how often it is waited for."""

    def __init__(self):
        super().__init__("torch")
        self.taken, self.waits, self.options, self.factor = 0, 0, {}, 1.0
        self.inference_mode = contextlib.nullcontext
        self.cuda = SimpleNamespace(synchronize=self.wait)
        self.nn = ModuleType("torch.nn")
        self.nn.functional = ModuleType("torch.nn.functional")
        self.nn.functional.scaled_dot_product_attention = self.attend

    def wait(self):
        self.waits += 1

    def from_dlpack(self, array):
        self.taken += 1
        return Tensor(np.asarray(array))

    def attend(self, q, k, v, **options):
        self.options = options
        q, k, v = (jnp.asarray(x.transpose(1, 2).x) for x in (q, k, v))
        o = flash.flash_attention(q, k, v, causal=options["is_causal"], scale=options["scale"])
        return Tensor(self.factor * np.asarray(o)).transpose(1, 2)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setattr(timing, "CACHE_BYTES", 2**16)
    stand_in = Torch()
    for name, module in {"": stand_in, ".nn": stand_in.nn, ".nn.functional": stand_in.nn.functional}.items():
        monkeypatch.setitem(sys.modules, f"torch{name}", module)
    return stand_in


def peers_of(case):
    arguments = cases.inputs(case)
    alone = {candidate.name for candidate in candidates.candidates(case, arguments, gpu=True)}
    found = candidates.candidates(case, arguments, gpu=True, with_peers=True)
    return [candidate for candidate in found if candidate.name not in alone]


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (FULL, ["torch"]),
        (MHA, ["torch", "pallas.ops 128x64", "pallas.ops 128x128"]),
        (CAUSAL, ["torch"]),
        # Their causal masks are aligned at the top left.
        (dataclasses.replace(CAUSAL, T=8), []),
        (dataclasses.replace(FULL, softcap=2.0), []),
        (dataclasses.replace(FULL, bias="full"), []),
        (dataclasses.replace(FULL, kv_lengths=(9,)), []),
        (STEP, ["torch, no sinks"]),
        (dataclasses.replace(STEP, T=40), ["torch, no sinks"]),
        (dataclasses.replace(STEP, T=40, window=8), []),
        (dataclasses.replace(STEP, sinks=None, past=(3, 4)), []),
        (PROMPT, ["fla"]),
    ],
    ids=str,
)
def test_peers(case, names):
    found = peers_of(case)
    assert [candidate.name for candidate in found] == names
    assert not any(candidate.ours for candidate in found)


@pytest.mark.parametrize("case", [FULL, STEP, PROMPT], ids=str)
def test_without_torch_a_peer_is_absent(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    settings = run.Settings(gpu=True, rounds=1, peers=True)
    peer = run.run_case(case, settings, timed=False)[-1]
    assert peer.status == "absent" and "torch" in peer.note


def test_without_fla_it_is_absent(torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    peer = run.run_case(PROMPT, run.Settings(gpu=True, rounds=1, peers=True), timed=False)[-1]
    assert (peer.arm, peer.status) == ("fla", "absent") and "fla" in peer.note


@pytest.mark.parametrize("case", [FULL, CAUSAL, STEP], ids=str)
def test_a_peer_is_checked_and_timed_beside_ours(torch, case):
    found = run.run_case(case, run.Settings(gpu=True, rounds=2, peers=True), timed=True)
    kernel, peer = found[0], found[-1]
    assert peer.arm.startswith("torch") and (kernel.status, peer.status, peer.note) == ("timed", "timed", "")
    assert 0 < peer.errors["o"] <= peer.bounds["o"] and len(peer.seconds) == len(kernel.seconds) == 2
    assert torch.options == {"is_causal": case is CAUSAL, "scale": None, "enable_gqa": True}
    # Each array once, however many calls; each sample is waited for.
    arrays = sum(isinstance(x, jax.Array) for x in cases.inputs(case).values()) - (case is STEP)
    assert torch.taken % arrays == 0 and torch.taken <= arrays * timing.MAX_INPUT_SETS
    assert torch.waits >= 4


@pytest.mark.parametrize(
    ("factor", "status", "note"),
    [
        (1 + 1e-4, "timed", "beyond the bound that holds for ours"),
        (1.5, "absent", "wrong: "),
        (np.nan, "absent", "wrong: "),
    ],
)
def test_a_peer_beyond_our_bound_is_said_to_be(torch, factor, status, note):
    torch.factor = factor
    peer = run.run_case(FULL, run.Settings(gpu=True, rounds=1, peers=True), timed=True)[-1]
    assert (peer.arm, peer.status) == ("torch", status) and peer.note.startswith(note)


@pytest.mark.parametrize("error", [AssertionError("no fp32"), TypeError("no such argument"), BufferError("dlpack")])
def test_a_peer_may_refuse_in_any_way(torch, monkeypatch, error):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    peer = run.run_case(FULL, run.Settings(gpu=True, rounds=1, peers=True), timed=True)[-1]
    assert (peer.status, peer.note) == ("absent", f"{type(error).__name__}: {error}")


def test_the_truth_is_computed_once_for_all_who_compute_the_same(torch, monkeypatch):
    made = []
    truth_of = run.truth_of
    monkeypatch.setattr(run, "truth_of", lambda *args, **options: made.append(1) or truth_of(*args, **options))
    for case, truths in ((FULL, 1), (dataclasses.replace(STEP, sinks=None), 1), (STEP, 2)):
        made.clear()
        run.run_case(case, run.Settings(gpu=True, rounds=1, peers=True), timed=False)
        assert len(made) == truths


def test_fla_gets_what_it_counts_with(torch, monkeypatch):
    seen = {}

    def rule(**arguments):
        seen.update(arguments)
        return arguments["v"], arguments["initial_state"]

    rules = ModuleType("fla.ops.gated_delta_rule")
    rules.chunk_gated_delta_rule = rules.fused_recurrent_gated_delta_rule = rule
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, rules)
    packed = dataclasses.replace(PROMPT, cu_seqlens=(0, 10, 40))
    (peer,) = peers_of(packed)
    o, state = jax.block_until_ready(peer.compile()(*peer.arrays()))
    assert seen["cu_seqlens"].x.dtype == np.int64 and seen["cu_seqlens"].shape == (3,)
    assert "state_v_first" not in seen
    assert seen["output_final_state"] is True and seen["g"].shape == (1, 40, 2)
    assert np.asarray(o[:, :3]).shape == (1, 3, 2, 16) and np.asarray(state, np.float64).dtype == np.float64


def test_pallas_has_no_tails():
    _, *found = peers_of(MHA)
    assert len(found) == 2
    for peer in found:
        with pytest.raises(NotImplementedError, match="no tails"):
            peer.compile()


# Growth


def curve(arm, seconds, scratch=None):
    shape = {"B": 1, "G": 2}
    return [
        results.Result(
            "flash", f"c at {T}", arm, shape | {"T": T, "S": T}, "timed", seconds=[s], median=s, scratch=scratch
        )
        for T, s in seconds.items()
    ]


def test_growth_is_the_exponent_between_lengths():
    found = curve("kernel", {256: 16e-3, 64: 1e-3, 1024: 64e-3}, scratch=2**21)
    _, _, *rows = growth.as_text(found).splitlines()
    assert [row.split()[-2] for row in rows] == ["-", "2.00", "1.00"]
    assert rows[1].split() == ["c", "at", "256", "kernel", "256", "16.0", "ms", "62500", "2.00", "2.00"]
    assert growth.as_text([]) == ""


@pytest.mark.parametrize("algorithm", command.TABLES)
def test_lengths_make_curves(algorithm):
    real = command.TABLES[algorithm][2]
    options = command.parse([algorithm, "--growth"])
    planned, _ = command.plan(options, algorithm, True, 15)
    assert all(timed for _, timed in planned)
    longest = max(case.T for case, _ in planned)
    assert longest == {"gated_delta": 262144, "flash": 65536, "gqa": 262144}[algorithm]
    made = [
        results.Result(algorithm, case.name, "kernel", run.shape_of(case), "timed", seconds=[1.0], median=1.0)
        for case, _ in planned
    ]
    assert all(len(members) >= 3 for members in results.families(made).values())
    for case, _ in planned:
        (parent,) = (one for one in real if one.name == case.name.split(" at ")[0])
        keys = {} if algorithm == "gated_delta" else {"S": case.T}
        assert case == dataclasses.replace(parent, name=case.name, T=case.T, **keys)
    # Without a GPU: what fits, and no small cases.
    fits, left_out = command.plan(options, algorithm, False, 3)
    assert all(timed for _, timed in fits) and f"at {longest}" in left_out


def test_every_length_belongs_to_a_case():
    assert growth.LENGTHS.keys() <= {case.name for _, _, real in command.TABLES.values() for case in real}


# Orders, timed


def test_each_order_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(timing, "CACHE_BYTES", 2**16)
    found = run.run_case(CAUSAL, run.Settings(gpu=True, rounds=1), timed=True, arms_of=candidates.orders)
    assert [result.arm for result in found] == ["kv_group_first", "block_first", "head_first", "swizzled_head_first"]
    assert {result.arm for result in found} == set(grid.ORDERS)
    assert all(result.status == "timed" and result.errors["o"] <= result.bounds["o"] for result in found)


def test_orders_that_do_not_exist_are_left_out(monkeypatch):
    monkeypatch.setattr(candidates, "current_arch", lambda: "gfx942")
    names = [candidate.name for candidate in candidates.orders(CAUSAL, cases.inputs(CAUSAL))]
    assert names == ["kv_group_first", "block_first", "head_first"]
