"""KTLinear against nn.Linear, and the replacement of all linears of a model."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: its linears were not tested")

from torch import nn  # noqa: E402

from kt_kernel import runtime  # noqa: E402
from kt_kernel.hf.linear import FORMATS, KTLinear, preferred_format, replace_linears  # noqa: E402

# mean |out - reference| / mean |reference| of normal weights
LIMITS = {"bf16": 0.004, "int8": 0.03, "int4": 0.25, "int4g": 0.17}


@pytest.fixture(scope="module")
def pool():
    return runtime.runtime_for(runtime.plan_pool(2, 1, None))


def linear(rows=50, columns=96, bias=True, dtype=torch.float32, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias, dtype=dtype)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.float() - reference.float()).abs().mean() / reference.float().abs().mean())


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_those_of_nn_linear(pool, weight_format, dtype):
    module = linear(dtype=dtype)
    packed = KTLinear.pack(module, weight_format, pool)
    x = torch.randn(2, 3, 96, dtype=dtype)
    with torch.no_grad():
        out, reference = packed(x), module(x)
    assert out.dtype == dtype
    assert out.shape == (2, 3, 50)
    assert error(out, reference) < LIMITS[weight_format]


@pytest.mark.parametrize("shape", [(96,), (0, 96), (2, 0, 96), (1, 1, 96)])
def test_leading_dimensions_stay(pool, shape):
    packed = KTLinear.pack(linear(), "bf16", pool)
    assert packed(torch.zeros(shape)).shape == (*shape[:-1], 50)


def test_strided_inputs(pool):
    packed = KTLinear.pack(linear(bias=False), "bf16", pool)
    x = torch.randn(8, 200, dtype=torch.bfloat16)
    for view in (x[:, 30:126], x[::2, :96], x[:, :192:2], x[:1].expand(8, 200)[:, :96], x[:, :96].flip(1)):
        assert torch.equal(packed(view), packed(view.contiguous()))


def test_what_cannot_be_is_refused(pool):
    packed = KTLinear.pack(linear(), "bf16", pool)
    with pytest.raises(ValueError, match="takes 96"):
        packed(torch.zeros(1, 95))
    with pytest.raises(RuntimeError, match="no gradients"):
        packed(torch.zeros(1, 96, requires_grad=True))
    with pytest.raises(ValueError, match="int8"):
        KTLinear.pack(linear(), "int7", pool)


def test_emulated_kernels_are_not_preferred_to_torch():
    assert preferred_format("emu_amx") is None
    assert preferred_format("avx2") == preferred_format("amx") == "bf16"


class Router(nn.Linear):
    pass


class Tiny(nn.Module):
    """An embedding tied to its head, a router of its own class, a linear in two places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(60, 32)
        self.shared = nn.Linear(32, 32)
        self.again = self.shared
        self.router = Router(32, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32)) for _ in range(2)])
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.again(self.shared(self.embed(tokens)))
        x = x * self.router(x).sum(-1, keepdim=True)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_a_model_keeps_its_outputs_and_its_embedding(pool):
    model, tokens = Tiny(), torch.arange(10)
    with torch.no_grad():
        reference = model(tokens)
        freed = [weakref.ref(block[0].weight) for block in model.blocks]
        assert replace_linears(model, "bf16", pool) == 6
        gc.collect()
        assert [ref() for ref in freed] == [None, None]
        assert error(model(tokens), reference) < 0.02
    assert {name for name, _ in model.named_parameters()} == {"embed.weight", "router.weight", "router.bias"}
    assert model.shared is model.again
    assert replace_linears(model, "bf16", pool) == 0


def test_names_may_be_left_alone(pool):
    model = Tiny()
    assert replace_linears(model, "int8", pool, skip={"head", "blocks.0.1"}) == 4
    assert type(model.head) is nn.Linear
    assert type(model.blocks[0][1]) is nn.Linear


def test_a_model_without_weights_is_refused(pool):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="0 has no weights yet"):
        replace_linears(model, "bf16", pool)
