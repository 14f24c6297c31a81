"""From what somebody typed to what will run: the model and its folder, the engine, and every choice with its reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kt_kernel import settings
from kt_kernel.cli.language import say
from kt_kernel.errors import Phrase, UserError
from kt_kernel.launch.preferences import REGISTRY, Preferences
from kt_kernel.launch.sglang import Launch, known_options, make_launch
from kt_kernel.launch.sglang_options import Server, choose_tensor_parallel, sglang_options
from kt_kernel.machine.facts import Machine
from kt_kernel.plan.choices import AUTO, EMBEDDED, SGLANG, Choice, Wanted, choose_engine, choose_threads, has_sglang
from kt_kernel.plan.plan import Chosen, Planner
from kt_kernel.plan.resolve import planned_of
from kt_kernel.registry.find import DEMO, Found, download_folder, find

# Names of options, and of Wanted, that settings have under other names.
_WANTED = {
    "method": "kt_method",
    "threads": "cpu_threads",
    "slots": "max_running_requests",
    "gpu_experts": "gpu_experts",
    "context": "max_total_tokens",
}


@dataclass(frozen=True)
class Asked:
    """Options as they were typed; None: not typed. `others` go to SGLang as they are."""

    model: str
    options: Mapping[str, object]
    others: tuple[str, ...] = ()

    def get(self, name: str, default: object = None) -> object:
        value = self.options.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class RunJob:
    asked: Asked
    found: Found
    folder: Path
    machine: Machine
    preferences: Preferences
    wanted: Wanted
    engine: Choice
    planner: Planner | None  # None: sizes of the model are not known
    chosen: Chosen | None
    unplanned: str | None = None  # why not

    @property
    def name(self) -> str | None:
        named = self.preferences.get("served_model_name").value
        return str(named) if named else DEMO if self.found.name == DEMO else None

    @property
    def method(self) -> str:
        return self.chosen.method if self.chosen else str(self.wanted.method or "auto")

    @property
    def threads(self) -> int:
        return self.chosen.threads if self.chosen else int(self._threads().value)

    def choices(self) -> list[Choice]:
        """What the embedded engine is started with, and why."""
        if self.chosen is not None:
            return list(self.chosen.choices.values())
        return [self.engine, self._threads()]

    def _threads(self) -> Choice:
        return choose_threads(self.machine, self.wanted, str(self.engine.value))


def prepare(
    asked: Asked, machine: Machine, fetch: Callable[[Found], Path], sglang: bool | None = None, only_shown: bool = False
) -> RunJob:
    """`fetch` brings a model that is not on this machine, or raises UserError; not called if it is only shown."""
    sglang = has_sglang() if sglang is None else sglang
    found = find(asked.model)
    preferences = Preferences(_given(asked), found.known)
    engine = choose_engine(machine, Wanted(engine=asked.get("engine")), sglang, only_shown)
    tensor_parallel = choose_tensor_parallel(machine, preferences, _most_gpus(found))
    wanted = _wanted(asked, preferences, engine.value, machine, int(tensor_parallel.value))
    if found.path is None and found.name != DEMO and not only_shown:
        if asked.get("planned", True):
            _check_room(found, machine, wanted, sglang)
        found = replace(found, path=fetch(found))
    planner, unplanned, folder = None, None, found.path
    try:
        resolved = planned_of(found)
        folder = resolved.folder
        planner = Planner(resolved.model, machine, wanted, folder, resolved.default_method, sglang, only_shown)
        if found.path is None and found.name != DEMO:
            folder = download_folder(str(found.repo))
    except UserError as error:
        unplanned = say(error.phrase)
    if folder is None:
        raise UserError("{name} is not on this machine: 'kt model download {name}' brings it", name=found.name)
    chosen = planner.choose() if planner else None
    return RunJob(asked, found, folder, machine, preferences, wanted, engine, planner, chosen, unplanned)


def _check_room(found: Found, machine: Machine, wanted: Wanted, sglang: bool) -> None:
    """Before hours of a download. What the registry does not know is looked at when it is here."""
    try:
        resolved = planned_of(found)
    except UserError:
        return
    planner = Planner(resolved.model, machine, wanted, resolved.folder, resolved.default_method, sglang)
    for need in planner.choose().needs:
        if not need.fits:
            raise UserError(
                "{name} needs {needed} GB of {what}, but there are {available}: 'kt plan {name}' says what would fit; "
                "--no-plan downloads it all the same",
                name=found.name,
                needed=f"{need.needed_bytes / 1e9:.0f}",
                what=Phrase(need.what),
                available=f"{need.available_bytes / 1e9:.0f}",
            )


def sglang_launch(job: RunJob, server: Server) -> tuple[Launch, list[Choice]]:
    """The command, and why it has each of its options."""
    tensor_parallel = choose_tensor_parallel(job.machine, job.preferences, _most_gpus(job.found))
    chosen = sglang_options(server, job.chosen, job.machine, job.preferences, tensor_parallel)
    known = known_options() if has_sglang() else frozenset()
    environment = {**settings.get("advanced.env"), **settings.get("inference.env")}
    others = [*settings.get("advanced.sglang_args"), *job.asked.others]
    return make_launch([(choice.name, choice.value) for choice in chosen], others, environment, known), chosen


def model_argument(job: RunJob) -> Path:
    """What SGLang gets as its model: a folder, or the id of the hub where it is only shown."""
    return job.found.path or (job.folder if job.found.name == DEMO else Path(str(job.found.repo)))


def _most_gpus(found: Found) -> int | None:
    return found.known.max_tensor_parallel if found.known else None


def _given(asked: Asked) -> dict[str, object]:
    """By the names of settings."""
    given = {**asked.options, "kt_method": asked.get("method")}
    fusion = asked.get("shared_experts_fusion")
    given["disable_shared_experts_fusion"] = None if fusion is None else not fusion
    given.pop("numa_nodes", None)  # several mean something else than one
    return given


def _wanted(asked: Asked, preferences: Preferences, engine: str, machine: Machine, tensor_parallel: int) -> Wanted:
    names = dict(_WANTED)
    if engine == EMBEDDED:
        del names["context"]  # max_total_tokens is of all requests together
    if engine == EMBEDDED and preferences.get(names["slots"]).source == REGISTRY:
        del names["slots"]  # what the registry has is for SGLang
    values = {ours: preferences.get(name).value for ours, name in names.items()}
    sources = preferences.sources(**names)
    values.setdefault("context", asked.get("context_tokens"))
    nodes = _nodes(asked, machine)
    if nodes is None and (count := preferences.get("numa_nodes").value) is not None:
        nodes = tuple(node.id for node in machine.nodes[:count])
        sources["nodes"] = settings.FILE
    return Wanted(
        engine=asked.get("engine"),
        nodes=nodes,
        linears=str(asked.get("linears", AUTO)),
        tensor_parallel=tensor_parallel if engine == SGLANG else None,
        sources=sources,
        **values,
    )


def _nodes(asked: Asked, machine: Machine) -> tuple[int, ...] | None:
    """One number is how many nodes, several are their numbers."""
    given = list(asked.get("numa_nodes", ()))
    if len(given) != 1:
        return tuple(given) or None
    count = given[0]
    if not 1 <= count <= len(machine.nodes):
        raise UserError(
            "--numa-nodes {count}: this process has CPUs on {there} NUMA nodes", count=count, there=len(machine.nodes)
        )
    return tuple(node.id for node in machine.nodes[:count])
