"""The plan of a model on this machine: what is chosen, what it needs, what it will do, and what else would."""

from dataclasses import dataclass, replace
from pathlib import Path

from kt_kernel.machine.facts import Machine, disk_of
from kt_kernel.machine.gpus import Gpu
from kt_kernel.machine.probe import Probe
from kt_kernel.plan import choices, sizes
from kt_kernel.plan.choices import SGLANG, Choice, Wanted
from kt_kernel.plan.gpu import GpuPlan, gpu_plan, predict_split_decode, predict_split_prefill
from kt_kernel.plan.model import PlannedModel
from kt_kernel.plan.predict import DECODE_CONTEXT, PROMPT_TOKENS, Prediction, predict_decode, predict_prefill

MEMORY, GPU_MEMORY, DISK = "memory", "GPU memory", "disk"
# Importing torch and transformers, making the model without weights, trying it out: 4 to 6 s with the demo model.
START_S = 5.0
# The same in SGLang's processes, its options, and graphs of a few sizes: 50 to 75 s on 16 CPUs beside an H200.
SGLANG_START_S = 60.0


@dataclass(frozen=True)
class Need:
    what: str  # MEMORY, GPU_MEMORY (of each GPU) or DISK (for a download)
    needed_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True)
class Alternative:
    """Another method: its memory, and its speed where there was time left to measure."""

    method: str
    memory_bytes: int
    fits: bool
    decode: Prediction | None
    prefill: Prediction | None


@dataclass(frozen=True)
class Chosen:
    """What nothing has to be measured for."""

    model: PlannedModel
    choices: dict[str, Choice]  # by name
    gpu: GpuPlan | None
    needs: tuple[Need, ...]

    @property
    def fits(self) -> bool:
        return all(need.fits for need in self.needs)

    @property
    def all_on_gpu(self) -> bool:
        """No expert is left for the CPU."""
        return self.gpu is not None and self.gpu.gpu_experts >= self.model.facts.experts

    @property
    def engine(self) -> str:
        return str(self.choices["engine"].value)

    @property
    def method(self) -> str:
        return str(self.choices["method"].value)

    @property
    def threads(self) -> int:
        return int(self.choices["threads"].value)


@dataclass(frozen=True)
class Plan:
    chosen: Chosen
    token_bytes: int  # read by the CPU for each decoded token: experts, and without a GPU all the rest
    decode: Prediction
    prefill: Prediction
    load_disk_s: float | None  # None: the speed of the disk is not known
    load_memory_s: float  # where the page cache has the files
    alternatives: tuple[Alternative, ...]
    busy: float  # share of the CPUs that others used when it was measured


