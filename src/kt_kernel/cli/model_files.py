"""``kt model verify`` and ``kt model download``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kt_kernel import settings
from kt_kernel.cli import printing
from kt_kernel.cli.language import t
from kt_kernel.errors import UserError
from kt_kernel.registry import user_models
from kt_kernel.registry.find import DEMO, Found, download_folder, find
from kt_kernel.registry.user_models import UserModel

if TYPE_CHECKING:
    from kt_kernel.registry.checks import Check, Progress
    from kt_kernel.registry.contents import Contents
    from kt_kernel.registry.download import Download

AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")]
_GB = 1e9


def register(name: str, path: Path, repo: str | None, found: "Contents") -> UserModel:
    """Adds the model to the list, or, where its name stands for the same place already, writes down what is new."""
    from kt_kernel.registry.contents import CONVERTED, GGUF, SAFETENSORS

    known = user_models.get(name)
    facts = {
        "format": GGUF if found.format == GGUF else SAFETENSORS,
        "is_moe": found.is_moe,
        "moe_num_experts": found.experts,
        "moe_num_experts_per_tok": found.top_k,
        "amx_quant_method": found.method if found.format == CONVERTED else None,
    }
    if repo:
        facts |= {"repo_id": repo, "repo_type": "huggingface"}
    if known and Path(known.path).resolve() == path.resolve():
        user_models.update(known.name, **facts)
        return known
    model = UserModel(name, str(path), **facts)
    user_models.add(model)
    return model


def verify(
    models: Annotated[
        list[str] | None, typer.Argument(help="Names, aliases or paths of models.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All models that were added.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Headers and sizes only; read no weights.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every file, not only those that are wrong.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the files of a model.

    Headers, sizes and the index; checksums, where a conversion or a download left them.
    """
    if bool(models) == everything:
        raise typer.BadParameter(t("name models, or give --all"), param_hint="MODELS")
    wanted = [Found(one.name, Path(one.path), one.repo_id) for one in user_models.user_models()] if everything else []
    wanted += [find(one) for one in models or ()]
    results = {}
    for found in wanted:
        results[found.name] = _checked(found, quick)
        if not as_json:
            _print_checks(found.name, results[found.name], verbose)
    if as_json:
        printing.print_json(
            {
                name: {"sound": _is_sound(checks), "checks": [vars(check) for check in checks]}
                for name, checks in results.items()
            }
        )
    if not all(map(_is_sound, results.values())):
        raise typer.Exit(1)


def _is_sound(checks: list["Check"]) -> bool:
    return all(check.sound for check in checks)


def _checked(found: Found, quick: bool) -> list["Check"]:
    from kt_kernel.registry.checks import Check, check, expected_digests

    path = found.path
    if found.name == DEMO:
        return [_checked_demo(quick)]
    if path is None:
        printing.fail("model verify", t("{name} is not here: kt model download {name}", name=found.name))
    if not path.exists():
        return [Check(str(path), False, t("is missing"))]
    try:
        expected = {} if quick else expected_digests(path)
        with _meter(sum(file.stat().st_size for file in expected if file.is_file())) as progress:
            checks = check(path, expected, progress)
    except (ValueError, OSError) as error:
        return [Check(path.name, False, " ".join(str(error).split()))]
    if (added := user_models.get(found.name)) and Path(added.path) == path and not quick:
        status = "failed" if not _is_sound(checks) else "passed" if expected else "not_checked"
        user_models.update(added.name, sha256_status=status, last_verified=user_models.now())
    return checks


def _checked_demo(quick: bool) -> "Check":
    from kt_kernel.demo.model import problem, usual_path
    from kt_kernel.registry.checks import Check

    path = usual_path()
    if not path.exists():
        printing.fail("model verify", t("the demo model is not here yet: 'kt run demo' makes it"))
    wrong = problem(path, every_byte=not quick)
    return Check(path.name, wrong is None, wrong or t("as it was made"), by_checksum=not quick)


