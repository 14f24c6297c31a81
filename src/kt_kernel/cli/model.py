"""``kt model``: the models on this machine, and those that can be had."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kt_kernel import settings
from kt_kernel.cli import model_files, printing
from kt_kernel.cli.language import t
from kt_kernel.errors import UserError
from kt_kernel.registry import user_models
from kt_kernel.registry.find import DEMO, Found, find
from kt_kernel.registry.known import known_models

app = typer.Typer(help="Find, add, download and check models.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")]
_GB = 1e9


def model_names(incomplete: str) -> list[str]:
    """For completion in a shell."""
    names = [DEMO]
    with suppress(UserError):  # a damaged file is told by commands, not while somebody types
        names += [model.name for model in user_models.user_models()]
        names += [word for model in known_models() for word in (model.name, *model.aliases)]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


Model = Annotated[
    str, typer.Argument(help="A name, an alias, a path or a hub id.", autocompletion=model_names, show_default=False)
]


@app.command("list", epilog=printing.examples("kt model list", "kt model list --all", "kt model list --moe --json"))
def list_models(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also known models that are not here.")] = False,
    moe: Annotated[bool | None, typer.Option("--moe/--no-moe", help="Only those with, or without, experts.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also why something could not be told.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models on this machine.

    Those that were added, those in the folders of models, and those in the cache of huggingface_hub.
    """
    from kt_kernel.registry.discovery import local_models

    rows = [_facts(found) for found in local_models()]
    if moe is not None:
        rows = [row for row in rows if row["moe"] is moe]
    others = [_known_facts(model.name) for model in known_models() if everything and moe is not False]
    if as_json:
        printing.print_json({"models": rows, "known": others} if everything else {"models": rows})
        return
    if not rows and not others:
        printing.note(
            "model list", t("no models in {folders}; 'kt model list --all' shows known ones", folders=_folders_text())
        )
    if rows:
        columns = [t("Name"), t("Format"), t("Experts"), t("Method"), t("GB"), t("State"), t("Path")]
        printing.table(columns, [_row(row, verbose) for row in rows])
    if others:
        columns = [t("Known"), t("Aliases"), t("Experts"), t("Method"), t("GB")]
        printing.table(columns, [_known_row(row) for row in others])


@app.command(epilog=printing.examples("kt model info m2", "kt model info ~/models/Qwen3-30B-A3B --json"))
def info(model: Model, as_json: AsJson = False) -> None:
    """Show what a model is, and where."""
    found = _made(find(model))
    known = _known_facts(found.known.name) if found.known else {}
    facts = _facts(found) if found.path else {"name": found.name, "repo": found.repo, "path": None}
    if as_json:
        printing.print_json({**known, **{key: value for key, value in facts.items() if value is not None}})
        return
    rows = [(t("Name"), found.name), (t("Hub"), found.repo), (t("Aliases"), ", ".join(known.get("aliases", ())))]
    if found.path is None:
        state = (
            t("made by 'kt run demo'") if found.name == DEMO else t("not here: kt model download {name}", name=model)
        )
        rows += [
            (t("State"), state),
            (t("Experts"), _experts(known)),
            (t("Layers"), known.get("layers")),
            (t("Method"), known.get("method")),
            (t("GB"), known.get("gb")),
        ]
    else:
        rows += [
            (t("Path"), found.path),
            (t("Format"), facts["format"]),
            (t("State"), facts["state"]),
            (t("Architecture"), facts["model_type"]),
            (t("Experts"), _experts(facts)),
            (t("Layers"), facts["layers"]),
            (t("Method"), facts["method"]),
            (t("Stored as"), facts["stored_as"]),
            (t("GB"), facts["gb"]),
            (t("Files"), facts["files"]),
            (t("Note"), facts["problem"]),
        ]
    printing.facts((name, value) for name, value in rows if value not in (None, ""))


