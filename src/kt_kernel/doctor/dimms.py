"""Memory modules: which channels have one, and what they could give together.

The firmware's table (dmidecode) tells all, but only to root; the kernel's EDAC drivers tell channels, without speeds.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kt_kernel.machine import system

_TIMEOUT_S = 10.0
_CHANNEL_BYTES = 8  # a transfer of a channel
# How boards name channels, in "Locator" or "Bank Locator": CHANNEL A, Channel_3, DIMM_B1, CPU0_DIMM_C2, DIMMD2.
_CHANNEL = (re.compile(r"CHANNEL[ _-]?([A-Z0-9]+)", re.I), re.compile(r"DIMM[ _-]?([A-Z])\d", re.I))
_SOCKET = re.compile(r"(?:CPU|PROC|NODE|SOCKET|P)[ _-]?(\d+)", re.I)


@dataclass(frozen=True)
class Dimm:
    """A slot. Empty ones have no bytes."""

    channel: str
    bytes: int
    kind: str = ""  # DDR5
    transfers: int = 0  # million in a second, as configured; 0: not told
    rated: int = 0  # as the module could


def find_dimms() -> tuple[Dimm, ...]:
    """Nothing where nobody tells."""
    program = shutil.which("dmidecode")
    if program is not None:
        try:
            said = subprocess.run([program, "-t", "17"], capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            said = None
        if said is not None and (found := parse_dmidecode(said.stdout)):
            return found
    return read_edac()


def parse_dmidecode(text: str) -> tuple[Dimm, ...]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        if "Memory Device" not in block.splitlines()[:2] and "\nMemory Device\n" not in f"\n{block}\n":
            continue
        fields = {key.strip(): value.strip() for key, value in re.findall(r"^\s+([^:\n]+):(.*)$", block, re.M)}
        rated = _transfers(fields.get("Speed", ""))
        configured = _transfers(fields.get("Configured Memory Speed", fields.get("Configured Clock Speed", "")))
        kind = fields.get("Type", "")
        found.append(
            Dimm(
                _channel(fields.get("Locator", ""), fields.get("Bank Locator", ""), len(found)),
                _bytes(fields.get("Size", "")),
                "" if kind in ("Unknown", "RAM") else kind,
                configured or rated,
                rated,
            )
        )
    return tuple(found) if any(dimm.bytes and dimm.transfers for dimm in found) else ()


def read_edac(root: Path = Path("/")) -> tuple[Dimm, ...]:
    found = []
    for folder in sorted((root / "sys/devices/system/edac/mc").glob("mc*/*")):
        size, where = (system.read(folder / name).strip() for name in ("size", "dimm_location"))
        match = re.search(r"channel (\d+)", where)
        if size.isdecimal() and match:
            kind = re.search(r"DDR\d", system.read(folder / "dimm_mem_type"))
            found.append(Dimm(f"{folder.parent.name}/{match.group(1)}", int(size) << 20, kind.group() if kind else ""))
    return tuple(found)


def peak_gbps(found: tuple[Dimm, ...]) -> float | None:
    """Of all channels with a module; None where their speed is not told. A channel is as fast as its slowest module."""
    slowest: dict[str, int] = {}
    for dimm in found:
        if dimm.bytes:
            slowest[dimm.channel] = min(dimm.transfers, slowest.get(dimm.channel, dimm.transfers))
    if not slowest or not all(slowest.values()):
        return None
    return sum(slowest.values()) * _CHANNEL_BYTES / 1000


def _channel(locator: str, bank: str, slot: int) -> str:
    """One name for all slots of a channel; slots whose names tell nothing count as channels of their own."""
    text = f"{bank} {locator}"
    match = next((match for pattern in _CHANNEL if (match := pattern.search(text))), None)
    if match is None:
        return f"slot {slot}"
    socket = _SOCKET.search(text)
    return f"{socket.group(1) if socket else 0}/{match.group(1).upper()}"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+) ([MGT])i?B", text)
    return int(match.group(1)) << {"M": 20, "G": 30, "T": 40}[match.group(2)] if match else 0


def _transfers(text: str) -> int:
    match = re.fullmatch(r"(\d+) M(?:T/s|Hz)", text)
    return int(match.group(1)) if match else 0
