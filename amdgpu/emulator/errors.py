"""The one exception of the package."""


class EmulatorError(Exception):
    """The machine code did something undefined, out of bounds, or unknown to the emulator."""
