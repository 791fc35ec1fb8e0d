"""`python -m amdgpu`: what this package's kernels, or those of your own function, become on AMD GPUs.

    python -m amdgpu gated_delta --arch gfx942 gfx1151
    python -m amdgpu all --json evidence.json --asm machine_code
    python -m amdgpu gated_delta --arch gfx942 --run
    python -m amdgpu my_module:my_function --shapes "bf16[1,4096,32,128]" "f32[32]" --static causal=True
    python -m amdgpu my_module:my_function --shapes "f32[64,64]" --run --reference my_module:my_reference

Needs no GPU, only the extra `isa`. Exit status: 0; 1 where a kernel does not compile, has a fault (it does not fit
the chip, touches scratch memory in a loop, or multiplies in a loop without matrix instructions), or (with `--run`)
computes something else than its reference; 2 for arguments that make no sense.
"""

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import operator
import pathlib
import re
import sys

import jax
import jax.numpy as jnp

from amdgpu import arch as architectures
from amdgpu import check, isa, shipped
from amdgpu.emulator.errors import EmulatorError
from amdgpu.lowering import load_triton
from amdgpu.table import NOTE, table

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "f64": "float64",
    "fp64": "float64",
    **{
        f"{letter}{bits}": f"{name}{bits}" for letter, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
    },
}


def parse_shapes(text: str) -> list[jax.ShapeDtypeStruct | None]:
    """Shapes such as `bf16[1,4096,32,128]`, `int32[]` or `none`, separated by blanks.

    Raises:
        ValueError: something else; the message quotes it.
    """
    shapes = []
    for word in re.sub(r",\s+", ",", text).split():
        if word == "none":
            shapes.append(None)
            continue
        match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", word)
        if not match:
            raise ValueError(f"shapes: got {word!r}, expected a dtype and sizes such as bf16[1,4096,32,128]")
        try:
            dtype = jnp.dtype(_DTYPES.get(match[1], match[1]))
        except TypeError as error:
            raise ValueError(f"shapes: {match[1]!r} in {word!r} is no dtype") from error
        sizes = tuple(int(n) for n in match[2].split(",") if n)
        shapes.append(jax.ShapeDtypeStruct(sizes, dtype))
    return shapes


def parse_static(words: list[str]) -> dict:
    """Keyword arguments from words such as `causal=True`: Python literals, anything else is a string."""
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"static: got {word!r}, expected name=value")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def find_function(name: str):
    """The function that `module:function` names.

    Raises:
        ValueError: no such module, or nothing callable of that name in it.
    """
    module, _, attribute = name.partition(":")
    try:
        fn = operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise ValueError(f"target: no module {error.name!r}, asked for by {name!r}") from error
    except AttributeError as error:
        raise ValueError(f"target: {error}, asked for by {name!r}") from error
    if not callable(fn):
        raise ValueError(f"target: {name!r} is no function")
    return fn


def _works(options) -> list[tuple[str, list[shipped.Work]]]:
    """(heading, works) of all that was asked for."""
    archs = options.arch or architectures.KNOWN
    for arch in archs:
        architectures.facts(arch)
    if ":" in options.target:
        fn, shapes = find_function(options.target), tuple(parse_shapes(" ".join(options.shapes)))
        static = parse_static(options.static)
        label = " ".join([*options.shapes, *options.static])
        works = [shipped.Work(options.target, label, fn, arch, shapes, static) for arch in archs]
        return [(options.target, works)]
    if options.shapes or options.static or options.reference:
        raise ValueError("--shapes, --static and --reference go with a target module:function")
    if options.target not in (*shipped.ALGORITHMS, "all"):
        known = ", ".join((*shipped.ALGORITHMS, "all"))
        raise ValueError(f"target: got {options.target!r}, expected one of {known}, or module:function")
    names = shipped.ALGORITHMS if options.target == "all" else (options.target,)
    return [(name, shipped.works(name, archs)) for name in names]


def _examine(work: shipped.Work, folder: pathlib.Path | None, say) -> tuple[dict, bool]:
    """Compiles one work and tells of it; (its JSON, whether all is well)."""
    found = {field: getattr(work, field) for field in ("name", "label", "arch", "row", "reason")}
    say(f"\n{work.arch}  {work.name}  {work.label}")
    if work.row:
        say(f"  {work.row}: {work.reason}")
    try:
        reports = isa.compile_for(work.fn, *work.shapes, arch=work.arch, **work.keywords)
    except (isa.CompileError, isa.NoPallasKernel) as error:
        say(f"  {error}")
        return found | {"error": str(error)}, False
    say(table(reports))
    if folder is not None:
        _write_code(reports, folder / f"{work.arch}_{re.sub(r'[^A-Za-z0-9.]+', '_', work.name)}")
    return found | {"kernels": [r.as_dict() for r in reports]}, not any(r.faults for r in reports)


