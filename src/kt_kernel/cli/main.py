"""``kt``: the entry point."""

import sys
from typing import TYPE_CHECKING

import typer

import kt_kernel
from kt_kernel.cli import bench, plan, quant, run
from kt_kernel.cli.language import CHINESE, language
from kt_kernel.errors import UserError

if TYPE_CHECKING:
    from typer.core import TyperCommand, TyperGroup

app = typer.Typer(
    help="Mixture-of-Experts layers on the CPU.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.command("plan")(plan.plan)
app.command("quant")(quant.quant)
app.command("run")(run.run)


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
    if language() == CHINESE:
        _translate(group)
    return group


def _translate(found: "TyperCommand | TyperGroup") -> None:
    found.help = _translated(found.help)
    for parameter in found.params:
        if getattr(parameter, "help", None):
            parameter.help = _translated(parameter.help)
    for child in getattr(found, "commands", {}).values():
        _translate(child)


def _translated(text: str | None) -> str | None:
    from kt_kernel.cli.chinese import texts

    return text and texts().get(text, text)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        sys.exit(command().main(arguments, prog_name="kt", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except UserError as error:
        print(f"kt: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        # Errors of usage know how to say themselves; typer prints them in a frame of three lines, we in one.
        if not hasattr(error, "format_message"):
            raise
        print(f"kt: {error.format_message()}", file=sys.stderr)
        sys.exit(error.exit_code)
