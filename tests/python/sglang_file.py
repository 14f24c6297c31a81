"""Files of SGLang out of a released wheel, without SGLang: torch, and stand-ins for what they import.

Of kt_ep_wrapper.py real are configuration, masks, weights, submit, merge; of expert_distribution.py the recorder.
Stand-ins are the names in `_names` and `_names_of_the_recorder`, CUDA's streams, and the experts that SGLang itself
computes.
"""

import contextlib
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from layer_reference import Shape, Weights, from_bf16, random_expert
from weight_files import write_safetensors

torch = pytest.importorskip("torch", reason="torch is not installed: SGLang's wrapper was not tested")

FOLDER = Path(sys.prefix) / "sglang"  # where `make .venv/.sglang` puts the files
STOCK = ("sglang-0.5.17", "sglang-0.5.23")
FORK = "sglang-kt-0.7.2"

TopK = namedtuple("TopK", "topk_weights topk_ids router_logits")
Dispatch = namedtuple("Dispatch", "hidden_states topk_output")
Combine = namedtuple("Combine", "hidden_states")


@dataclass
class RunnerConfig:
    activation: str = "silu"
    num_local_experts: int = 0
    routed_scaling_factor: float | None = None


class _Nothing:
    """A stream, an event or a recorder: whatever it is asked to do is done."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def _names(shape: Shape, args: SimpleNamespace, rank: int) -> dict[str, dict]:
    """What the released files import of SGLang: module -> names."""
    identity = torch.arange(shape.experts).repeat(args.layers, 1)
    return {
        "arg_groups.overrides": {"model_config_of": lambda _: SimpleNamespace(hf_config=args.config)},
        "configs.glm5_next": {"GLM5_NEXT_SUPPORTED_TP_SIZES": (1,)},
        "distributed": {
            "get_tensor_model_parallel_rank": lambda: rank,
            "get_tensor_model_parallel_world_size": lambda: 2 if rank else 1,
            "get_tp_group": _Nothing,
        },
        "environ": {"envs": SimpleNamespace(SGLANG_DSV4_2604_SUBMODE=SimpleNamespace(get=lambda: ""))},
        "eplb.expert_distribution": {"get_global_expert_distribution_recorder": _Nothing},
        "eplb.expert_location_dispatch": {
            "get_global_expert_location_metadata": lambda: SimpleNamespace(physical_to_logical_map_cpu=identity)
        },
        "layers.moe.quant_method_registry": {"register_moe_quant_wrapper": lambda *_, **__: None},
        "layers.moe.token_dispatcher": {"StandardCombineInput": Combine},
        "layers.moe.topk": {"TopKOutputChecker": SimpleNamespace(format_is_bypassed=lambda _: False)},
        "layers.moe.utils": {"is_kt_ep_wrapper_disabled": lambda: False},
        "layers.quantization.base_config": {"FusedMoEMethodBase": object},
        "layers.quantization.marlin_utils": {"marlin_permute_scales": None},
        "runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=args),
            "get_parallel": lambda: SimpleNamespace(tp_rank=rank),
            "get_schedule": lambda: args,
        },
        "utils": {"get_compiler_backend": lambda: None, "is_cuda": lambda: False},
    }


def arguments(shape: Shape, layers: int, path: Path, **given) -> SimpleNamespace:
    """What the server was started with, as both kinds of engine look for it."""
    config = SimpleNamespace(num_hidden_layers=layers, num_experts=shape.experts)
    fields = {
        "kt_weight_path": str(path),
        "kt_method": "BF16",
        "kt_cpuinfer": 2,
        "kt_threadpool_count": 1,
        "kt_numa_nodes": None,
        "kt_num_gpu_experts": 2,
        "kt_gpu_experts_ratio": None,
        "kt_max_deferred_experts_per_token": None,
        "kt_gpu_prefill_token_threshold": None,
        "kt_enable_dynamic_expert_update": False,
        "kt_expert_placement_strategy": "uniform",
        "init_expert_location": None,
        "chunked_prefill_size": 64,
        "expert_distribution_recorder_mode": "stat",
        "expert_distribution_recorder_buffer_size": 8,
        "enable_expert_distribution_metrics": False,
        "moe_a2a_backend": "none",
        "device": "cpu",
        "layers": layers,
        "config": config,
    }
    args = SimpleNamespace(**{**fields, **given})
    if given.get("release") not in STOCK:  # stock SGLang calls it and lives with the AttributeError
        args.get_hf_config = lambda: config
    return args


def load(monkeypatch, release: str, shape: Shape, args: SimpleNamespace, rank: int = 0) -> ModuleType:
    """The released file as a module. Skips, saying so, where it was not fetched."""
    path = _fetched(release, "kt_ep_wrapper.py")
    for name, content in _names(shape, args, rank).items():
        _put(monkeypatch, f"sglang.srt.{name}", content)
    for name, value in {"synchronize": lambda *_: None, "Stream": _Nothing, "Event": _Nothing}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", _Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda **_: lambda function: function)  # it would cost 5 s
    module = _execute(monkeypatch, path, f"kt_ep_wrapper of {release}")
    assert module.KTRANSFORMERS_AVAILABLE
    return module


def load_recorder(monkeypatch, release: str, args: SimpleNamespace, folder: Path) -> ModuleType:
    """The file with the recorder of experts, which writes to `folder`; after `load`."""
    path = _fetched(release, "expert_distribution.py")
    for name, content in _names_of_the_recorder(folder).items():
        _put(monkeypatch, name, content)
    context = sys.modules["sglang.srt.runtime_context"]
    context.get_device = lambda: args
    context.get_platform = lambda: SimpleNamespace(is_hip=False)
    sys.modules["sglang.srt.layers.moe"].get_moe_a2a_backend = None  # of AMD's GPUs
    context.logs_expert_balancedness_to_server_log = context.reports_expert_balancedness = lambda: False
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch, "get_device_module", lambda: torch.cuda)  # that of the CPU has no cache to empty
    return _execute(monkeypatch, path, f"expert_distribution of {release}")


def make_recorder(file: ModuleType, release: str, shape: Shape, args: SimpleNamespace):
    """As a model runner makes it."""
    sizes = dict.fromkeys(("num_physical_experts", "num_local_physical_experts", "num_logical_experts"), shape.experts)
    identity = torch.arange(shape.experts).repeat(args.layers, 1)
    metadata = SimpleNamespace(num_layers=args.layers, ep_size=1, physical_to_logical_map=identity, **sizes)
    given = (args, metadata) if release == STOCK[0] else (metadata,)
    return file.ExpertDistributionRecorder.init_new(*given, rank=0)


class _Withable:
    """SGLang's holder of a value for the time of a context."""

    value = None

    @contextlib.contextmanager
    def with_value(self, value):
        self.value = value
        yield
        self.value = None


