"""Tiny models and a tiny tokenizer for tests of the engine; requests, and what became of them."""

import threading
from dataclasses import dataclass, field

import torch
import transformers
from family_models import _TEXT, FAMILIES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kt_kernel.engine.api import Event, Request, Sampling
from kt_kernel.engine.chunks import fixed
from kt_kernel.engine.engine import SlotEngine
from kt_kernel.engine.forward import SlotForward
from kt_kernel.engine.text import ModelText

# Tiny products gain nothing from threads, which wait for each other on a busy machine: 35 s instead of 1 for a test.
torch.set_num_threads(1)

VOCABULARY = 320
WINDOW = 8  # shorter than every text here

_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

# What a family needs beyond its row in FAMILIES: windows shorter than the text, and both kinds of layers of hybrids.
OWN_OPTIONS = {
    "mixtral": {"sliding_window": WINDOW},
    "gpt_oss": _MIXED,
    "mimo_v2_flash": {"sliding_window": WINDOW},
    "cohere2_moe": _MIXED,
    "exaone_moe": _MIXED,
    "afmoe": _MIXED,
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW},
    # Of the part that is rotated; a multiple of 16 with the latent, which the native decoder wants.
    "deepseek_v3": {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16},
    "gemma4_text": {
        **_MIXED,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma2": {**_MIXED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **options: object) -> transformers.PreTrainedModel:
    arguments = {
        **_TEXT,
        **FAMILIES.get(family, {}),
        "vocab_size": VOCABULARY,
        **OWN_OPTIONS.get(family, {}),
        **options,
    }
    arguments.pop("dtype", None)
    auto = transformers.AutoModelForCausalLM
    if "text_config" in arguments:  # it also sees
        arguments = FAMILIES[family] | {"text_config": FAMILIES[family]["text_config"] | {"vocab_size": VOCABULARY}}
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(transformers.AutoConfig.for_model(family, **arguments), dtype=dtype)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model.eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, four merges, and special tokens: ids 0 to 255, 256 to 259, 260 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("o", "n")]
    pieces = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_engine(model=None, slots: int = 4, context: int = 128, chunk: int = 8, **options: object) -> SlotEngine:
    with torch.inference_mode():
        forward = SlotForward(model if model is not None else tiny_model("qwen3_moe"), slots, context)
    return engine_of(forward, chunk, **options)


def engine_of(forward, chunk: int = 8, **options: object) -> SlotEngine:
    text = ModelText(tiny_tokenizer())
    return SlotEngine("tiny", forward, text, fixed(chunk), vocabulary_size=VOCABULARY, **options)


@dataclass
class Answer:
    """Collects the events of a request."""

    events: list[Event] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.started.set()
        if event.finish is not None:
            self.done.set()

    def wait(self, seconds: float = 60) -> "Answer":
        assert self.done.wait(seconds), "no end came"
        return self

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def tokens(self) -> list[int]:
        """Of a request with logprobs."""
        return [entry.token for event in self.events for entry in event.logprobs]

    @property
    def last(self) -> Event:
        return self.events[-1]


def greedy(prompt, max_tokens: int | None = 8, **options: object) -> Request:
    """A request whose answer has the tokens too."""
    return Request(tuple(prompt), max_tokens, Sampling(temperature=0), logprobs=0, ignore_eos=True, **options)


def answer(engine: SlotEngine, request: Request) -> Answer:
    collected = Answer()
    engine.submit(request, collected)
    return collected.wait()


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
