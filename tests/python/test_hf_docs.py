"""The Python blocks of docs/transformers.md run as they are written, on a toy with a tokenizer."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: docs/transformers.md was not run")

from hf_checkpoints import save_toy
from test_readme import ROOT, run_blocks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "The", "capital", "of", "France", "is", *(f"w{index}" for index in range(58))]


def test_the_guide(tmp_path, capsys):
    folder = save_toy(tmp_path / "toy")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    places = {"/path/to/model": folder, "/path/to/store": tmp_path / "store"}
    names = run_blocks(ROOT / "docs/transformers.md", {}, places=places)
    text = capsys.readouterr().out.splitlines()
    assert text[0].startswith("The capital of France is ")
    assert text[-1] == "model.layers.1.mlp.experts files None"
    assert names["model"].hf_quantizer.quantization_config.method == "AMXINT8"
    assert list((tmp_path / "store").glob("*.ktpack"))