def _names_of_the_recorder(folder: Path) -> dict[str, dict]:
    setting = SimpleNamespace(get=lambda: str(folder))
    metrics = ("STAT_LOGGER_ROLE_EXPERT_DISPATCH", "ExpertDispatchCollector", "resolve_collector_class")
    return {
        "einops": {},
        "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=setting)},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": None, "ForwardMode": None},
        "sglang.srt.observability.metrics_collector": dict.fromkeys(metrics),
        "sglang.srt.server_args": {"ServerArgs": None},
        "sglang.srt.utils": {"Withable": _Withable, "get_device": lambda: "cpu", "get_int_env_var": None},
    }


def _fetched(release: str, name: str) -> Path:
    path = FOLDER / release / name
    if not path.exists():
        pytest.skip(f"{path} is not there ('make .venv/.sglang' fetches it): {release} was not tested")
    return path


def _execute(monkeypatch, path: Path, name: str) -> ModuleType:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look for types
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def _put(monkeypatch, name: str, content: dict) -> None:
    """A module, and the packages above it."""
    for end in [place for place, letter in enumerate(name) if letter == "."]:
        if name[:end] not in sys.modules:
            package = ModuleType(name[:end])
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name[:end], package)
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


class OwnExperts:
    """What SGLang computes itself, as its kernel does: ids of -1 are skipped, and the result is written over x."""

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **_):
        def parameter(*sizes: int) -> "torch.nn.Parameter":
            return torch.nn.Parameter(torch.zeros(sizes, dtype=params_dtype, device="cpu"), requires_grad=False)

        layer.w13_weight = parameter(num_experts, 2 * intermediate_size_per_partition, hidden_size)
        layer.w2_weight = parameter(num_experts, hidden_size, intermediate_size_per_partition)

    def create_moe_runner(self, layer, config) -> None:
        layer.runner_config = config

    def apply(self, layer, dispatch) -> Combine:
        x, routing = dispatch
        experts = [
            (*w13.float().chunk(2), w2.float()) for w13, w2 in zip(layer.w13_weight, layer.w2_weight, strict=True)
        ]
        x.copy_(moe(experts, x, routing.topk_ids, routing.topk_weights))
        return Combine(x)