def _print_checks(name: str, checks: list["Check"], verbose: bool) -> None:
    wrong = [check for check in checks if not check.sound]
    for check in checks if verbose else wrong:
        print(f"{check.file}: {t('ok') if check.sound else t('wrong')}: {check.about}")
    summed = sum(check.sound and check.by_checksum for check in checks)
    if wrong:
        print(
            t("{name}: {count} of {all} files are wrong: get them again", name=name, count=len(wrong), all=len(checks))
        )
    elif summed:
        print(t("{name}: sound; {count} of {all} files by checksum", name=name, count=summed, all=len(checks)))
    else:
        print(t("{name}: sound by headers and sizes; nobody left checksums", name=name))


@contextmanager
def _meter(total: int) -> Iterator["Progress"]:
    """What counts bytes: a bar on stderr, for people."""
    if not printing.is_terminal("stderr") or total == 0:
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=printing.console("stderr"), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def download(
    model: Annotated[str, typer.Argument(help="A known name, an alias or a hub id.", show_default=False)],
    folder: Annotated[
        Path | None, typer.Option("--dir", "-d", help="Where it goes (default: below the first folder of models).")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="What to call it (default: as on the hub).")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="A branch, a tag or a commit.")] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Only files like this, as in '*Q4_K_M*'; repeat for more.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", help="No files like this; repeat for more.")] = None,
    check: Annotated[
        bool | None, typer.Option("--verify/--no-verify", help="Compare checksums (default: download.verify).")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a model from the hub.

    A download that was interrupted goes on where it stopped, by the same command.
    """
    from kt_kernel.registry import download as hub

    found = find(model)
    if found.repo is None:
        printing.fail(
            "model download", t("'{model}' is no model of the hub: give a known name, or org/name", model=model)
        )
    name = name or (found.known.name if found.known else found.repo.partition("/")[2])
    folder = (folder or download_folder(found.repo)).expanduser().absolute()
    wanted = hub.prepare(found.repo, folder, revision, include, exclude)
    _announce(wanted, yes)
    added = bring("model download", wanted, name, check)
    facts = {"name": added.name, "path": added.path, "repo": wanted.repo, "revision": wanted.commit}
    if as_json:
        printing.print_json({**facts, "files": len(wanted.files), "bytes": wanted.bytes})
    else:
        print(t("{name} is in {path}", name=added.name, path=added.path))


def bring(command: str, wanted: "Download", name: str, by_checksum: bool | None = None) -> UserModel:
    """Downloads, checks, and puts the model on the list."""
    from kt_kernel.registry import download as hub

    try:
        hub.fetch(wanted, bars=printing.is_terminal("stderr"), meter=_meter)
    except KeyboardInterrupt:
        printing.note(command, t("interrupted; the same command goes on with what is missing"))
        raise
    _check_download(command, wanted, settings.get("download.verify") if by_checksum is None else by_checksum)
    return _register(name, wanted)


def _announce(wanted: "Download", yes: bool) -> None:
    missing = wanted.missing_bytes
    message = t(
        "{repo}: {count} files, {size} GB, of which {missing} GB are missing, into {folder}",
        repo=wanted.repo,
        count=len(wanted.files),
        size=f"{wanted.bytes / _GB:.1f}",
        missing=f"{missing / _GB:.1f}",
        folder=wanted.folder,
    )
    printing.note("model download", message)
    if missing and not yes and printing.is_terminal("stdin") and printing.is_terminal("stderr"):
        typer.confirm(t("Download?"), default=True, abort=True, err=True)


def _check_download(command: str, wanted: "Download", by_checksum: bool) -> None:
    from kt_kernel.registry.checks import check, expected_digests

    expected = expected_digests(wanted.folder) if by_checksum else {}
    with _meter(sum(file.stat().st_size for file in expected if file.is_file())) as progress:
        wrong = [result for result in check(wanted.folder, expected, progress) if not result.sound]
    for result in wrong:
        printing.note(command, f"{result.file}: {result.about}")
        if result.by_checksum:
            (wanted.folder / result.file).unlink()  # else the next run would take it for done
    if wrong:
        printing.fail(command, t("what came damaged was removed: the same command gets it again"))


def _register(name: str, wanted: "Download") -> UserModel:
    from kt_kernel.registry.contents import contents

    try:
        found = contents(wanted.folder)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    return register(name, wanted.folder, wanted.repo, found)