@app.command(epilog=printing.examples("kt model add ~/models/GLM-4.5-Air", "kt model add ./model.gguf --name mine"))
def add(
    path: Annotated[Path, typer.Argument(help="The folder of a model, or a GGUF file.", show_default=False)],
    name: Annotated[str | None, typer.Option("--name", "-n", help="What to call it (default: its folder).")] = None,
    repo: Annotated[str | None, typer.Option("--repo", help="Where it is from, as in org/name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Give a model that is here a name."""
    added = _register(path, name, repo)
    if as_json:
        printing.print_json({"name": added.name, "path": added.path})
    else:
        print(t("{name} is {path}", name=added.name, path=added.path))


@app.command(epilog=printing.examples("kt model remove mine"))
def remove(
    name: Annotated[str, typer.Argument(help="The name that it was given.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Not needed: files are left alone.")] = False,
) -> None:
    """Take a name off the list. The files stay where they are."""
    meant = next((known.name for known in known_models() if name.lower() in known.aliases), name)
    removed = user_models.remove(name) or user_models.remove(meant)
    if removed is None:
        printing.fail("model remove", t("no model was added as '{name}': 'kt model list' shows the names", name=name))
    print(t("{name} is off the list; its files stay in {path}", name=removed.name, path=removed.path))


@app.command(epilog=printing.examples("kt model scan", "kt model scan /data --min-size 2 --add"))
def scan(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Where to look (default: the folders of models).", show_default=False)
    ] = None,
    min_size: Annotated[float, typer.Option("--min-size", min=0, help="GB that a model has at least.")] = 2.0,
    max_depth: Annotated[int, typer.Option("--max-depth", min=0, max=32, help="Folders below to look into.")] = 6,
    add_all: Annotated[bool, typer.Option("--add", help="Give all that is found the names of their folders.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for models that have no name yet."""
    from kt_kernel.registry.discovery import models_below

    named = {Path(model.path).resolve() for model in user_models.user_models()}
    found = []
    # Before the first download kt's own folder is not there, which is no fault of the user.
    for folder in folders or [folder for folder in settings.model_folders() if folder.is_dir()]:
        if not folder.expanduser().is_dir():
            printing.fail("model scan", t("{folder} is no folder", folder=folder))
        places = models_below(folder.expanduser().absolute(), max_depth)
        found += [_facts(Found(_name_of(place), place)) for place in places if place.resolve() not in named]
    found = [facts for facts in found if (facts["bytes"] or 0) >= min_size * _GB]
    for facts in found if add_all else ():
        facts["name"] = _register(Path(facts["path"]), _free_name(facts["name"]), None).name
    if as_json:
        printing.print_json({"models": found, "added": add_all})
    elif found:
        columns = [t("Name"), t("Format"), t("Experts"), t("Method"), t("GB"), t("State"), t("Path")]
        printing.table(columns, [_row(facts, False) for facts in found])
        if not add_all:
            printing.note("model scan", t("'kt model add PATH' names one, 'kt model scan --add' all"))
    else:
        printing.note("model scan", t("nothing new was found"))


@app.command("path-list", epilog=printing.examples("kt model path-list"))
def path_list(as_json: AsJson = False) -> None:
    """List the folders of models.

    Models are looked for there; downloads go into the first.
    """
    folders = settings.model_folders()
    if as_json:
        printing.print_json({"paths": [str(folder) for folder in folders]})
    else:
        print(*folders, sep="\n")


@app.command("path-add", epilog=printing.examples("kt model path-add /data/models"))
def path_add(
    folder: Annotated[Path, typer.Argument(help="A folder with models.", show_default=False)],
    first: Annotated[bool, typer.Option("--first", help="Downloads go there.")] = False,
) -> None:
    """Also look for models in this folder."""
    folder = folder.expanduser().absolute()
    if not folder.is_dir():
        printing.fail("model path-add", t("{folder} is no folder", folder=folder))
    others = [other for other in settings.model_folders() if other.resolve() != folder.resolve()]
    _set_folders([folder, *others] if first else [*others, folder])


@app.command("path-remove", epilog=printing.examples("kt model path-remove /data/models"))
def path_remove(
    folder: Annotated[Path, typer.Argument(help="A folder of path-list.", show_default=False)],
) -> None:
    """No longer look for models in this folder. It stays as it is."""
    folders = settings.model_folders()
    left = [other for other in folders if other.resolve() != folder.expanduser().resolve()]
    if len(left) == len(folders):
        printing.fail("model path-remove", t("{folder} is not on the list: kt model path-list", folder=folder))
    _set_folders(left)


app.command(
    "verify", epilog=printing.examples("kt model verify m2", "kt model verify --all", "kt model verify ./model --json")
)(model_files.verify)
app.command(
    "download",
    epilog=printing.examples(
        "kt model download qwen3-30b",
        "kt model download unsloth/Qwen3-30B-A3B-GGUF --include '*Q4_K_M*'",
        "kt model download openai/gpt-oss-20b --dir /data/gpt-oss-20b",
    ),
)(model_files.download)


def _made(found: Found) -> Found:
    """With the place of the demo model, once it is there."""
    from kt_kernel.demo.model import usual_path

    return replace(found, path=usual_path()) if found.name == DEMO and usual_path().exists() else found


def _set_folders(folders: list[Path]) -> None:
    settings.assign("paths.models", [str(folder) for folder in folders])
    print(*settings.model_folders(), sep="\n")


def _register(path: Path, name: str | None, repo: str | None) -> user_models.UserModel:
    from kt_kernel.registry.contents import contents

    path = path.expanduser().absolute()
    try:
        found = contents(path)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    return model_files.register(name or _name_of(path), path, repo, found)


def _name_of(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _free_name(name: str) -> str:
    """As much of a folder's name as can be one, with a number where it is taken."""
    name = re.sub(r"[^\w.+-]+", "-", name).lstrip("-.+") or "model"
    taken = {model.name.lower() for model in user_models.user_models()}
    names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 3))]
    return next(free for free in names if free.lower() not in taken)


def _folders_text() -> str:
    return ", ".join(str(folder) for folder in settings.model_folders())


def _facts(found: Found) -> dict[str, object]:
    """What is on the disk, for people and for JSON."""
    from kt_kernel.registry.contents import Contents, contents

    told = Contents("", 0, 0)
    try:
        told, state = contents(found.path), "ok"
        state = "incomplete" if not told.complete else state
    except FileNotFoundError:
        state = "gone"
    except (ValueError, OSError):
        state = "empty"
    return {
        "name": found.name,
        "path": str(found.path),
        "repo": found.repo,
        "format": told.format,
        "state": state,
        "moe": told.is_moe,
        "experts": told.experts,
        "top_k": told.top_k,
        "layers": told.layers,
        "hidden": told.hidden,
        "model_type": told.model_type,
        "method": told.method,
        "stored_as": told.stored_as,
        "files": told.files,
        "bytes": told.bytes,
        "gb": round(told.bytes / _GB, 1),
        "problem": told.problem,
    }


def _known_facts(name: str) -> dict[str, object]:
    from kt_kernel.plan.sizes import checkpoint_bytes

    model = next(model for model in known_models() if model.name == name)
    facts = model.facts
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "repo": model.repo,
        "method": model.method,
        "experts": facts.experts if facts else None,
        "top_k": facts.top_k if facts else None,
        "layers": facts.layers if facts else None,
        "gb": round(checkpoint_bytes(facts) / _GB) if facts else None,
    }


def _experts(facts: dict[str, object]) -> str | None:
    return t("{all}, {some} at a time", all=facts["experts"], some=facts["top_k"]) if facts.get("experts") else None


def _row(facts: dict[str, object], verbose: bool) -> list[object]:
    experts = f"{facts['experts']}/{facts['top_k']}" if facts["experts"] else None
    state = f"{facts['state']}: {facts['problem']}" if verbose and facts["problem"] else facts["state"]
    method = facts["stored_as"] or facts["method"]
    return [facts["name"], facts["format"], experts, method, facts["gb"], state, facts["path"]]


def _known_row(facts: dict[str, object]) -> list[object]:
    experts = f"{facts['experts']}/{facts['top_k']}" if facts["experts"] else None
    return [facts["name"], ", ".join(facts["aliases"]), experts, facts["method"], facts["gb"]]
