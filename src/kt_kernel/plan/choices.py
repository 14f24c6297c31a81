"""What is chosen for a model on a machine, each with its reason."""

from dataclasses import dataclass
from importlib.util import find_spec

from kt_kernel import methods
from kt_kernel.cli.language import t
from kt_kernel.engine.sizes import SHORT_CONTEXT, choose_sizes
from kt_kernel.errors import UserError
from kt_kernel.machine.facts import Machine
from kt_kernel.plan import sizes
from kt_kernel.plan.gpu import GpuPlan
from kt_kernel.registry.known import Facts

EMBEDDED, SGLANG = "embedded", "sglang"
ENGINES = (EMBEDDED, SGLANG)
AUTO = "auto"
# Python, torch and transformers, and what a forward takes beside weights and keys: 0.8 GB with the demo model.
BASE_BYTES = 1_000_000_000
# Methods that take every checkpoint, from the one that loses least on.
_QUANTISING = ("BF16", "AMXINT8", "INT4G")
# Keys of all requests under SGLang, where nobody says how many tokens there are.
_SGLANG_TOKENS = 40_000


@dataclass(frozen=True)
class Wanted:
    """What somebody fixed; None: it is chosen here."""

    engine: str | None = None
    method: str | None = None
    context: int | None = None
    slots: int | None = None
    threads: int | None = None
    nodes: tuple[int, ...] | None = None  # NUMA
    gpu_experts: int | None = None
    linears: str = AUTO
    tensor_parallel: int | None = None
    sources: dict[str, str] | None = None  # who fixed it, where it was not an option: "config.yaml", ...

    def reason(self, name: str) -> str:
        source = (self.sources or {}).get(name)
        return t("set in {source}", source=source) if source else t("asked for")


@dataclass(frozen=True)
class Choice:
    name: str
    value: object
    reason: str


def has_sglang() -> bool:
    try:
        return find_spec("sglang") is not None
    except (ImportError, ValueError):
        return False


def choose_engine(machine: Machine, wanted: Wanted, sglang: bool, only_shown: bool = False) -> Choice:
    """SGLang where it is installed and there is a GPU, else the embedded engine.

    `only_shown`: nothing will be started, so what is asked for need not be possible here.
    """
    if wanted.engine == SGLANG and not only_shown:
        if not sglang:
            raise UserError("SGLang is not installed: pip install sglang, or take --engine embedded")
        if not machine.gpus:
            raise UserError("SGLang needs a GPU, and nvidia-smi lists none: take --engine embedded")
    if wanted.engine is not None:
        return Choice("engine", wanted.engine, wanted.reason("engine"))
    if sglang and machine.gpus:
        return Choice("engine", SGLANG, t("SGLang is installed, and there is a GPU: {gpu}", gpu=machine.gpus[0].name))
    reason = t("SGLang is not installed") if machine.gpus else t("there is no GPU")
    return Choice("engine", EMBEDDED, reason)


def choose_threads(machine: Machine, wanted: Wanted, engine: str) -> Choice:
    if wanted.threads is not None:
        return Choice("threads", wanted.threads, wanted.reason("threads"))
    if engine == SGLANG and 1 < machine.cpus == machine.threads:
        reason = t("one for each physical core but one: the thread that drives the GPU needs it")
        return Choice("threads", machine.threads - 1, reason)
    if machine.threads < machine.cores:
        reason = t(
            "the cgroup gives the time of {quota} CPUs, fewer than the {cores} physical cores",
            quota=f"{machine.cpu_quota:g}",
            cores=machine.cores,
        )
    else:
        reason = t("one for each physical core that this process may use")
    return Choice("threads", machine.threads, reason)


def choose_nodes(machine: Machine, wanted: Wanted) -> Choice:
    """NUMA nodes: each holds a part of every expert and computes with it."""
    found = tuple(node.id for node in machine.nodes)
    if wanted.nodes:
        if unknown := [node for node in wanted.nodes if node not in found]:
            raise UserError(
                "there is no NUMA node {node} with CPUs for this process; there are {nodes}",
                node=unknown[0],
                nodes=", ".join(map(str, found)),
            )
        return Choice("numa nodes", wanted.nodes, wanted.reason("nodes"))
    if len(found) == 1:
        return Choice("numa nodes", found, t("there is one"))
    return Choice("numa nodes", found, t("a sub-pool for each, next to its memory"))


