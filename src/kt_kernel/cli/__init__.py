"""The ``kt`` command: one file per subcommand."""
