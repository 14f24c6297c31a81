"""The released package's side of a measurement, inside its own process: its native module without its Python.

bench/README.md tells what was found out about it.
"""

import base64
import importlib.machinery
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np

from kt_kernel.bench.batch import Batch, encoded_weights, expert_weights
from kt_kernel.bench.shapes import GROUP_SIZES, Shape
from kt_kernel.bench.timing import sample

# (class, weights as one address per expert) by format, first that the variant has.
_CLASSES = {
    "bf16": (("AMXBF16_MOE", True), ("AVX2BF16_MOE", True)),
    "int8": (("AMXInt8_MOE", False),),
    "int4": (("AMXInt4_MOE", False),),
    "fp8": (("AMXFP8_MOE", True), ("AVX2FP8_MOE", True)),
    "rawint4": (("AMXInt4_KGroup_MOE", True), ("AVX2RawInt4_MOE", True)),
}
_CODE_BITS = {"fp8": 8, "rawint4": 4}

# It does not tell; its row and block scales are below 0.1%.
_BYTES_PER_WEIGHT = {"bf16": 2, "int8": 1, "int4": 0.5, "fp8": 1, "rawint4": 0.5625}

# Its workers spin for 50 ms after a call; nothing else may be timed before that is over.
_SETTLE_SECONDS = 0.12

_MAX_TOKENS_STEP = 32  # the AMX classes want max_len in these steps