def _write_code(reports: list[isa.KernelReport], folder: pathlib.Path) -> None:
    """Assembly and Triton IR of each kernel; the assembly's `.loc` lines number those of the IR."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, r in enumerate(reports):
        (folder / f"{i}_{r.name}.s").write_text(r.kernel.amdgcn)
        (folder / f"{i}_{r.name}.ttir").write_text(r.kernel.call.ttir)


def _checks(options, name: str, works: list[shipped.Work]) -> list[check.Check]:
    """What `--run` runs for one heading."""
    if ":" not in options.target:
        return shipped.checks(name, options.arch or architectures.KNOWN)
    if not options.reference:
        raise ValueError("--run: a function of your own needs --reference module:function to compare with")
    reference = find_function(options.reference)
    return [check.own_check(f"{w.name} {w.label}", w.arch, w.fn, reference, w.shapes, w.keywords) for w in works]


def _run(one: check.Check, say) -> tuple[dict, bool]:
    """Runs one check and tells of it; (its JSON, whether all is well)."""
    try:
        result = check.run_check(one)
    except (EmulatorError, jax.errors.JaxRuntimeError) as error:
        # jax wraps what its callbacks raise; the last line is the emulator's own.
        reason = str(error).strip().splitlines()[-1]
        say(f"  FAILED     {one.arch}  {one.name}\n    {reason}")
        return {"name": one.name, "arch": one.arch, "equal": False, "error": reason}, False
    verdict = "equal" if result.equal else "DIFFERENT" if result.kernels else "NO KERNEL RAN"
    say(f"  {verdict:<9}  {one.arch}  {one.name}")
    errors = (f"{part} {error:.1e} (at most {bound:.1e})" for part, (error, bound) in result.errors.items())
    say(f"    error: {', '.join(errors)}")
    kernels = ", ".join(dict.fromkeys(result.kernels))
    say(f"    {result.wave_instructions:,} wave instructions of {kernels}; {result.seconds:.1f} s in all")
    found = {"name": one.name, "arch": one.arch, "equal": result.equal, **dataclasses.asdict(result)}
    return found, result.equal


def _parser() -> argparse.ArgumentParser:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m amdgpu",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help=f"{', '.join(shipped.ALGORITHMS)}, all, or module:function")
    parser.add_argument("--arch", nargs="+", help=f"architecture ids (default: {' '.join(architectures.KNOWN)})")
    parser.add_argument("--shapes", nargs="+", default=[], help="positional arguments, e.g. bf16[1,4096,32,128]")
    parser.add_argument("--static", nargs="+", default=[], metavar="NAME=VALUE", help="static keyword arguments")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the same as JSON, to stdout or a file")
    parser.add_argument("--asm", type=pathlib.Path, metavar="DIR", help="write assembly and Triton IR there")
    parser.add_argument(
        "--run",
        action="store_true",
        help="also run as machine code, on the CPU, and compare: small cases only",
    )
    parser.add_argument("--reference", metavar="MODULE:FUNCTION", help="what --run compares your function with")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        triton, _ = load_triton()
        groups = _works(options)
        checks = {name: _checks(options, name, works) if options.run else [] for name, works in groups}
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    # With JSON on stdout the tables would be in its way.
    say = (lambda text: None) if options.json == "-" else functools.partial(print, flush=True)
    say(f"{NOTE}\njax {jax.__version__}, triton {triton.__version__}")
    well, document = True, {"note": NOTE, "jax": jax.__version__, "triton": triton.__version__}
    document |= {"results": [], "runs": []}
    for name, works in groups:
        for work in works:
            found, fine = _examine(work, options.asm, say)
            document["results"].append({"target": name, **found})
            well &= fine
        if checks[name]:
            say(f"\n{name}: run as machine code on the CPU, against the reference")
        for one in checks[name]:
            found, fine = _run(one, say)
            document["runs"].append({"target": name, **found})
            well &= fine
    if options.json == "-":
        json.dump(document, sys.stdout, indent=1)
    elif options.json:
        pathlib.Path(options.json).write_text(json.dumps(document, indent=1))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
