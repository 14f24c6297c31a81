"""``kt doctor``: what keeps this machine from its speed."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kt_kernel import settings
from kt_kernel.cli import options
from kt_kernel.cli.language import t
from kt_kernel.cli.printing import examples, note, print_json, table
from kt_kernel.errors import UserError

if TYPE_CHECKING:
    from kt_kernel.doctor.facts import Rates
    from kt_kernel.doctor.finding import Finding

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also what checks looked at.")]
Fast = Annotated[bool, typer.Option("--fast", help="Measure nothing.")]

EXAMPLES = examples("kt doctor", "kt doctor --fast --json")


def doctor(verbose: Verbose = False, fast: Fast = False, as_json: options.AsJson = False) -> None:
    """Look for what keeps this machine from its speed: what it costs, and the command that mends it.

    Measures the memory for a few seconds. Exit code 1 if something does not work.
    """
    import kt_kernel
    from kt_kernel.doctor.checks import examine
    from kt_kernel.doctor.facts import gather
    from kt_kernel.doctor.finding import Status

    found = examine(gather(None if fast else _rates()))
    failed = any(finding.status is Status.ERROR for finding in found)
    if as_json:
        findings = [asdict(finding) for finding in found]
        print_json({"version": kt_kernel.__version__, "ok": not failed, "findings": findings})
    else:
        _show(found, verbose or _is_verbose())
    if failed:
        raise typer.Exit(1)


def _is_verbose() -> bool:
    try:
        return settings.get("general.verbose")
    except UserError:  # one of the findings
        return False


def _rates() -> "Rates | None":
    from kt_kernel.bench.errors import BenchError
    from kt_kernel.bench.progress import Progress
    from kt_kernel.doctor.measure import measure

    with Progress(1) as bar:
        bar.say(t("measuring the memory"))
        try:
            return measure()
        except BenchError as error:
            note("doctor", t("the memory could not be measured: {error}", error=error))
            return None


def _show(found: "list[Finding]", verbose: bool) -> None:
    from rich.text import Text

    from kt_kernel.doctor.finding import Status

    words = {Status.OK: t("ok"), Status.WARNING: t("warning"), Status.ERROR: t("error")}
    colors = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "red"}
    rows = []
    for finding in found:
        rows.append([finding.title, Text(words[finding.status], colors[finding.status]), finding.value])
        rows += [["", "", detail] for detail in finding.details if verbose]
    table([t("Check"), t("Status"), t("Value")], rows)
    counts = {status: sum(finding.status is status for finding in found) for status in Status}
    for finding in found:
        if finding.status is not Status.OK:
            print(f"\n{finding.title} ({words[finding.status]}): {finding.value}")
            print(f"  {t('costs')}: {finding.cost}")
            if finding.fix:
                print(f"  {t('fix')}: {finding.fix}")
    print()
    print(
        t(
            "errors: {errors}, warnings: {warnings}, ok: {ok}",
            errors=counts[Status.ERROR],
            warnings=counts[Status.WARNING],
            ok=counts[Status.OK],
        )
    )
