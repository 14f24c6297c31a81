"""Arguments that cannot be: the message names the argument, what was given, and what is legal."""

import re

import pytest
from layer_reference import Shape
from wrapper_cases import batch, make, sizes, tensors, torch

from kt_kernel import KTMoEWrapper
from kt_kernel.weights import MissingTensorError

SHAPE = Shape(experts=8, top_k=2, hidden=64, intermediate=192)

# arguments -> the exception, and what its message has to hold
CASES = [
    ({"method": "AMXINT5"}, ValueError, ["method='AMXINT5'", "BF16", "AMXINT8", "AMXINT4"]),
    ({"method": None}, ValueError, ["method=None", "AMXINT4"]),
    ({"mode": "sft"}, ValueError, ["mode='sft'", "'inference'"]),
    ({"layer_idx": -1}, ValueError, ["layer_idx=-1", "0 or more"]),
    ({"num_experts": 0}, ValueError, ["num_experts=0", "1 or more"]),
    ({"num_experts": -8}, ValueError, ["num_experts=-8", "1 or more"]),
    ({"num_experts": 1 << 21}, ValueError, ["num_experts", str(1 << 21), "1..1048576"]),
    ({"num_experts_per_tok": 0}, ValueError, ["num_experts_per_tok=0", "1 or more"]),
    ({"num_experts_per_tok": 1 << 17}, ValueError, ["num_experts_per_tok", str(1 << 17), "1..65536"]),
    ({"hidden_size": 0}, ValueError, ["hidden_size=0", "1 or more"]),
    ({"hidden_size": 64.0}, TypeError, ["hidden_size=64.0", "float", "int"]),
    ({"hidden_size": True}, TypeError, ["hidden_size=True", "bool", "int"]),
    ({"moe_intermediate_size": 0}, ValueError, ["moe_intermediate_size=0", "1 or more"]),
    ({"moe_intermediate_size": "192"}, TypeError, ["moe_intermediate_size='192'", "str", "int"]),
    ({"num_gpu_experts": 9}, ValueError, ["num_gpu_experts=9", "0..8", "num_experts"]),
    ({"num_gpu_experts": -1}, ValueError, ["num_gpu_experts=-1", "0..8"]),
    ({"num_gpu_experts": "2"}, TypeError, ["num_gpu_experts='2'", "0..8"]),
    ({"num_gpu_experts": 2.0}, TypeError, ["num_gpu_experts=2.0", "0..8"]),
    ({"gpu_experts_mask": 9}, ValueError, ["num_gpu_experts=9", "0..8"]),
    ({"gpu_experts_mask": 2, "num_gpu_experts": 3}, ValueError, ["num_gpu_experts", "twice", "2", "3"]),
    ({"gpu_experts_mask": [False] * 8, "num_gpu_experts": 0}, ValueError, ["num_gpu_experts", "gpu_experts_mask"]),
    ({"gpu_experts_mask": True}, TypeError, ["gpu_experts_mask", "bool", "tensor", "None"]),
    ({"gpu_experts_mask": {0, 1}}, TypeError, ["gpu_experts_mask", "set", "tensor", "None"]),
    ({"gpu_experts_mask": [1, 0] * 4}, ValueError, ["gpu_experts_mask", "int64 [8]", "bool [8]"]),
    ({"gpu_experts_mask": torch.zeros(8)}, ValueError, ["gpu_experts_mask", "float32 [8]", "bool [8]"]),
    ({"gpu_experts_mask": [False] * 7}, ValueError, ["gpu_experts_mask", "bool [7]", "bool [8]"]),
    ({"gpu_experts_mask": [[False] * 8]}, ValueError, ["gpu_experts_mask", "bool [1, 8]", "bool [8]"]),
    (
        {"gpu_experts_mask": torch.zeros(8, dtype=torch.bool, device="meta")},
        ValueError,
        ["gpu_experts_mask", "meta", "device='cpu'"],
    ),
    ({"cpuinfer_threads": 0}, ValueError, ["cpuinfer_threads=0", "1 or more"]),
    ({"cpuinfer_threads": -2}, ValueError, ["cpuinfer_threads=-2", "1 or more"]),
    ({"cpuinfer_threads": "2"}, TypeError, ["cpuinfer_threads='2'", "int"]),
    ({"cpuinfer_threads": 1, "threadpool_count": 2}, ValueError, ["cpuinfer_threads=1", "2 sub-pools", "2 or more"]),
    ({"threadpool_count": 0}, ValueError, ["threadpool_count=0", "1 or more"]),
    ({"threadpool_count": -1}, ValueError, ["threadpool_count=-1", "1 or more"]),
    (
        {"cpuinfer_threads": 4, "threadpool_count": 4},
        ValueError,
        ["moe_intermediate_size 192", "4 sub-pools (threadpool_count)", "64 columns", "at most 3"],
    ),
    ({"numa_nodes": [0, 0], "threadpool_count": 1}, ValueError, ["numa_nodes=[0, 0]", "threadpool_count is 1"]),
    ({"numa_nodes": [4096]}, ValueError, ["numa_nodes=[4096]", "it has on 0"]),
    ({"numa_nodes": []}, ValueError, ["numa_nodes=[]", "None"]),
    ({"numa_nodes": 0}, TypeError, ["numa_nodes=0", "list"]),
    ({"max_deferred_experts_per_token": -1}, ValueError, ["max_deferred_experts_per_token=-1", "0..2"]),
    (
        {"max_deferred_experts_per_token": 3},
        ValueError,
        ["max_deferred_experts_per_token=3", "0..2", "num_experts_per_tok"],
    ),
    ({"swiglu_limit": -1.0}, ValueError, ["swiglu_limit is -1", "above 0"]),
    ({"swiglu_alpha": -0.5}, ValueError, ["swiglu_alpha is -0.5", "above 0"]),
    ({"swiglu_limit": float("nan")}, ValueError, ["swiglu_limit is nan", "above 0"]),
    ({"swiglu_alpha": float("inf")}, ValueError, ["swiglu_alpha is inf", "above 0"]),
    ({"chunked_prefill_size": "512"}, TypeError, ["chunked_prefill_size='512'", "int"]),
    ({"chunked_prefill_size": -2}, ValueError, ["chunked_prefill_size=-2", "-1 or more"]),
    ({"weight_path": None}, TypeError, ["weight_path=None", "str"]),
    ({"weight_path": b"x"}, TypeError, ["weight_path=b'x'", "str"]),
    ({"cpu_save": True}, ValueError, ["cpu_save=True", "weight_path"]),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), CASES, ids=[re.sub(r"\s+", " ", str(c[0])) for c in CASES])
