"""Everything that checks look at, gathered once. Tests make up their own."""

import errno
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kt_kernel import _core, env, settings
from kt_kernel.doctor import packages
from kt_kernel.doctor.dimms import Dimm, find_dimms
from kt_kernel.errors import UserError
from kt_kernel.machine import system
from kt_kernel.machine.facts import Disk, Machine, disk_of, machine


@dataclass(frozen=True)
class Rates:
    """GB/s that were measured just now."""

    read: float  # all cores, each from its own node
    busy_share: float  # CPU time of others meanwhile
    local: dict[int, float] = field(default_factory=dict)  # a node's cores from its memory; with several nodes only
    remote: dict[tuple[int, int], float] = field(default_factory=dict)  # (cores of, memory of)


@dataclass(frozen=True)
class Facts:
    """`root` has the /proc and /sys that checks read by themselves."""

    machine: Machine
    root: Path = Path("/")
    rates: Rates | None = None  # None: nothing was measured
    dimms: tuple[Dimm, ...] = ()  # none: nobody tells
    best_variant: str = ""  # that this CPU has; the operating system may refuse it
    forced_variant: str | None = None
    emulated: bool = False  # no instruction set of this CPU is used
    mbind_errno: int = 0
    python: tuple[int, int] = (3, 11)
    in_environment: bool = True  # a virtual one, conda or a container: not the system's Python
    in_container: bool = False
    installed: dict[str, packages.Installed] = field(default_factory=dict)
    sglang_takes_kt: bool | None = None  # None: no SGLang
    torch_cuda: str | None = None  # the CUDA that torch was built for; None: none
    proxies: dict[str, str] = field(default_factory=dict)  # variable -> address
    no_proxy: str = ""
    settings_error: str = ""
    cpu_threads: int | None = None  # as set
    host: str = "127.0.0.1"
    port: int = 8000
    port_error: str = ""  # why nothing can listen there
    disks: dict[str, Disk] = field(default_factory=dict)  # folder of models -> where it is

    def read(self, path: str) -> str:
        """A file below /proc or /sys, without spaces around; nothing where it is not there."""
        return system.read(self.root / path.lstrip("/")).strip()


def gather(rates: Rates | None = None) -> Facts:
    here = machine()
    found, error = _settings()
    forced = env.cpu_variant()
    emulated = {variant.name for variant in _core.variants() if variant.emulated}
    container = any(Path(name).exists() for name in ("/.dockerenv", "/run/.containerenv"))
    return Facts(
        machine=here,
        rates=rates,
        dimms=find_dimms(),
        best_variant=_core.choose_variant(),
        forced_variant=forced,
        emulated=here.variant in emulated,
        mbind_errno=mbind_errno(),
        python=sys.version_info[:2],
        in_environment=container or sys.prefix != sys.base_prefix or env.conda() is not None,
        in_container=container,
        installed=packages.installed(),
        sglang_takes_kt=packages.sglang_takes_kt(),
        torch_cuda=packages.torch_cuda(),
        proxies=env.proxies(),
        no_proxy=env.no_proxy(),
        settings_error=error,
        port_error=_port_error(found["host"], found["port"]),
        **found,
    )


def _settings() -> tuple[dict, str]:
    """What checks need of them, or the defaults and what is wrong."""
    try:
        folders = settings.model_folders()
        found = {
            "cpu_threads": settings.get("inference.cpu_threads"),
            "host": settings.get("server.host"),
            "port": settings.get("server.port"),
        }
        error = ""
    except UserError as wrong:
        folders, error = [], str(wrong)
        found = {"cpu_threads": None, "host": "127.0.0.1", "port": settings.SETTINGS["server.port"].default}
    disks = {}
    for folder in folders:
        with suppress(OSError):  # a folder that is not for us to look into
            disks[str(folder)] = disk_of(folder)
    return found | {"disks": disks}, error


def _port_error(host: str, port: int) -> str:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def mbind_errno() -> int:
    """Whether this process may say where its memory lies: 0, or the error of asking for it.

    Asks for what it has already, MPOL_DEFAULT, which only a filter of system calls can refuse.
    """
    import ctypes
    import mmap
    import platform

    if platform.machine() != "x86_64":
        return errno.ENOSYS
    number = 237
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        held = ctypes.c_char.from_buffer(page)
        arguments = (number, ctypes.addressof(held), mmap.PAGESIZE, 0, 0, 0, 0)
        done = syscall(*(ctypes.c_long(argument) for argument in arguments))
        del held  # else the page cannot be closed
    return ctypes.get_errno() if done != 0 else 0


def error_name(number: int) -> str:
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
