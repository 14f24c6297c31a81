"""Installs a wheel into an empty environment and uses it there: python tools/try_wheel.py dist/*.whl

Fails on a wheel of 10 MB or more, on one that brings torch or CUDA along, and on results that are wrong.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_LARGEST = 10e6
_FOREIGN = ("torch", "cuda", "cudart", "cublas", "numpy")

# What the README shows, and one layer against torch.
_USE = """
import sys
import kt_kernel
loaded = {"torch", "transformers", "sglang", "gguf", "typer"} & set(sys.modules)
assert not loaded, f"import kt_kernel loads {loaded}"
print("kt-kernel", kt_kernel.__version__, "with", kt_kernel.__cpu_variant__, "kernels")
import torch
from kt_kernel import KTMoEWrapper
torch.manual_seed(0)
E, K, H, I = 8, 2, 256, 128
gate, up, down = (torch.randn(E, *shape).bfloat16() / 16 for shape in ((I, H), (I, H), (H, I)))
x, ids = torch.randn(4, H).bfloat16(), torch.stack([torch.randperm(E)[:K] for _ in range(4)])
weights = torch.rand(4, K)
expected = torch.zeros(4, H)
for token in range(4):
    for k in range(K):
        e, row = ids[token, k], x[token].float()
        hidden = torch.nn.functional.silu(gate[e].float() @ row) * (up[e].float() @ row)
        expected[token] += weights[token, k] * (down[e].float() @ hidden)
for method, limit in ("BF16", 0.01), ("AMXINT8", 0.03), ("AMXINT4", 0.3):
    layer = KTMoEWrapper(layer_idx=0, num_experts=E, num_experts_per_tok=K, hidden_size=H, moe_intermediate_size=I,
                         num_gpu_experts=0, cpuinfer_threads=2, threadpool_count=1, method=method)
    layer.load_weights_from_tensors(gate, up, down)
    layer.submit_forward(x, ids, weights)
    error = ((layer.sync_forward(x).float() - expected).norm() / expected.norm()).item()
    print(f"  {method}: error {error:.4f}")
    assert 0 < error < limit, (method, error)
"""


def check_contents(wheel: Path) -> None:
    size = wheel.stat().st_size
    if size >= _LARGEST:
        sys.exit(f"{wheel.name} has {size / 1e6:.1f} MB; the limit is {_LARGEST / 1e6:.0f}")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in Path(name).name]
    foreign = [name for name in libraries if any(word in Path(name).name for word in _FOREIGN)]
    if foreign:
        sys.exit(f"{wheel.name} holds libraries of others: {', '.join(foreign)}")


def main() -> None:
    (wheel,) = map(Path, sys.argv[1:])
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"

        def run(*command: str | Path) -> None:
            subprocess.run(command, check=True, cwd=folder)

        constraints = f"--constraint={_ROOT / 'constraints.txt'}"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", constraints, wheel.resolve())
        run(python, "-c", _USE)
        run(Path(folder) / "bin" / "kt", "--version")
    print(f"{wheel.name} works in an empty environment")


if __name__ == "__main__":
    main()
