"""The JSON that a run gives, and the file per machine that keeps it."""

import json
from datetime import datetime, timezone
from pathlib import Path

from kt_kernel.bench import machine
from kt_kernel.bench.errors import BenchError
from kt_kernel.bench.run import Findings

SCHEMA = 1

# Two figures of a part with the same values here are the same figure: the newer one stays. Peers choose their threads.
_POINT = ("part", "shape", "variant", "format", "tokens")
KEYS = {
    "kernels": (*_POINT, "threads"),
    "hybrid": (*_POINT, "threads"),
    "peers": (*_POINT, "peer"),
    "serve": ("part", "variant", "model", "phase", "batch", "method"),
    "quality": ("part", "variant", "method", "weights"),
}


def document(findings: Findings, version: str) -> dict:
    """What --json prints and --save keeps."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": version,
        "machine": machine.facts(),
        "limits": findings.limits,
        "figures": findings.figures,
        "notes": findings.notes,
    }


def split_by_variant(run: dict) -> dict[str, dict]:
    variants = {*run["limits"], *(figure["variant"] for figure in run["figures"])}
    return {
        variant: {
            **run,
            "limits": {name: limits for name, limits in run["limits"].items() if name == variant},
            "figures": [figure for figure in run["figures"] if figure["variant"] == variant],
        }
        for variant in sorted(variants)
    }


def merge(old: dict, new: dict) -> dict:
    """New facts, and every figure once; a figure keeps the date and version of the run that it is from."""
    figures = {_key(figure): figure for figure in old.get("figures", [])}
    for figure in new["figures"]:
        figures[_key(figure)] = {**figure, "date": new["date"], "version": new["version"]}
    return {
        **new,
        "limits": {**old.get("limits", {}), **new["limits"]},
        "figures": [figures[key] for key in sorted(figures, key=lambda key: [str(part).rjust(8, "0") for part in key])],
    }


def save(run: dict, folder: Path, machine_name: str | None) -> list[Path]:
    """Merges a run into <folder>/<machine>.json, one file per variant; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for variant, part in split_by_variant(run).items():
        name = machine_name or machine.slug(run["machine"]["cpu"], variant)
        path = folder / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        if old and old.get("schema") != SCHEMA:
            raise BenchError(f"{path} has schema {old.get('schema')}, this version writes {SCHEMA}: move it away first")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(merge(old, part), indent=1) + "\n")
        temporary.replace(path)
        paths.append(path)
    return paths


def _key(figure: dict) -> tuple:
    return tuple(figure[name] for name in KEYS[figure["part"]])
