"""What keeps a figure from being taken; the message says what to do."""

from importlib.util import find_spec


class BenchError(Exception):
    """Ends the command with one line and exit code 1."""


def need_engine() -> None:
    """For what runs whole models."""
    missing = [name for name in ("tokenizers", "transformers") if find_spec(name) is None]
    if missing:
        raise BenchError(f"{' and '.join(missing)} not found: pip install 'kt-kernel[engine]'")


class SideError(BenchError):
    """A measuring process could not do what it was asked."""