class Released:
    """Answers the requests of ``client``; every public method is one."""

    def __init__(self, module_path: str):
        self._native = _load(Path(module_path))
        self._source: tuple[Shape, str, list] | None = None
        self._infer = None
        self._layers: list = []
        self._keep: list = []
        self._shape: Shape | None = None
        self._batch: Batch | None = None
        self._n_tokens = np.zeros(1, np.int32)  # read when a task runs, so it has to outlive the call
        self._n_tokens_address = self._n_tokens.ctypes.data

    def hello(self) -> dict:
        return {
            "variant": self._native.__cpu_variant__,
            "formats": [name for name in _CLASSES if self._class_of(name) is not None],
        }

    def open(self, shape: dict, weight_format: str, threads: int, max_tokens: int, copies: int) -> dict:
        self.close()
        self._shape = Shape(**shape)
        self._infer = self._native.CPUInfer(self._pool_config(threads))
        source = self._source_of(self._shape, weight_format)
        identity = np.arange(self._shape.experts, dtype=np.int64)
        on_gpu = np.zeros(self._shape.experts, np.bool_)
        self._keep = [identity, on_gpu]
        make, per_expert = self._class_of(weight_format)
        for index in range(copies):
            config = self._native.moe.MOEConfig(
                self._shape.experts, self._shape.top_k, self._shape.hidden, self._shape.intermediate
            )
            config.layer_idx = index
            config.pool = self._infer.backend_
            config.max_len = -(-max_tokens // _MAX_TOKENS_STEP) * _MAX_TOKENS_STEP
            config.gpu_experts_mask = on_gpu.ctypes.data
            config.physical_to_logical_map = identity.ctypes.data
            if weight_format in GROUP_SIZES:
                _point_to_codes(config, source, weight_format)
            elif per_expert:
                config.gate_projs, config.up_projs, config.down_projs = ([_addresses(experts)] for experts in source)
            else:  # quantised at load
                config.load = config.save = False
                config.gate_proj, config.up_proj, config.down_proj = (experts.ctypes.data for experts in source)
            layer = make(config)
            self._run(layer.load_weights_task(identity.ctypes.data))
            self._layers.append(layer)
        return {"packed_bytes_per_expert": int(self._shape.weights_per_expert * _BYTES_PER_WEIGHT[weight_format])}

    def close(self) -> None:
        self._layers = []
        self._infer = self._batch = None

    def time(self, tokens: int, seconds: float) -> dict:
        batch = self._batch_of(tokens)
        us = sample(lambda call: self._forward(batch, call), seconds)
        time.sleep(_SETTLE_SECONDS)
        return {"unique_experts": batch.unique_experts, "us": us}

    def output(self, tokens: int) -> dict:
        batch = self._batch_of(tokens)
        self._forward(batch, 0)
        time.sleep(_SETTLE_SECONDS)
        return {"bf16": base64.b64encode(batch.output.tobytes()).decode()}

    def _class_of(self, weight_format: str):
        for name, per_expert in _CLASSES.get(weight_format, ()):
            if hasattr(self._native.moe, name):
                return getattr(self._native.moe, name), per_expert
        return None

    def _pool_config(self, threads: int):
        """Threads over the NUMA nodes, as its own start-up would spread them."""
        nodes = sorted(int(p.name[4:]) for p in Path("/sys/devices/system/node").glob("node[0-9]*")) or [0]
        config = self._native.WorkerPoolConfig()
        # Its shards split the intermediate size, so a node count that does not divide it cannot be used.
        count = len(nodes) if threads >= len(nodes) and self._shape.intermediate % len(nodes) == 0 else 1
        config.subpool_count = count
        config.subpool_numa_map = nodes[:count]
        config.subpool_thread_count = [threads // count + (i < threads % count) for i in range(count)]
        return config

    def _source_of(self, shape: Shape, weight_format: str) -> list:
        """All experts' weights, bf16 or (codes, scales); kept, because several thread counts load the same ones."""
        kind = weight_format if weight_format in GROUP_SIZES else "bf16"
        if self._source is not None and self._source[:2] == (shape, kind):
            return self._source[2]
        self._source = None
        if kind in GROUP_SIZES:
            experts = [encoded_weights(shape, kind, expert) for expert in range(shape.experts)]
            self._source = (shape, kind, list(zip(*experts, strict=True)))
        else:
            rows = (shape.experts, shape.intermediate, shape.hidden)
            arrays = [
                np.empty(rows, np.uint16),
                np.empty(rows, np.uint16),
                np.empty((rows[0], rows[2], rows[1]), np.uint16),
            ]
            for expert in range(shape.experts):
                for array, weights in zip(arrays, expert_weights(shape, expert), strict=True):
                    array[expert] = weights
            self._source = (shape, kind, arrays)
        return self._source[2]

    def _batch_of(self, tokens: int) -> Batch:
        if self._batch is None or self._batch.tokens != tokens:
            self._batch = Batch(self._shape, tokens)
            self._n_tokens[0] = tokens
            self._forward(self._batch, 0)  # touches every buffer
        return self._batch

    def _forward(self, batch: Batch, call: int) -> None:
        layer = self._layers[call % len(self._layers)]
        self._run(layer.forward_task(self._n_tokens_address, self._shape.top_k, *batch.addresses(call), False))

    def _run(self, task) -> None:
        self._infer.submit(task)
        self._infer.sync()


def _addresses(arrays) -> list[int]:
    return [array.ctypes.data for array in arrays]


def _point_to_codes(config, source: list, weight_format: str) -> None:
    for projection, experts in zip(("gate", "up", "down"), source, strict=True):
        codes, scales = zip(*experts, strict=True)
        setattr(config, f"{projection}_projs", [_addresses(codes)])
        setattr(config, f"{projection}_scales", [_addresses(scales)])
    config.quant_config.bits = _CODE_BITS[weight_format]
    config.quant_config.group_size = GROUP_SIZES[weight_format]
    config.quant_config.zero_point = False


def _load(path: Path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "kt_kernel_ext"]:
        del sys.modules[name]  # ours of that name; its classes would be taken for the peer's
    # Every variant's file initialises under this one name.
    loader = importlib.machinery.ExtensionFileLoader("kt_kernel_ext", str(path))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location("kt_kernel_ext", path, loader=loader)
    )
    loader.exec_module(module)
    return module