def test_arguments_that_cannot_be(arguments, kind, words):
    with pytest.raises(kind) as raised:
        KTMoEWrapper(**{"layer_idx": 0, **sizes(SHAPE), **arguments})
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("argument", ["layer_idx", *sizes(SHAPE)])
def test_arguments_that_are_needed(argument):
    given = {"layer_idx": 0, **sizes(SHAPE)}
    del given[argument]
    with pytest.raises(TypeError, match=argument):
        KTMoEWrapper(**given)


def test_a_wrapper_can_be_made_after_one_that_could_not():
    """A layer that failed is no layer of the model: the next one with its number belongs to it."""
    options = {"weight_path": "/nowhere/model", "max_deferred_experts_per_token": 1}
    first = make(SHAPE, layer_idx=0, **options)
    with pytest.raises(ValueError, match="max_deferred"):
        make(SHAPE, layer_idx=1, **{**options, "max_deferred_experts_per_token": 9})
    assert make(SHAPE, layer_idx=1, **options)._model is first._model


class TestLoads:
    def test_without_a_path(self):
        with pytest.raises(ValueError, match="weight_path"):
            make(SHAPE).load_weights()

    def test_a_path_that_does_not_exist(self, tmp_path):
        path = tmp_path / "absent"
        with pytest.raises(FileNotFoundError, match=f"weight_path {path} does not exist"):
            make(SHAPE, weight_path=path).load_weights()

    def test_a_folder_without_weights(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no \*\.safetensors"):
            make(SHAPE, weight_path=tmp_path).load_weights()

    def test_a_folder_without_the_layer(self, tmp_path):
        made = make(SHAPE, "AMXINT8", layer_idx=2, weight_path=tmp_path, cpu_save=True)
        made.load_weights_from_tensors(*tensors(SHAPE))
        with pytest.raises(MissingTensorError, match=r"no experts of layer 5 .* layers 2\.\.2"):
            make(SHAPE, "AMXINT8", layer_idx=5, weight_path=tmp_path).load_weights()

    def test_weights_of_another_method(self, tmp_path):
        made = make(SHAPE, "AMXINT8", weight_path=tmp_path, cpu_save=True)
        made.load_weights_from_tensors(*tensors(SHAPE))
        with pytest.raises(ValueError, match=r"converted for method AMXINT8 .* uses method AMXINT4"):
            make(SHAPE, "AMXINT4", weight_path=tmp_path).load_weights()

    def test_weights_of_another_size(self, tmp_path):
        made = make(SHAPE, "AMXINT8", weight_path=tmp_path, cpu_save=True)
        made.load_weights_from_tensors(*tensors(SHAPE))
        for other in (Shape(8, 2, 128, 192), Shape(8, 2, 64, 128), Shape(6, 2, 64, 192), Shape(9, 2, 64, 192)):
            with pytest.raises(ValueError, match=str(tmp_path)):
                make(other, "AMXINT8", weight_path=tmp_path).load_weights()

    def test_tensors_of_another_shape_type_or_device(self):
        gate, up, down = tensors(SHAPE)
        wrapper = make(SHAPE)
        with pytest.raises(ValueError, match=r"up_proj has shape \[8, 64, 192\]; it must be \[8, 192, 64\]"):
            wrapper.load_weights_from_tensors(gate, down, down)
        with pytest.raises(ValueError, match=r"up_proj has shape \[8, 192, 64\]"):
            wrapper.load_weights_from_tensors(gate[:7], up, down)
        with pytest.raises(TypeError, match=r"down_proj holds torch\.int8"):
            wrapper.load_weights_from_tensors(gate, up, down.to(torch.int8))
        with pytest.raises(ValueError, match="gate_proj is on meta"):
            wrapper.load_weights_from_tensors(gate.to("meta"), up, down)
        assert wrapper.moe is None

    def test_bf16_has_nothing_to_save(self, tmp_path):
        wrapper = make(SHAPE, "BF16", weight_path=tmp_path, cpu_save=True)
        with pytest.raises(ValueError, match="BF16 keeps weights as they are"):
            wrapper.load_weights_from_tensors(*tensors(SHAPE))

    def test_a_forward_without_weights(self):
        with pytest.raises(RuntimeError, match=r"layer 4 has no weights; call load_weights\(\)"):
            make(SHAPE, layer_idx=4).forward(*batch(SHAPE, 1))
