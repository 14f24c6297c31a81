"""``kt``: the entry point."""

import sys
from typing import TYPE_CHECKING

import typer

import kt_kernel
from kt_kernel.cli import bench, config, model, printing, quant, run, version
from kt_kernel.cli.language import say, translated
from kt_kernel.errors import UserError

if TYPE_CHECKING:
    from typer.core import TyperCommand, TyperGroup

app = typer.Typer(
    help="Mixture-of-Experts layers on the CPU.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("run")(run.run)
app.add_typer(model.app, name="model")
app.command("quant", epilog=quant.EXAMPLES)(quant.quant)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.command("version", epilog=printing.examples("kt version", "kt version --json"))(version.version)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kt-kernel {kt_kernel.__version__} ({kt_kernel.__cpu_variant__})")
        raise typer.Exit


@app.callback()
def _kt(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def command() -> "TyperGroup":
    """All commands, with their help in the user's language: what is given as plain text is translated here."""
    group = typer.main.get_command(app)
    _translate(group)
    return group


def _translate(found: "TyperCommand | TyperGroup") -> None:
    found.help = translated(found.help or "")
    for parameter in found.params:
        if getattr(parameter, "help", None):
            parameter.help = translated(parameter.help)
    for child in getattr(found, "commands", {}).values():
        _translate(child)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        sys.exit(command().main(arguments, prog_name="kt", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except UserError as error:
        words = sys.argv[1:] if arguments is None else arguments
        printing.note(words[0], " ".join(say(error.phrase).split()))
        sys.exit(1)
    except Exception as error:
        # Errors of usage know how to say themselves; typer prints them in a frame of three lines, we in one.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        # A group without a command is answered with its help.
        print(message if message.startswith("Usage:") else f"kt: {message}", file=sys.stderr)
        sys.exit(error.exit_code)
