"""``kt config``: what is set once for all commands."""

from typing import Annotated

import typer

from kt_kernel import settings
from kt_kernel.cli import printing
from kt_kernel.cli.language import t, translated
from kt_kernel.settings import SETTINGS

app = typer.Typer(help="Show and change settings.", no_args_is_help=True, rich_markup_mode=None)


def _names(incomplete: str) -> list[tuple[str, str]]:
    return [(name, setting.about) for name, setting in SETTINGS.items() if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="As in server.port.", autocompletion=_names, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")]


@app.command(epilog=printing.examples("kt config show", "kt config show server.port", "kt config show --json"))
def show(
    name: Annotated[str | None, typer.Argument(help="One setting (default: all).", autocompletion=_names)] = None,
    as_json: AsJson = False,
) -> None:
    """Show settings and what they mean."""
    values = settings.everything() if name is None else {name: settings.get(name)}
    if as_json:
        printing.print_json(values)
        return
    for key, value in values.items():
        print(f"{key}: {settings.as_text(value)}" + (f" ({t('set')})" if settings.is_set(key) else ""))
        print(f"  {translated(SETTINGS[key].about)}")


@app.command(epilog=printing.examples("kt config get server.port"))
def get(name: Name, as_json: AsJson = False) -> None:
    """Print the value of a setting, and nothing else."""
    value = settings.get(name)
    if as_json:
        printing.print_json({name: value})
    else:
        print(settings.as_text(value))


@app.command(
    "set",
    epilog=printing.examples(
        "kt config set server.port 30000", "kt config set general.color no", "kt config set inference.cpu_threads auto"
    ),
)
def set_value(
    name: Name,
    value: Annotated[str, typer.Argument(help="Lists as in a,b; 'auto' where kt may choose.", show_default=False)],
) -> None:
    """Set a setting."""
    print(f"{name}: {settings.as_text(settings.set(name, value))}")


@app.command(epilog=printing.examples("kt config reset server.port", "kt config reset --yes"))
def reset(
    name: Annotated[str | None, typer.Argument(help="One setting (default: all).", autocompletion=_names)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Go back to the default, of one setting or of all."""
    if name is None and not yes:
        if not printing.is_terminal("stdin"):
            printing.fail("config reset", t("all settings would go: name one, or add --yes"))
        typer.confirm(t("Set all settings back?"), abort=True, err=True)
    settings.reset(name)
    if name is not None:
        print(f"{name}: {settings.as_text(settings.get(name))}")


@app.command(epilog=printing.examples("kt config path", '$EDITOR "$(kt config path)"'))
def path() -> None:
    """Print where the settings are kept."""
    print(settings.path())
