"""The tokenizer of the model as files that transformers reads, rebuilt from what its GGUF file has of it."""

import json
from pathlib import Path

from kt_kernel.demo.errors import DemoError
from kt_kernel.weights.gguf_file import read_field

# Of tokenizer.ggml.token_type.
_CONTROL = 3


def write_tokenizer(source: Path, folder: Path, context_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    try:
        import tokenizers
    except ImportError:
        raise DemoError("the demo model needs the package tokenizers: pip install 'kt-kernel[engine]'") from None
    words, merges, types = (read_field(source, f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    steps = tokenizers.pre_tokenizers
    # SmolLM2 was trained with digits by themselves and then the expression of GPT-2.
    pairs = [tuple(merge.split(" ")) for merge in merges]
    bpe = tokenizers.models.BPE({word: index for index, word in enumerate(words)}, pairs)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = steps.Sequence([steps.Digits(individual_digits=True), steps.ByteLevel(False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            name: words[read_field(source, f"tokenizer.ggml.{key}_token_id")]
            for name, key in {
                "bos_token": "bos",
                "eos_token": "eos",
                "pad_token": "padding",
                "unk_token": "unknown",
            }.items()
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(read_field(source, "tokenizer.chat_template"))