def kept_method(facts: Facts) -> str:
    """The method that keeps the experts as the checkpoint has them."""
    return methods.method_of(facts.encoding)


def candidates(facts: Facts) -> tuple[str, ...]:
    """Methods for a model's experts, from the one that loses least on; none is larger than the checkpoint."""
    most = sizes.bytes_per_weight(facts.encoding)
    smaller = [name for name in _QUANTISING if sizes.bytes_per_weight(methods.format_of(name)) < 0.9 * most]
    return tuple(dict.fromkeys((kept_method(facts), *smaller)))


def weight_format(method: str) -> str:
    """Of a layer that this method would make; GGUF files have theirs, which a plan takes for those of 4 bits."""
    return "int4g" if method == methods.LLAMAFILE else methods.format_of(method)


def choose_method(facts: Facts, wanted: Wanted, default: str | None, room: int, beside: int) -> Choice:
    """Given, else the registry's, else the first candidate that fits into `room` with `beside` bytes beside it."""
    if wanted.method not in (None, AUTO):
        try:
            methods.check_method(wanted.method)
        except ValueError as error:
            raise UserError(str(error)) from None
        return Choice("method", wanted.method, wanted.reason("method"))
    if default is not None:
        return Choice("method", default, t("what the registry has for this model"))
    for method in candidates(facts):
        needed = beside + sizes.expert_bytes(facts, weight_format(method))
        if needed <= room and method == kept_method(facts):
            return Choice("method", method, t("keeps the experts as the files have them, and fits"))
        if needed <= room:
            return Choice("method", method, t("the first that fits into {room} GB", room=f"{room / 1e9:.0f}"))
    return Choice("method", candidates(facts)[-1], t("the smallest one, though it does not fit"))


def rest_bytes(facts: Facts, engine: str) -> int:
    """Of the CPU's memory, beside experts and keys. Under SGLang everything else is on the GPU."""
    return BASE_BYTES + (sizes.other_bytes(facts) if engine == EMBEDDED else 0)


def least_kv_bytes(facts: Facts, engine: str, wanted: Wanted) -> int:
    """Keys of one request, of the CPU's memory."""
    tokens = wanted.context or min(SHORT_CONTEXT, facts.context)
    return tokens * sizes.kv_token_bytes(facts) if engine == EMBEDDED else 0


def choose_context(facts: Facts, wanted: Wanted, engine: str, left: int) -> tuple[Choice, Choice]:
    """Tokens of a request and requests at once, with `left` bytes of memory for their keys."""
    if engine == SGLANG:
        tokens = wanted.context or min(facts.context, _SGLANG_TOKENS)
        reason = wanted.reason("context") if wanted.context else t("of all requests together")
        return Choice("context", tokens, reason), Choice(
            "slots", wanted.slots, t("SGLang takes what there is room for")
        )
    per_token = sizes.kv_token_bytes(facts)
    try:
        slots, tokens = choose_sizes(wanted.slots, wanted.context, facts.context, per_token, max(0, left))
    except ValueError:  # what is wanted does not fit: the plan shows by how much
        slots, tokens = wanted.slots or 1, wanted.context or min(SHORT_CONTEXT, facts.context)
    if left <= slots * tokens * per_token:
        fits = t("the least that is of use: no memory is left for more")
    elif tokens == facts.context:
        fits = t("all that the model was made for")
    else:
        fits = t("half of the memory that is left: {gb} GB", gb=f"{slots * tokens * per_token / 1e9:.1f}")
    return (
        Choice("context", tokens, wanted.reason("context") if wanted.context else fits),
        Choice("slots", slots, wanted.reason("slots") if wanted.slots else t("requests at once, by the same memory")),
    )


def gpu_choice(facts: Facts, gpu: GpuPlan, wanted: Wanted) -> Choice:
    if wanted.gpu_experts is not None:
        return Choice("gpu experts", gpu.gpu_experts, wanted.reason("gpu_experts"))
    if gpu.gpu_experts >= facts.experts:
        free = f"{gpu.free_bytes / 1e9:.0f}"
        return Choice("gpu experts", gpu.gpu_experts, t("all of a layer: {free} GB of GPU memory hold them", free=free))
    reason = t(
        "of {experts} in each layer; what {free} GB of GPU memory hold beside the rest and {tokens} tokens",
        experts=facts.experts,
        free=f"{gpu.free_bytes / 1e9:.0f}",
        tokens=gpu.tokens,
    )
    return Choice("gpu experts", gpu.gpu_experts, reason)
