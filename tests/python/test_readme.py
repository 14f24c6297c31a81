"""Python blocks of pages run as they are written: with --readmes those of other files; test_docs_blocks.py has ours.

Blocks of a file share a namespace, in their order. What such text leaves open is filled in: tensors of the sizes that
the constructor in the file names, and "/path/to/weights".
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACEHOLDER = "/path/to/weights"
TOKENS = 4


def blocks_of(text: str) -> list[str]:
    """A page may have been damaged on its way here: lines of a single "|" are none, and indentation may be lost."""
    lines = [line for line in text.splitlines() if line.strip() != "|"]
    return re.findall(r"^```python\n(.*?)^```", "\n".join(lines) + "\n", re.MULTILINE | re.DOTALL)


def run_blocks(path: Path, names: dict, weights: Path | None = None, places: dict[str, Path] | None = None) -> dict:
    """`places`: other paths that the page only stands for."""
    for number, code in enumerate(blocks_of(path.read_text())):
        for placeholder, real in {PLACEHOLDER: weights, **(places or {})}.items():
            code = code.replace(placeholder, str(real))
        exec(compile(code, f"{path.name}, block {number}", "exec"), names)
    return names


def test_blocks_are_found():
    text = "```python\n|\n a = 1\n|\n```\n```bash\nno\n```\n```python\nb\n\nc\n```\n"
    assert blocks_of(text) == [" a = 1\n", "b\n\nc\n"]


def test_a_block_that_fails_is_a_failure(tmp_path):
    (tmp_path / "page").write_text("```python\nraise KeyError('it')\n```\n")
    with pytest.raises(KeyError, match="it"):
        run_blocks(tmp_path / "page", {})


def sizes_in(text: str) -> dict[str, int]:
    arguments = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    return {name: int(found[1]) for name in arguments if (found := re.search(rf"\b{name}=(\d+)", text))}


def tiled(torch, rows: int, columns: int):
    """Random values, repeated: what they are does not matter, and this is quick."""
    tile = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / columns**0.5
    return tile.repeat(-(-rows // 64), -(-columns // 64))[:rows, :columns].bfloat16()


def names_for(torch, sizes: dict[str, int]) -> dict[str, object]:
    experts, top_k, hidden, intermediate = sizes.values()
    gate = tiled(torch, intermediate, hidden).expand(experts, -1, -1)  # all experts are one in memory
    return {
        "physical_to_logical_map": torch.arange(experts),
        "gate_proj": gate,
        "up_proj": gate,
        "down_proj": tiled(torch, hidden, intermediate).expand(experts, -1, -1),
        "hidden_states": tiled(torch, TOKENS, hidden),
        "topk_ids": torch.arange(TOKENS * top_k).reshape(TOKENS, top_k) % experts,
        "topk_weights": torch.full((TOKENS, top_k), 1 / top_k),
        "cuda_stream": None,
    }


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """sizes -> a folder with converted weights of layer 0, made once."""
    folders: dict[tuple, Path] = {}
    yield lambda sizes, names: _convert(folders, tmp_path_factory, sizes, names)
    for folder in folders.values():
        for file in folder.iterdir():
            file.unlink()


def _convert(folders: dict, tmp_path_factory, sizes: dict[str, int], names: dict) -> Path:
    from kt_kernel import KTMoEWrapper

    key = tuple(sizes.values())
    if key not in folders:
        folder = tmp_path_factory.mktemp("converted")
        wrapper = KTMoEWrapper(layer_idx=0, **sizes, weight_path=folder, cpu_save=True, method="AMXINT4")
        wrapper.load_weights_from_tensors(names["gate_proj"], names["up_proj"], names["down_proj"])
        folders[key] = folder
    return folders[key]


def test_those_of_others(readme, converted):
    text = readme.read_text()
    if not blocks_of(text):
        pytest.skip(f"{readme.name} has no Python blocks")
    torch = pytest.importorskip("torch")
    sizes, names, weights = sizes_in("\n".join(blocks_of(text))), {}, None
    if sizes:
        names = names_for(torch, sizes)
        weights = converted(sizes, names)
    run_blocks(readme, names, weights)
    assert "kt_kernel" in names or "KTMoEWrapper" in names
    if "output" in names:
        output = names["output"]
        assert output.shape == (TOKENS, sizes["hidden_size"])
        assert output.isfinite().all()
        assert (output != 0).any()
