"""What keeps a figure from being taken; the message says what to do."""


class BenchError(Exception):
    """Ends the command with one line and exit code 1."""


class SideError(BenchError):
    """A measuring process could not do what it was asked."""
