"""Facts per architecture, and which architecture code is traced for."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from amdgpu import arch


@pytest.mark.parametrize("name", arch.KNOWN)
def test_facts_fit_together(name):
    chip = arch.facts(name)
    assert chip.id == name
    assert chip.source
    assert chip.wave_size == (64 if name.startswith("gfx9") else 32)
    assert chip.cus % chip.xcds == 0
    assert chip.cus % chip.cus_per_wgp == 0
    assert chip.cus_per_wgp * chip.simds_per_cu == 4
    assert chip.lds_bytes_per_workgroup <= chip.lds_bytes_per_cu * chip.cus_per_wgp
    assert chip.lds_bytes_per_cu % chip.lds_granule == 0
    assert chip.vgprs_per_simd % chip.vgpr_granule == 0
    assert chip.vgprs_per_wave <= chip.vgprs_per_simd


def test_the_table_has_each_architecture_once():
    assert len(set(arch.KNOWN)) == len(arch.KNOWN) == len(arch.ARCHITECTURES)


@pytest.mark.parametrize("name", ["gfx900", "sm_90", "MI300X", ""])
def test_unknown_architecture_lists_the_known(name):
    with pytest.raises(ValueError, match=r"gfx942, gfx950, gfx1100, gfx1151, gfx1201") as error:
        arch.facts(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("name", "xcds"),
    [("gfx942", 8), ("gfx950", 8), ("gfx1100", 1), ("gfx1151", 1), ("gfx1201", 1)]
    + [("sm_90", 1), ("sm_100", 1), ("cpu", 1), ("gfx90a", 1), ("", 1)],
)
def test_xcds(name, xcds):
    assert arch.xcds(name) == xcds


def abstract(kind, platform="rocm"):
    return AbstractMesh((), (), abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform=platform))


@pytest.mark.parametrize("name", [*arch.KNOWN, "gfx90a"])
def test_abstract_device_is_seen_while_tracing(name):
    seen = []

    @jax.jit
    def f(x):
        seen.append(arch.current_arch())
        return x

    with use_abstract_mesh(abstract(name)):
        f.trace(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert seen == [name]


def test_abstract_device_of_another_maker_is_not_an_architecture():
    with use_abstract_mesh(abstract("NVIDIA H200", "cuda")):
        assert arch.current_arch() == "cpu"


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("gpu", "gfx942", "gfx942"),
        ("gpu", "gfx942:sramecc+:xnack-", "gfx942"),
        ("gpu", "9.0", "sm_90"),
        ("gpu", "10.0", "sm_100"),
        ("gpu", None, "cpu"),
        ("tpu", None, "cpu"),
        ("cpu", None, "cpu"),
    ],
)
def test_default_device_says_what_it_is(monkeypatch, platform, capability, expected):
    device = types.SimpleNamespace(platform=platform)
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "devices", lambda backend=None: [device])
    assert arch.current_arch() == expected


def test_chosen_default_device_wins_over_the_first(monkeypatch):
    first = types.SimpleNamespace(platform="gpu", compute_capability="gfx942")
    cpus = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda backend=None: cpus if backend else [first])
    assert arch.current_arch() == "gfx942"
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        assert arch.current_arch() == "cpu"
    with jax.default_device("cpu"):
        assert arch.current_arch() == "cpu"


def test_no_backend_at_all_is_a_cpu(monkeypatch):
    def devices(backend=None):
        raise RuntimeError("Unable to initialize backend 'rocm'")

    monkeypatch.setattr(jax, "devices", devices)
    assert arch.current_arch() == "cpu"


def test_importing_the_package_is_light():
    code = (
        "import sys, amdgpu.arch\n"
        "heavy = {'triton', 'amdgpu.isa', 'amdgpu.emulator', 'jax.experimental.pallas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute_of_the_package():
    import amdgpu

    with pytest.raises(AttributeError, match="nonsense"):
        _ = amdgpu.nonsense
