"""A machine and a probe made of round numbers, and config.json files of models."""

import json
from dataclasses import replace
from pathlib import Path

from kt_kernel.machine.decode_overhead import DecodeOverhead
from kt_kernel.machine.facts import Disk, Machine, Node
from kt_kernel.machine.gpus import Gpu
from kt_kernel.machine.products import Products
from kt_kernel.machine.torch_layer import TorchLayer

GB = 1_000_000_000
BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5, "int4g": 0.5}

H200 = Gpu(0, "GPU-1", "NVIDIA H200", 143 * GB, 140 * GB, "9.0", "570")
RTX_4090 = Gpu(0, "GPU-2", "NVIDIA GeForce RTX 4090", 24 * GB, 23 * GB, "8.9", "570")


def machine(available: int = 64 * GB, cores: int = 16, nodes: int = 1, gpus: tuple[Gpu, ...] = ()) -> Machine:
    each = cores // nodes
    return Machine(
        cpu="Test CPU",
        variant="avx2",
        refused=(),
        nodes=tuple(Node(n, n, tuple(range(n * each, (n + 1) * each)), each, 1, 1) for n in range(nodes)),
        packages=1,
        cpu_quota=0.0,
        l3_bytes=32 << 20,
        memory_bytes=available + 8 * GB,
        available_bytes=available,
        gpus=gpus,
        disks=(Disk("/", "/dev/sda", 10**12, 10**11),),
    )


class FakeProbe:
    """100 GB/s, 1 T multiplications and additions per second, 2 GB/s from the disk."""

    def __init__(self, threads: int = 16):
        self.threads, self.busy, self.measured_s = threads, 0.0, 0.0

    def products(self, weight_format, hidden=0, intermediate=0) -> Products:
        read = BYTES.get(weight_format, 1.0) / 100e9
        return Products(tuple((rows, max(read, 2 * rows / 1e12)) for rows in (1, 4, 16, 64, 256)), 1e-10)

    def linears(self, weight_format, matrices) -> Products:
        return self.products(weight_format)

    def decode_overhead(self, heads) -> DecodeOverhead:
        return DecodeOverhead(layer_us=10.0, key_us=0.001)

    def torch_layer(self, hidden, heads, value_dim) -> TorchLayer:
        return TorchLayer(layer_us=100.0, token_us=1.0, pair_us=0.001)

    def sampling_us(self, vocabulary) -> float:
        return 100.0

    def read_gbps(self) -> float:
        return 100.0

    def disk_gbps(self, folder) -> float:
        return 2.0


QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    fields = {name: value for name, value in {**QWEN3_30B, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def with_quota(found: Machine, quota: float) -> Machine:
    return replace(found, cpu_quota=quota)
