"""The packed-weight store with KTMoEWrapper, and with experts that have biases."""

import os

import numpy as np
import pytest
import test_weights_gpt_oss as gpt_oss
from store_cases import LAYER, SHAPE, StoreCase, forward
from wrapper_cases import make

from kt_kernel.weights import load_layer


def test_the_wrapper_uses_the_folder_of_the_variable(tmp_path, monkeypatch):
    case = StoreCase(tmp_path, "int8")
    options = {"layer_idx": LAYER, "weight_path": case.model}
    monkeypatch.setenv("KT_KERNEL_WEIGHT_STORE", str(case.store))
    for _ in range(2):
        wrapper = make(SHAPE, "AMXINT8", **options)
        wrapper.load_weights()
        assert case.is_from_store(wrapper.moe)
        assert case.names() == [case.file.name]
        case.spoil()
    case.file.unlink()
    monkeypatch.delenv("KT_KERNEL_WEIGHT_STORE")
    make(SHAPE, "AMXINT8", **options).load_weights()
    assert case.names() == []


@pytest.mark.parametrize("threads", [(1,), (1, 1)])
def test_biases_are_kept_and_config_json_counts(threads, tmp_path):
    def load(where=tmp_path / "store"):
        layer = gpt_oss.layer(threads=threads)
        load_layer(layer, "BF16", tmp_path / "model", 7, store=where)
        assert layer.loaded_experts == gpt_oss.SHAPE.experts
        return forward(layer, shape=gpt_oss.SHAPE)

    gpt_oss.write(tmp_path / "model", gpt_oss.plain(), model_type="gpt_oss")
    expected = load(where=None)
    assert np.array_equal(load(), expected)
    before = os.stat(next((tmp_path / "store").iterdir())).st_ino
    assert np.array_equal(load(), expected)
    assert os.stat(next((tmp_path / "store").iterdir())).st_ino == before  # it was read
    (tmp_path / "model" / "config.json").write_text('{"model_type": "openai_privacy_filter"}')
    other = load()
    assert np.array_equal(other, load(where=None))
    assert not np.array_equal(other, expected)
