"""One way of computing a case."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax


class Program(Protocol):
    """As much of `jax.stages.Compiled` as is used: what `Candidate.compile` returns."""

    def __call__(self, *arrays: jax.Array) -> tuple[Any, ...]: ...

    def memory_analysis(self) -> Any:
        """None where nobody says."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of computing a case.

    Attributes:
      name: "kernel", "reference", or whose it is.
      function: `function(**arguments)` returns a tuple of arrays.
      arguments: of `function`; arrays among them become arguments of the compiled program, the rest is
        static.
      state: name of the array that the last output replaces from call to call (donated), or None.
      ours: whether a wrong result or a refusal to compile is a fault of this package.
      same_as: arguments of the public function that ask for the same result, if not `arguments`.
    """

    name: str
    function: Callable[..., tuple[Any, ...]]
    arguments: dict[str, Any]
    state: str | None = None
    ours: bool = True
    same_as: dict[str, Any] | None = None

    def array_names(self) -> list[str]:
        return [name for name, value in self.arguments.items() if isinstance(value, jax.Array)]

    def arrays(self) -> list[jax.Array]:
        """The arguments of `compile`'s program, in order."""
        return [self.arguments[name] for name in self.array_names()]

    def compile(self) -> Program:
        """The program for these shapes: takes `arrays()`, returns the outputs.

        Raises:
          NotImplementedError: this way cannot do the case.
        """
        names = self.array_names()
        static = {name: value for name, value in self.arguments.items() if name not in names}

        def call(*arrays):
            return self.function(**dict(zip(names, arrays, strict=True)), **static)

        # The name of the program in a trace.
        call.__name__ = self.name.replace(" ", "_")
        donated = [names.index(self.state)] if self.state is not None else []
        return jax.jit(call, donate_argnums=donated).lower(*self.arrays()).compile()


@dataclasses.dataclass(frozen=True)
class PlainAttention:
    """A case of attention for functions that know causal masks and windows, aligned at the top left, and no more.

    Attributes:
      arguments: q, k, v, and the scale (None: `K**-0.5`).
      same_as: as in Candidate.
      is_causal, window: the mask; the window counts a row's own key.
      note: to be added to a candidate's name.
    """

    arguments: dict[str, Any]
    same_as: dict[str, Any]
    is_causal: bool
    window: int | None
    note: str

    def candidate(self, name: str, function: Callable, kind: type[Candidate] = Candidate) -> Candidate:
        """Of another's `function(q=, k=, v=, scale=)`."""
        return kind(name + self.note, function, self.arguments, ours=False, same_as=self.same_as)
