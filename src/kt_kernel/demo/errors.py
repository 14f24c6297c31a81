"""What keeps the demo model from being made; the message says what to do."""


class DemoError(RuntimeError):
    """One line for the user."""
