"""``kt``: the entry point."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

import typer

import kt_kernel
from kt_kernel.cli import help
from kt_kernel.cli.language import say
from kt_kernel.errors import UserError

if TYPE_CHECKING:
    from typer.core import TyperGroup

# Modules of cli/. One that has an `app` is a group; else its function of the same name is the command.
COMMANDS = ("run", "chat", "plan", "model", "quant", "doctor", "verify", "bench", "config", "version")


def command(name: str | None = None) -> "TyperGroup":
    """`kt` with one command, or with all: to import all of them takes half a second."""
    app = typer.Typer(
        help="Mixture-of-Experts layers on the CPU.",
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_kt)
    for one in [name] if name in COMMANDS else COMMANDS:
        module = importlib.import_module(f"kt_kernel.cli.{one}")
        if group := getattr(module, "app", None):
            app.add_typer(group, name=one)
        else:
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            app.command(one, epilog=module.EXAMPLES, context_settings=settings)(getattr(module, one))
    kt = typer.main.get_command(app)
    kt.commands = {one: kt.commands[one] for one in COMMANDS if one in kt.commands}  # typer puts groups last
    help.prepare(kt)
    return kt


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kt-kernel {kt_kernel.__version__} ({kt_kernel.__cpu_variant__})")
        raise typer.Exit


def _kt(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


def _run(words: list[str]) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks characters gets '?', as stderr has its way
    kt = command(words[0] if words else None)
    try:
        code = kt.main(words, prog_name="kt", standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _nobody_reads()
    except UserError as error:
        print(f"{_path(kt, words)}: {' '.join(say(error.phrase).split())}", file=sys.stderr)
        return 1
    except Exception as error:
        # Errors of usage know how to say themselves; typer prints them in a frame of three lines, we in one.
        if isinstance(error, typer.Abort) or not hasattr(error, "format_message"):
            raise
        print(help.usage_error(_path(kt, words), error.format_message()), file=sys.stderr)
        return error.exit_code


def _path(group: "TyperGroup", words: list[str]) -> str:
    """The command that the words name, as far as there is one."""
    names, commands = ["kt"], group.commands
    for word in words:
        if word not in commands:
            break
        names.append(word)
        commands = getattr(commands[word], "commands", {})
    return " ".join(names)


def _nobody_reads() -> int:
    """As after `kt ... | head`: no complaint now, and none of Python's when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1  # as typer, which notices when the pipe breaks earlier
