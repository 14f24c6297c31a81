"""Files of weights as others write them, made slowly and straight from what is known about their layout."""

import json
from pathlib import Path

import checkpoint_codes
import numpy as np
from layer_reference import Shape, Weights, random_expert, shared_pool

from kt_kernel import _core

PROJECTIONS = ("gate", "up", "down")
METHODS = {"int8": "AMXINT8", "int4": "AMXINT4", "int4g": "INT4G", "bf16": "BF16"}
_INTEGERS = {"int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64"}
_DTYPES = _INTEGERS | {"uint16": "BF16", "float16": "F16", "float32": "F32"}


def write_safetensors(
    path: Path,
    tensors: dict[str, np.ndarray],
    metadata: dict | None = None,
    pad: int | None = 0,
    dtypes: dict[str, str] | None = None,
) -> Path:
    """uint16 is written as BF16, other types that numpy lacks as `dtypes` says.

    `pad` spaces lengthen the header, so that data starts where it likes; None aligns.
    """
    fields: dict = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, array in tensors.items():
        fields[name] = {
            "dtype": (dtypes or {}).get(name) or _DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8 if pad is None else pad)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(a.tobytes() for a in tensors.values()))
    return path


def make_layer(
    shape: Shape, weight_format: str, threads: tuple[int, ...] = (1,), group: int | None = None
) -> "_core.MoELayer":
    return _core.MoELayer(
        shared_pool(threads),
        format=weight_format,
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        max_tokens=8,
        group_size=checkpoint_codes.group_size(weight_format) if group is None else group,
    )


def originals(shape: Shape, seed: int = 0) -> list[Weights]:
    return [random_expert(shape, seed, expert) for expert in range(shape.experts)]


def as_loaded(shape: Shape, weight_format: str, experts: list[Weights]) -> list[Weights]:
    """What one node sees of bf16 experts."""
    layer = make_layer(shape, weight_format)
    for expert, weights in enumerate(experts):
        layer.load_expert(expert, *weights)
    return decoded(layer)


def decoded(layer: "_core.MoELayer") -> list[Weights]:
    return [layer.decode_expert(expert) for expert in range(layer.num_experts)]


def same(left: list[Weights], right: list[Weights]) -> bool:
    return all(
        np.array_equal(a, b) for one, two in zip(left, right, strict=True) for a, b in zip(one, two, strict=True)
    )


CHECKPOINT_NAMES = {
    "separate": [f"mlp.experts.{{}}.{p}_proj.weight" for p in PROJECTIONS],
    "mixtral": [f"block_sparse_moe.experts.{{}}.{w}.weight" for w in ("w1", "w3", "w2")],
}


def checkpoint_tensors(experts: list[Weights], base: str, naming: str) -> dict[str, np.ndarray]:
    if naming == "packed":
        return {
            f"{base}.mlp.experts.gate_up_proj": np.stack([np.concatenate([gate, up]) for gate, up, _ in experts]),
            f"{base}.mlp.experts.down_proj": np.stack([down for *_, down in experts]),
        }
    return {
        f"{base}.{name.format(expert)}": matrix
        for expert, weights in enumerate(experts)
        for name, matrix in zip(CHECKPOINT_NAMES[naming], weights, strict=True)
    }


def blob(codes: np.ndarray, weight_format: str) -> np.ndarray:
    """The packed bytes that kt-kernel 0.4 to 0.7 wrote for the codes of one part, element by element."""
    rows, depth = codes.shape
    bits, block, step = (8, 64, 64) if weight_format == "int8" else (4, 128, 128)
    out = np.zeros(rows * depth * bits // 8, np.uint8)
    for n in range(rows):
        nb = n // block * block
        n_block, ns, h = min(block, rows - nb), (n - nb) // 32 * 32, (n - nb) % 32 // 16
        k = np.arange(depth)
        kb = k // 3584 * 3584
        k_block, ks, r = np.minimum(3584, depth - kb), (k - kb) // step * step, (k - kb) % step
        off = (nb * depth + kb * n_block + ns * k_block + 32 * ks) * bits // 8
        off += 1024 * h + 64 * (r % 64 // 4) + 4 * (n % 16) + r % 4
        if bits == 8:
            out[off] = codes[n].view(np.uint8)
        else:
            low = r < 64
            out[off[low]] |= codes[n, low].view(np.uint8) & 15
            out[off[~low]] |= (codes[n, ~low].view(np.uint8) & 15) << 4
    return out.view(np.int8)


class ReleasedLayer:
    """Random codes and scales of a layer in `parts` parts, what they mean, and the two ways to store them."""

    def __init__(self, shape: Shape, weight_format: str, parts: int, seed: int = 0):
        self.shape, self.format, self.parts = shape, weight_format, parts
        rng = np.random.default_rng([seed, parts])
        most = 127 if weight_format == "int8" else 7
        part = shape.intermediate // parts
        sizes = {"gate": (part, shape.hidden), "up": (part, shape.hidden), "down": (shape.hidden, part)}
        self.coded = {}
        for expert in range(shape.experts):
            for projection in PROJECTIONS:
                for n in range(parts):
                    codes = rng.integers(-most, most, sizes[projection], np.int8, endpoint=True)
                    scales = rng.uniform(0.001, 0.01, len(codes)).astype(np.float32)
                    self.coded[projection, expert, n] = codes, scales

    def meaning(self) -> list[Weights]:
        step = 1 if self.format == "int8" else 16

        def decode(projection: str, expert: int, n: int) -> np.ndarray:
            codes, scales = self.coded[projection, expert, n]
            return scales[:, None] * (step * codes.astype(np.float32))

        return [
            tuple(
                np.concatenate([decode(p, e, n) for n in range(self.parts)], axis=1 if p == "down" else 0)
                for p in PROJECTIONS
            )
            for e in range(self.shape.experts)
        ]

    def write_merged(self, path: Path, layer_idx: int, **options) -> Path:
        tensors = {}
        for (projection, expert, n), (codes, scales) in self.coded.items():
            name = f"blk.{layer_idx}.ffn_{projection}_exps.{expert}.numa.{n}"
            tensors |= {f"{name}.weight": blob(codes, self.format), f"{name}.scale": scales}
        return write_safetensors(path, tensors, **options)

    def write_tree(self, folder: Path, layer_idx: int) -> Path:
        for (projection, expert, n), (codes, scales) in self.coded.items():
            at = folder / f"_layer_{layer_idx}" / f"_numa_{n}"
            at.mkdir(parents=True, exist_ok=True)
            data = blob(codes, self.format).tobytes()
            name = f"{self.format.upper()}_{projection}_{expert}"
            (at / f"{name}_{len(data)}Byte_quant_.kt").write_bytes(data)
            (at / f"{name}_{scales.nbytes}Byte_scale_.kt").write_bytes(scales.tobytes())
        return folder
