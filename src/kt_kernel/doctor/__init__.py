"""What keeps this machine from its speed, what it costs, and the command that mends it: the checks of ``kt doctor``."""