class Layer:
    """One MoE layer of the engine, and what it should give."""

    def __init__(self, module: ModuleType, args: SimpleNamespace, index: int, shape: Shape, weights: list[Weights]):
        self._experts = [tuple(torch.from_numpy(from_bf16(matrix)) for matrix in expert) for expert in weights]
        self.method = module.KTEPWrapperMethod(OwnExperts(), module.create_kt_config_from_server_args(args, index))
        self._layer = torch.nn.Module()
        self._layer.top_k, self._layer.num_experts, self._layer.moe_tp_size = shape.top_k, shape.experts, 1
        self._layer.intermediate_size_per_partition = shape.intermediate
        sizes = (shape.experts, shape.hidden, shape.intermediate)
        self.method.create_weights(self._layer, *sizes, torch.bfloat16)
        self.method.create_moe_runner(self._layer, RunnerConfig())
        for slot, expert in enumerate(self._own()):
            gate, up, down = self._experts[expert]
            self._layer.w13_weight.data[slot] = torch.cat([gate, up]).bfloat16()
            self._layer.w2_weight.data[slot] = down.bfloat16()
        self.method.process_weights_after_loading(self._layer)

    def _own(self) -> list[int]:
        """Experts that the engine keeps, in its order: those the mask names, or the first."""
        if hasattr(self.method, "gpu_index_to_logical"):
            return self.method.gpu_index_to_logical.tolist()
        return list(range(self.method.num_gpu_experts))

    def __call__(self, x, ids, weights):
        dispatch = Dispatch(x.clone(), TopK(weights.clone(), ids.clone(), None))
        return self.method.apply(self._layer, dispatch).hidden_states.float()

    def expected(self, x, ids, weights):
        return moe(self._experts, x, ids, weights)

    def error(self, *tokens) -> float:
        """Of the whole layer, relative to float32."""
        expected = self.expected(*tokens)
        return ((self(*tokens) - expected).norm() / expected.norm()).item()


def moe(experts: list, x, ids, weights):
    """sum over j of weights[t, j] * down (silu(gate x[t]) * up x[t]) of expert ids[t, j], in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert, (gate, up, down) in enumerate(experts):
        tokens, places = torch.nonzero(ids == expert, as_tuple=True)
        rows = x[tokens].float()
        result = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
        out.index_add_(0, tokens, result * weights[tokens, places].float()[:, None])
    return out


def write_checkpoint(folder: Path, shape: Shape, layers: int) -> Path:
    """A Qwen3-MoE checkpoint in bf16, as one file; experts only."""
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": matrix
        for layer in range(layers)
        for expert in range(shape.experts)
        for name, matrix in zip(names, random_expert(shape, layer, expert), strict=True)
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@contextlib.contextmanager
def one_thread_of_torch():
    """Its threads and those of our pool would wait for each other, five times as long as the tests need."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
