"""Checks of what is around: settings, disks, the network of this machine."""

import ipaddress

from kt_kernel.cli.language import t
from kt_kernel.doctor.facts import Facts
from kt_kernel.doctor.finding import Finding, Status

_LEAST_FREE = 100e9
_LOCAL = ("127.0.0.1", "localhost")


def settings_file(facts: Facts) -> Finding | None:
    if not facts.settings_error:
        return None
    return Finding(
        "settings",
        t("Settings"),
        facts.settings_error,
        Status.ERROR,
        t("commands that need settings stop with this message"),
        "kt config reset",
    )


def disks(facts: Facts) -> list[Finding]:
    """One finding for each folder of models."""
    found = []
    for folder, disk in facts.disks.items():
        value = t("{free} GB free for {folder}", free=f"{disk.free_bytes / 1e9:.0f}", folder=folder)
        if disk.free_bytes >= _LEAST_FREE:
            found.append(Finding("disk", t("Disk"), value))
            continue
        found.append(
            Finding(
                "disk",
                t("Disk"),
                value,
                Status.WARNING,
                t("large models do not fit: 4 bits of 235 billion weights are 130 GB"),
                "kt config set paths.models /FOLDER/ON/A/LARGE/DISK",
            )
        )
    return found


def proxies(facts: Facts) -> Finding | None:
    """Clients on this machine that ask a proxy for 127.0.0.1."""
    if not facts.proxies:
        return None
    title, value = t("Proxies"), ", ".join(facts.proxies)
    if all(is_spared(host, facts.no_proxy) for host in _LOCAL):
        return Finding("proxies", title, t("{variables}, not for this machine", variables=value))
    return Finding(
        "proxies",
        title,
        t("also for this machine: {variables}", variables=value),
        Status.WARNING,
        t("clients ask the proxy for the server on this machine, and get an error page"),
        "export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost",
    )


def is_spared(host: str, no_proxy: str) -> bool:
    """As most clients read NO_PROXY: names, ends of names, networks, or * for all."""
    for word in (part.strip().lower() for part in no_proxy.split(",")):
        if word == "*" or (word and (host == word.lstrip(".") or host.endswith("." + word.lstrip(".")))):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(word, strict=False):
                return True
        except ValueError:
            continue
    return False


def port(facts: Facts) -> Finding:
    title = t("Port")
    if not facts.port_error:
        return Finding("port", title, t("{port} on {host} is free", port=facts.port, host=facts.host))
    return Finding(
        "port",
        title,
        t("{port} on {host}: {error}", port=facts.port, host=facts.host, error=facts.port_error),
        Status.WARNING,
        t("kt run needs another port, unless it is its server that runs there"),
        f"ss -ltnp 'sport = :{facts.port}'; kt config set server.port {facts.port + 1}",
    )
