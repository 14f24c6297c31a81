"""Which slot gets which expert, from files and from tensors, and what an interrupt leaves behind."""

import io
import os
import pty
import sys
import time

import numpy as np
import pytest
from layer_reference import Shape, from_bf16, to_bf16
from weight_files import (
    METHODS,
    as_loaded,
    checkpoint_tensors,
    decoded,
    make_layer,
    originals,
    same,
    write_safetensors,
)

from kt_kernel.weights import load_layer, load_layer_from_tensors
from kt_kernel.weights.progress import Progress

SHAPE = Shape(experts=4, top_k=2, hidden=72, intermediate=130)
MAP = [2, 0, 3, 1]


def stacked(experts) -> list[np.ndarray]:
    return [np.stack(matrices) for matrices in zip(*experts, strict=True)]


def bf16_tensor(bits: np.ndarray):
    torch = pytest.importorskip("torch", reason="torch is not installed: its tensors were not tested")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.fixture
def checkpoint(tmp_path):
    experts = originals(SHAPE)
    write_safetensors(tmp_path / "model.safetensors", checkpoint_tensors(experts, "model.layers.5", "separate"))
    return tmp_path, experts


def load(source, layer, method, **options):
    """From a folder, or from the experts themselves."""
    path, experts = source
    if path is None:
        return load_layer_from_tensors(layer, method, *stacked(experts), **options)
    return load_layer(layer, method, path, 5, **options)


@pytest.mark.parametrize("from_files", [True, False])
@pytest.mark.parametrize("weight_format", METHODS)
class TestSlots:
    @pytest.mark.parametrize("convert", [list, np.array, "torch"])
    def test_a_slot_gets_the_expert_of_the_map(self, checkpoint, weight_format, from_files, convert):
        path, experts = checkpoint
        if convert == "torch":
            convert = pytest.importorskip("torch").tensor
        layer = make_layer(SHAPE, weight_format)
        source = (path if from_files else None, experts)
        load(source, layer, METHODS[weight_format], physical_to_logical=convert(MAP))
        expected = as_loaded(SHAPE, weight_format, experts)
        assert same(decoded(layer), [expected[expert] for expert in MAP])

    def test_skipped_slots_stay_as_they_are(self, checkpoint, weight_format, from_files):
        path, experts = checkpoint
        others = originals(SHAPE, seed=1)
        layer = make_layer(SHAPE, weight_format)
        load((None, others), layer, METHODS[weight_format])
        source = (path if from_files else None, experts)
        skip = np.array([True, False, False, True])
        load(source, layer, METHODS[weight_format], physical_to_logical=MAP, skip=skip)
        mixed = [others[slot] if skip[slot] else experts[expert] for slot, expert in enumerate(MAP)]
        assert same(decoded(layer), as_loaded(SHAPE, weight_format, mixed))

    def test_an_expert_may_be_in_several_slots(self, checkpoint, weight_format, from_files):
        path, experts = checkpoint
        wide = Shape(6, 2, SHAPE.hidden, SHAPE.intermediate)
        layer = make_layer(wide, weight_format)
        source = (path if from_files else None, experts)
        copies = [0, 1, 2, 3, 1, 1]
        load(source, layer, METHODS[weight_format], physical_to_logical=copies)
        expected = as_loaded(SHAPE, weight_format, experts)
        assert same(decoded(layer), [expected[expert] for expert in copies])


@pytest.mark.parametrize("from_files", [True, False])
def test_maps_that_cannot_be(checkpoint, from_files):
    source = (checkpoint[0] if from_files else None, checkpoint[1])
    layer = make_layer(SHAPE, "int8")
    for value in (-1, 4):
        with pytest.raises(ValueError, match=rf"physical_to_logical_map\[2\] is {value}; .* has 4 experts, 0\.\.3"):
            load(source, layer, "AMXINT8", physical_to_logical=[0, 1, value, 3])
    with pytest.raises(ValueError, match="physical_to_logical_map has 3 entries; this layer has 4 experts"):
        load(source, layer, "AMXINT8", physical_to_logical=[0, 1, 2])
    with pytest.raises(ValueError, match="skip has 5 entries; this layer has 4 experts"):
        load(source, layer, "AMXINT8", skip=[False] * 5)
    with pytest.raises(TypeError, match="physical_to_logical_map must hold integers"):
        load(source, layer, "AMXINT8", physical_to_logical=[0.5, 1, 2, 3])


def test_methods_that_do_not_fit(checkpoint):
    layer = make_layer(SHAPE, "int8")
    with pytest.raises(ValueError, match="'AMXINT5' is unknown; the methods are BF16, AMXINT8, AMXINT4, INT4G"):
        load_layer(layer, "AMXINT5", checkpoint[0], 5)
    with pytest.raises(ValueError, match="method BF16 needs a layer of bf16; this one is int8"):
        load_layer(layer, "BF16", checkpoint[0], 5)


