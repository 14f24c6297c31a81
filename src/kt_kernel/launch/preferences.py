"""Who decides: an option of the command line, else config.yaml, else the registry, else whoever asks."""

from collections.abc import Mapping
from dataclasses import dataclass

from kt_kernel import settings
from kt_kernel.registry.known import Known

OPTION, CONFIG, REGISTRY = "option", settings.FILE, "the registry"


@dataclass(frozen=True)
class Preferred:
    value: object  # None: nobody said anything
    source: str | None = None  # OPTION, CONFIG or REGISTRY


class Preferences:
    """By the names of settings: cpu_threads is inference.cpu_threads there."""

    def __init__(self, given: Mapping[str, object], known: Known | None):
        """`given`: options of the command line that were typed."""
        self._given = {name: value for name, value in given.items() if value is not None}
        self._known = dict(known.options) if known else {}

    def get(self, name: str) -> Preferred:
        if name in self._given:
            return Preferred(self._given[name], OPTION)
        setting = f"inference.{name}"
        if setting in settings.SETTINGS and settings.is_set(setting):
            return Preferred(settings.get(setting), CONFIG)
        if name in self._known:
            return Preferred(self._known[name], REGISTRY)
        return Preferred(None)

    def others(self, names: frozenset[str]) -> dict[str, object]:
        """What the registry has beside these: options of SGLang that only some models need."""
        return {name: value for name, value in self._known.items() if name not in names}

    def sources(self, **names: str) -> dict[str, str]:
        """Of Wanted: its names, and those of settings that they come from; options are left out."""
        found = {ours: self.get(name).source for ours, name in names.items()}
        return {ours: source for ours, source in found.items() if source is not None and source != OPTION}
