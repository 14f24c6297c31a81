"""Models for SGLang that need no download: Qwen3-MoE checkpoints with random weights, and what they should say.

    python models.py FOLDER tiny|qwen3-30b-8layers     writes the checkpoint
    python models.py FOLDER reference                  writes FOLDER/reference.json: float32, by transformers on the CPU

Matrices are normal with variance gain^2 / columns. In the tiny model the gain makes every expert move the logits: a
wrong, missing or doubled one changes the text.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Candidates, of different lengths: together they make batches whose rows are at different places.
PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "One two three",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "def main():",
    "0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89",
    "Call me Ishmael.",
    "To be, or not to be, that is the question",
    "import os",
    "In the beginning",
    "SELECT name FROM table WHERE id = 1;",
    "Paris is the capital of",
    "x = y + 1",
    "Once upon a time there was",
    "The sum of two and two is four",
    "A",
    "https://example.org/index.html",
)
KEPT = 5
# Two experts may be so close that the noise of bf16 chooses the other one, and what random weights then say has nothing
# to do with the reference. Kept are the prompts whose log-probs move least when this much noise, relative, is added
# behind every layer; bf16 rounds to 2^-9, several times in a layer.
NOISE, TRIES = 2.0**-8, 16
NEW_TOKENS = 16


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    gain: float


SHAPES = {
    "tiny": Shape(4, 512, 16, 4, 256, 8, 2, 64, 4096, 1.5),
    # Layers of Qwen3-30B-A3B, which has 48; its vocabulary of 151,936 would add nothing to measure.
    "qwen3-30b-8layers": Shape(8, 2048, 128, 8, 768, 32, 4, 128, 32768, 1.0),
}


def write_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> None:
    """Layers of the large model are made on the GPU where there is one: the CPU would take minutes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, shape.vocabulary)
    _write_config(folder, shape)
    large = shape.experts * shape.hidden > 1 << 16
    device = "cuda" if large and torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return (values * (gain / math.sqrt(columns))).bfloat16().cpu()

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    outside = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden, math.sqrt(shape.hidden)),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": matrix(shape.vocabulary, shape.hidden, 3.0),
    }
    files = {"model-outside.safetensors": list(outside)}
    save_file(outside, folder / "model-outside.safetensors", metadata={"format": "pt"})
    for index in range(shape.layers):
        tensors = _layer(f"model.layers.{index}.", shape, matrix, ones)
        name = f"model-layer-{index}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files[name] = list(tensors)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _layer(prefix: str, shape: Shape, matrix, ones) -> dict:
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    head_ones = ones[:1].repeat(shape.head_size)
    tensors = {
        "input_layernorm.weight": ones.clone(),
        "post_attention_layernorm.weight": ones.clone(),
        "self_attn.q_proj.weight": matrix(queries, shape.hidden),
        "self_attn.k_proj.weight": matrix(keys, shape.hidden),
        "self_attn.v_proj.weight": matrix(keys, shape.hidden),
        "self_attn.o_proj.weight": matrix(shape.hidden, queries),
        "self_attn.q_norm.weight": head_ones.clone(),
        "self_attn.k_norm.weight": head_ones.clone(),
        "mlp.gate.weight": matrix(shape.experts, shape.hidden, 2.0),
    }
    for expert in range(shape.experts):
        name = f"mlp.experts.{expert}."
        tensors[name + "gate_proj.weight"] = matrix(shape.intermediate, shape.hidden, shape.gain)
        tensors[name + "up_proj.weight"] = matrix(shape.intermediate, shape.hidden, shape.gain)
        tensors[name + "down_proj.weight"] = matrix(shape.hidden, shape.intermediate, shape.gain)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _write_config(folder: Path, shape: Shape) -> None:
    end = shape.vocabulary - 1  # the last of MARKS
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # what the fork's transformers reads
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": 4 * shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocabulary,
        "eos_token_id": end,
        "pad_token_id": end - 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": end, "pad_token_id": end - 2, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A token for each byte, then words that no text has, then the marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġ{number}" for number in range(vocabulary - len(letters) - len(MARKS))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "eos_token": MARKS[2],
        "pad_token": MARKS[0],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_reference(folder: Path) -> None:
    """For each prompt: its ids, greedy tokens, their log-probs, and how far ahead of the second best each was."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # its matrices are small; on a busy machine threads would wait for each other
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = [_greedy(model, tokenizer.encode(prompt).ids) for prompt in PROMPTS]
        for layer in model.model.layers:
            layer.register_forward_hook(_add_noise)
        rows.sort(key=lambda row: _largest_difference(model, row))
    (folder / "reference.json").write_text(json.dumps(rows[:KEPT]))


def _greedy(model, prompt_ids: list[int]) -> dict:
    import torch

    ids, logprobs, leads, past = list(prompt_ids), [], [], None
    for _ in range(NEW_TOKENS):
        answer = model(torch.tensor([ids if past is None else ids[-1:]]), past_key_values=past, use_cache=True)
        past, best = answer.past_key_values, answer.logits[0, -1].log_softmax(-1).topk(2)
        ids.append(int(best.indices[0]))
        logprobs.append(float(best.values[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return {"prompt_ids": prompt_ids, "output_ids": ids[len(prompt_ids) :], "logprobs": logprobs, "leads": leads}


def _add_noise(_module, _inputs, output):
    """Behind a layer: other noise in every row of the batch."""
    import torch

    hidden = output[0] if isinstance(output, tuple) else output
    noisy = hidden + torch.randn_like(hidden) * (NOISE * hidden.pow(2).mean(-1, keepdim=True).sqrt())
    return (noisy, *output[1:]) if isinstance(output, tuple) else noisy


def _largest_difference(model, row: dict) -> float:
    import torch

    ids = row["prompt_ids"] + row["output_ids"]
    logprobs = model(torch.tensor([ids] * TRIES)).logits.log_softmax(-1)
    places = range(len(row["prompt_ids"]), len(ids))
    found = torch.stack([logprobs[:, at - 1, ids[at]] for at in places], dim=1)
    return float((found - torch.tensor(row["logprobs"])).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=[*SHAPES, "reference"])
    given = parser.parse_args()
    if given.what == "reference":
        write_reference(given.folder)
    else:
        write_checkpoint(given.folder, SHAPES[given.what])


if __name__ == "__main__":
    main()