@dataclass(frozen=True)
class Planner:
    """What all parts of a plan look at."""

    model: PlannedModel
    machine: Machine
    wanted: Wanted
    folder: Path  # where the model is, or would be
    default_method: str | None = None  # the registry's
    sglang: bool = False  # whether it is installed
    only_shown: bool = False  # nothing will be started

    def choose(self) -> Chosen:
        facts, wanted, room = self.model.facts, self.wanted, self.machine.available_bytes
        engine = choices.choose_engine(self.machine, wanted, self.sglang, self.only_shown)
        beside = choices.rest_bytes(facts, engine.value)
        least = beside + choices.least_kv_bytes(facts, engine.value, wanted)
        method = choices.choose_method(facts, wanted, self.default_method, room, least)
        weights = sizes.expert_bytes(facts, choices.weight_format(method.value))
        context, slots = choices.choose_context(facts, wanted, engine.value, room - beside - weights)
        chosen = [engine, method, choices.choose_threads(self.machine, wanted, engine.value)]
        chosen += [choices.choose_nodes(self.machine, wanted), context, slots]
        gpu = None
        if engine.value == SGLANG and self.machine.gpus:
            gpu = gpu_plan(facts, self._gpus(), context.value, wanted.gpu_experts)
            chosen.append(choices.gpu_choice(facts, gpu, wanted))
        found = Chosen(self.model, {choice.name: choice for choice in chosen}, gpu, ())
        return replace(found, needs=self._needs(least if found.all_on_gpu else least + weights, gpu))

    def plan(self, probe: Probe, probe_limit_s: float = 8.0) -> Plan:
        """`probe` has the threads that are chosen. Other methods are measured as long as there is time left."""
        chosen = self.choose()
        decode, prefill = self._speeds(probe, chosen.method, chosen.gpu)
        load_disk_s, load_memory_s = self._load_seconds(probe, chosen)
        alternatives = []
        for method in choices.candidates(self.model.facts):
            if method != chosen.method and not chosen.all_on_gpu:
                is_time = probe.measured_s < probe_limit_s
                alternatives.append(self._alternative(probe if is_time else None, method, chosen))
        return Plan(
            chosen,
            self._token_bytes(chosen.method, chosen.gpu),
            decode,
            prefill,
            load_disk_s,
            load_memory_s,
            tuple(alternatives),
            probe.busy,
        )

    def _gpus(self) -> tuple[Gpu, ...]:
        return self.machine.gpus[: self.wanted.tensor_parallel or len(self.machine.gpus)]

    def _needs(self, memory_bytes: int, gpu: GpuPlan | None) -> tuple[Need, ...]:
        needs = [Need(MEMORY, memory_bytes, self.machine.available_bytes)]
        if gpu is not None:
            needs.append(Need(GPU_MEMORY, gpu.needed_bytes, gpu.free_bytes))
        if self.model.folder is None:
            free = disk_of(self.folder).free_bytes
            needs.append(Need(DISK, sizes.checkpoint_bytes(self.model.facts), free))
        return tuple(needs)

    def _token_bytes(self, method: str, gpu: GpuPlan | None) -> int:
        """By the CPU."""
        facts = self.model.facts
        experts = sizes.token_expert_bytes(facts, choices.weight_format(method))
        if gpu is not None:
            return int(experts * (1 - gpu.gpu_experts / facts.experts))
        others = sizes.BF16_BYTES * (sizes.layer_weights(facts) + sizes.head_weights(facts))
        return experts + others + DECODE_CONTEXT * sizes.kv_token_bytes(facts)

    def _speeds(self, probe: Probe, method: str, gpu: GpuPlan | None) -> tuple[Prediction, Prediction]:
        weight_format = choices.weight_format(method)
        if gpu is None:
            linears = "bf16" if self.wanted.linears in (choices.AUTO, "torch") else self.wanted.linears
            arguments = (probe, self.model.facts, weight_format, linears)
            return predict_decode(*arguments), predict_prefill(*arguments)
        arguments = (probe, self.model.facts, weight_format, self._gpus(), gpu.gpu_experts)
        return predict_split_decode(*arguments, DECODE_CONTEXT), predict_split_prefill(*arguments, PROMPT_TOKENS)

    def _load_seconds(self, probe: Probe, chosen: Chosen) -> tuple[float | None, float]:
        """Experts are read ahead while others are packed; everything else is read, then packed."""
        facts = self.model.facts
        memory, pack_s = probe.read_gbps() * 1e9, 0.0
        if not chosen.all_on_gpu:
            weight_format = choices.weight_format(chosen.method)
            products = probe.products(weight_format, facts.hidden, facts.moe_intermediate)
            written_s = 2 * sizes.expert_bytes(facts, weight_format) / memory
            pack_s = max(facts.expert_weights * products.pack_seconds, written_s)
        others_s = 2 * sizes.other_bytes(facts) / memory
        files = self.model.file_bytes or sizes.checkpoint_bytes(facts)
        disk = probe.disk_gbps(self.folder)
        start_s = START_S if chosen.gpu is None else SGLANG_START_S
        memory_s = start_s + pack_s + others_s
        return (start_s + max(files / disk / 1e9, pack_s) + others_s if disk else None), memory_s

    def _alternative(self, probe: Probe | None, method: str, chosen: Chosen) -> Alternative:
        facts = self.model.facts
        other, mine = (sizes.expert_bytes(facts, choices.weight_format(name)) for name in (method, chosen.method))
        memory = next(need for need in chosen.needs if need.what == MEMORY)
        needed = memory.needed_bytes + other - mine
        speeds = self._speeds(probe, method, chosen.gpu) if probe else (None, None)
        return Alternative(method, needed, needed <= memory.available_bytes, *speeds)
