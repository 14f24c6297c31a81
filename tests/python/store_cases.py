"""A checkpoint, a store beside it, and a way to see which of the two a layer was filled from."""

import os
from pathlib import Path

import numpy as np
from layer_reference import Shape, random_batch
from weight_files import METHODS, checkpoint_tensors, decoded, make_layer, originals, same, write_safetensors

from kt_kernel import _core
from kt_kernel.weights import load_layer

SHAPE = Shape(experts=4, top_k=2, hidden=72, intermediate=200)
LAYER = 5


class StoreCase:
    def __init__(self, folder: Path, weight_format: str = "bf16", threads: tuple[int, ...] = (1,)):
        self.format, self.threads = weight_format, threads
        self.model, self.store = folder / "some-model", folder / "store"
        self.source = self.model / "model.safetensors"
        write_safetensors(self.source, checkpoint_tensors(originals(SHAPE), f"model.layers.{LAYER}", "separate"))
        self.fresh = decoded(self.load(store=None))
        self.file = self.store / f"some-model.layer-{LAYER:05d}.{weight_format}.ktpack"

    def load(self, weight_format=None, threads=None, path=None, **options) -> "_core.MoELayer":
        weight_format = weight_format or self.format
        layer = make_layer(SHAPE, weight_format, threads or self.threads)
        load_layer(layer, METHODS[weight_format], path or self.model, LAYER, **{"store": self.store, **options})
        return layer

    def spoil(self) -> None:
        """Negates the weights of the source and leaves what the store looks at as it was.

        From then on a layer has the first weights if it was filled from the store, and others if not.
        """
        status, data = os.stat(self.source), bytearray(self.source.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        data[begin:] = (np.frombuffer(data, np.uint16, offset=begin) ^ np.uint16(0x8000)).tobytes()
        self.source.write_bytes(data)
        os.utime(self.source, ns=(status.st_atime_ns, status.st_mtime_ns))

    def is_from_store(self, layer: "_core.MoELayer", **options) -> bool:
        now = decoded(layer)
        if same(now, self.fresh):
            return True
        # The integer formats are not symmetric: compare with what the source gives now.
        assert same(now, decoded(self.load(**options | {"store": None}))), "neither the store nor the source"
        return False

    def assert_made_again(self, **options) -> None:
        """A load does not use the file, replaces it, and the next one uses the new file."""
        self.spoil()
        layer = self.load(**options)
        assert not self.is_from_store(layer, **options)
        made = decoded(layer)
        self.spoil()
        assert same(decoded(self.load(**options)), made)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.store.iterdir())


def forward(layer: "_core.MoELayer", tokens: int = 5, shape: Shape = SHAPE) -> np.ndarray:
    x, ids, weights = random_batch(shape, tokens)
    ids, out = ids.astype(np.int64), np.empty_like(x)
    layer.forward(tokens, *(array.ctypes.data for array in (ids, weights, x, out)))
    return out