class TestTensors:
    @pytest.mark.parametrize("weight_format", METHODS)
    def test_bf16_of_torch(self, weight_format):
        experts = originals(SHAPE)
        layer = make_layer(SHAPE, weight_format)
        tensors = [bf16_tensor(array) for array in stacked(experts)]
        tensors[0].requires_grad_()
        load_layer_from_tensors(layer, METHODS[weight_format], *tensors)
        assert same(decoded(layer), as_loaded(SHAPE, weight_format, experts))

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    @pytest.mark.parametrize("library", ["numpy", "torch"])
    def test_other_floats(self, dtype, library):
        rng = np.random.default_rng(0)
        experts = [tuple(rng.standard_normal(m.shape).astype(dtype) for m in expert) for expert in originals(SHAPE)]
        tensors = stacked(experts)
        if library == "torch":
            torch = pytest.importorskip("torch")
            tensors = [torch.from_numpy(tensor) for tensor in tensors]
        layer = make_layer(SHAPE, "bf16")
        load_layer_from_tensors(layer, "BF16", *tensors)
        rounded = [tuple(from_bf16(to_bf16(matrix)) for matrix in expert) for expert in experts]
        assert same(decoded(layer), rounded)

    def test_what_is_refused(self):
        layer = make_layer(SHAPE, "int8")
        gate, up, down = stacked(originals(SHAPE))
        with pytest.raises(ValueError, match=r"up_proj has shape \[4, 72, 130\]; it must be \[4, 130, 72\]"):
            load_layer_from_tensors(layer, "AMXINT8", gate, down, down)
        with pytest.raises(ValueError, match=r"down_proj has shape \[3, 72, 130\]"):
            load_layer_from_tensors(layer, "AMXINT8", gate, up, down[:3])
        with pytest.raises(ValueError, match="gate is missing"):
            load_layer_from_tensors(layer, "AMXINT8", None, up, down)
        with pytest.raises(TypeError, match="gate_proj holds int32; weights must be bf16, f16 or f32"):
            load_layer_from_tensors(layer, "AMXINT8", gate.astype(np.int32), up, down)
        with pytest.raises(ValueError, match="save_to needs layer_idx"):
            load_layer_from_tensors(layer, "AMXINT8", gate, up, down, save_to="x")
        bf16 = make_layer(SHAPE, "bf16")
        with pytest.raises(ValueError, match="BF16 keeps weights as they are"):
            load_layer_from_tensors(bf16, "BF16", gate, up, down, save_to="x", layer_idx=0)

    def test_tensors_of_another_type_or_device(self):
        torch = pytest.importorskip("torch")
        layer = make_layer(SHAPE, "int8")
        gate, up, down = (torch.from_numpy(array.astype(np.int32)) for array in stacked(originals(SHAPE)))
        with pytest.raises(TypeError, match=r"gate_proj holds torch\.int32"):
            load_layer_from_tensors(layer, "AMXINT8", gate, up, down)
        with pytest.raises(ValueError, match=r"gate_proj is on meta; .*: use gate_proj\.cpu\(\)"):
            load_layer_from_tensors(layer, "AMXINT8", gate.float().to("meta"), up, down)


def test_an_interrupt_between_experts_leaves_a_layer_that_loads(checkpoint):
    path, experts = checkpoint
    layer = make_layer(SHAPE, "int8")

    def interrupt(done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_layer(layer, "AMXINT8", path, 5, progress=interrupt)
    expected = as_loaded(SHAPE, "int8", experts)
    assert same(decoded(layer)[:2], expected[:2])
    load_layer(layer, "AMXINT8", path, 5)
    assert same(decoded(layer), expected)


def test_progress_is_told(checkpoint):
    told = []
    layer = make_layer(SHAPE, "int8")
    load_layer(layer, "AMXINT8", checkpoint[0], 5, skip=[True, False, False, False], progress=lambda *c: told.append(c))
    assert told == [(1, 3), (2, 3), (3, 3)]


def run_slowly(seconds: float) -> None:
    with Progress("layer 5", 3) as bar:
        for _ in range(3):
            time.sleep(seconds)
            bar.advance()


def test_a_bar_appears_on_terminals_only_and_late(monkeypatch):
    shown, stderr = [], sys.stderr
    for seconds, terminal in ((0.0, True), (0.6, True), (0.6, False)):
        if not terminal:
            monkeypatch.setattr(sys, "stderr", io.StringIO())
            run_slowly(seconds)
            shown.append(sys.stderr.getvalue())
            continue
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as file:
            monkeypatch.setattr(sys, "stderr", file)
            monkeypatch.setenv("TERM", "xterm")
            run_slowly(seconds)
            file.write("end")
        monkeypatch.setattr(sys, "stderr", stderr)
        shown.append(os.read(ours, 10000).decode())
        os.close(ours)
    assert shown[0] == "end"
    assert "layer 5" in shown[1]
    assert shown[2] == ""
