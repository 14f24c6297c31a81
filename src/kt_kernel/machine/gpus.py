"""GPUs as nvidia-smi lists them: nothing of CUDA is loaded."""

import csv
import io
import shutil
import subprocess
from dataclasses import dataclass

from kt_kernel import env

_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "driver_version")
_MIB = 1 << 20
# A driver that has just been loaded takes seconds for each GPU.
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: str  # "9.0"; empty where the driver is too old to tell
    driver: str


def gpus() -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves; none without a driver, or where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return visible(parse(said.stdout), env.cuda_visible_devices()) if said.returncode == 0 else ()


def parse(table: str) -> tuple[Gpu, ...]:
    """Rows that are not about a GPU, or whose memory is not told (a GPU that fell off the bus), are left out."""
    found = []
    for row in csv.reader(io.StringIO(table), skipinitialspace=True):
        if len(row) != len(_FIELDS):
            continue
        index, uuid, name, total, free, capability, driver = (cell.strip() for cell in row)
        if index.isdecimal() and total.isdecimal() and free.isdecimal():
            capability = capability if capability[:1].isdecimal() else ""
            found.append(Gpu(int(index), uuid, name, int(total) * _MIB, int(free) * _MIB, capability, driver))
    return tuple(found)


def visible(found: tuple[Gpu, ...], devices: str | None) -> tuple[Gpu, ...]:
    """As CUDA reads the variable: indices or beginnings of UUIDs, in that order, up to the first that is unknown."""
    if devices is None:
        return found
    chosen: list[Gpu] = []
    for word in (part.strip() for part in devices.split(",")):
        matching = [gpu for gpu in found if _is_called(gpu, word)]
        if len(matching) != 1 or matching[0] in chosen:
            break
        chosen += matching
    return tuple(chosen)


def _is_called(gpu: Gpu, word: str) -> bool:
    return str(gpu.index) == word or (word.startswith("GPU-") and gpu.uuid.startswith(word))
