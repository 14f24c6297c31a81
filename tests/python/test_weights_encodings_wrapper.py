"""KTMoEWrapper gives the same bits from an encoded checkpoint as from its bf16 tensors."""

from functools import partial

import encoded_weights as made
import numpy as np
import pytest
from layer_reference import Shape, to_bf16
from weight_files import write_safetensors
from wrapper_cases import batch, make, tensor_of_bits

SHAPE = Shape(experts=4, top_k=2, hidden=256, intermediate=384)
ENCODERS = {
    "fp8_block": made.fp8_block,
    "fp8_channel": made.fp8_channel,
    "mxfp8": made.mxfp8,
    "mxfp4": made.mxfp4,
    "nvfp4": made.nvfp4,
    "rawint4": made.rawint4,
    "gptq": partial(made.gptq, order="random"),
    "awq": made.awq,
}


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4", "INT4G"])
@pytest.mark.parametrize("name", ENCODERS)
def test_forward(name, method, tmp_path):
    tensors, dtypes, meaning = made.make_layer_tensors(ENCODERS[name], SHAPE, "model.layers.0")
    write_safetensors(tmp_path / "model.safetensors", tensors, dtypes=dtypes)
    from_file = make(SHAPE, method, weight_path=str(tmp_path))
    from_file.load_weights()
    from_tensors = make(SHAPE, method)
    bits = [to_bf16(made.nearest_bf16(np.stack(matrices))) for matrices in zip(*meaning, strict=True)]
    from_tensors.load_weights_from_tensors(*map(tensor_of_bits, bits))
    x, ids, weights = batch(SHAPE)
    results = []
    for wrapper in (from_file, from_tensors):
        wrapper.submit_forward(x, ids, weights)
        results.append(wrapper.sync_forward(x))
    assert results[0].isfinite().all()
    assert results[0].equal(results[1])
