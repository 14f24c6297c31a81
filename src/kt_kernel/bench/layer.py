"""The one place that knows how the extension computes a layer and measures limits."""

from kt_kernel import _core
from kt_kernel.bench.batch import Batch, encoded_weights, expert_weights, gguf_weights
from kt_kernel.bench.shapes import GGUF_TYPES, GROUP_SIZES, Shape

PEAK_UNITS = ("fma_f32", "dot_bf16", "dot_u8s8", "tile_bf16", "tile_u8s8")
# Measured beside a peak of tiles. "fed": with the loads of a matrix product, from L1, so what the peak is worth to a
# kernel; "2x2": with all eight tile registers in use, the usual way to measure it, too low beside a busy hyperthread.
BESIDE_PEAK = {
    "tile_bf16": {"fed": "tile_bf16_l1", "2x2": "tile_bf16_2x2"},
    "tile_u8s8": {"fed": "tile_u8s8_l1", "2x2": "tile_u8s8_2x2"},
}
LIMIT_UNITS = (*PEAK_UNITS, *(unit for beside in BESIDE_PEAK.values() for unit in beside.values()))


def open_pool(threads: int | None) -> "_core.Pool":
    """A pinned pool over the NUMA nodes, ``threads`` in all (default: every usable CPU), cores before siblings."""
    nodes = _core.topology().nodes
    wanted = threads if threads is not None else sum(len(node.cpus) for node in nodes)
    shares = [wanted * (i + 1) // len(nodes) - wanted * i // len(nodes) for i in range(len(nodes))]
    used = [(node, share) for node, share in zip(nodes, shares, strict=True) if share]
    return _core.Pool(
        [share for _, share in used],
        [node.memory_id for node, _ in used],
        [node.cpus[:share] for node, share in used],
    )


def default_threads() -> int:
    return sum(len(node.cpus) for node in _core.topology().nodes)


def measure_peaks(pool: "_core.Pool", unit: str | None, seconds: float) -> dict[str, float]:
    """``peak`` of a unit and what is measured beside it; nothing without a unit."""
    units = {"peak": unit, **BESIDE_PEAK.get(unit, {})} if unit else {}
    return {name: _core.measure_peak(pool, of, seconds) for name, of in units.items()}


class Layers:
    """Copies of one layer; a call takes the next one, so that all of them together are larger than the cache."""

    def __init__(self, pool: "_core.Pool", shape: Shape, weight_format: str, max_tokens: int, copies: int):
        self.shape, self._format = shape, weight_format
        self._layers = [
            _core.MoELayer(
                pool,
                format=weight_format,
                num_experts=shape.experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                max_tokens=max_tokens,
                group_size=GROUP_SIZES.get(weight_format, 0),
            )
            for _ in range(copies)
        ]
        self.packed_bytes_per_expert: int = self._layers[0].packed_bytes_per_expert

    def fill_random(self) -> None:
        for seed, layer in enumerate(self._layers):
            layer.fill_random(seed)

    def load_seeded(self) -> None:
        """The weights that a peer gets too."""
        for expert in range(self.shape.experts):
            if self._format in GROUP_SIZES:
                block = 128 if self._format == "fp8" else 1
                encoded = encoded_weights(self.shape, self._format, expert)
                matrices = [_core.EncodedMatrix(codes, scales, block_rows=block) for codes, scales in encoded]
                for layer in self._layers:
                    layer.load_encoded(expert, *matrices)
                continue
            if self._format in GGUF_TYPES:
                rows = gguf_weights(self.shape, self._format, expert)
                for layer in self._layers:
                    layer.load_gguf(expert, *rows)
                continue
            weights = expert_weights(self.shape, expert)
            for layer in self._layers:
                layer.load_expert(expert, *weights)

    def forward(self, batch: Batch, call: int) -> None:
        self._layers[call % len(self._layers)].forward(batch.tokens, *batch.addresses(call))
