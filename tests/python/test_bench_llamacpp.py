"""llama.cpp as a peer: what its build leaves behind, and that its layer computes what ours does."""

import base64
import io
import sys
import tarfile
from dataclasses import asdict

import numpy as np
import pytest

from kt_kernel import _core
from kt_kernel.bench import batch, gguf_blocks, llamacpp_build, peers, shapes, wheel
from kt_kernel.bench.client import Client
from kt_kernel.bench.errors import BenchError
from kt_kernel.bench.progress import Progress
from kt_kernel.bench.run import Findings, Settings
from kt_kernel.cli.main import main

needs_build = pytest.mark.skipif(
    not llamacpp_build.is_built(),
    reason=f"llama.cpp is not built in {llamacpp_build.folder()}: kt bench peers --formats q4_k builds it",
)

RUNNABLE = [v.name for v in _core.variants() if v.runnable and v.name in llamacpp_build.MODULES]

# Stands for cmake: configures by writing nothing, builds by touching every library.
FAKE_CMAKE = """#!{python}
import pathlib, sys
if "--build" in sys.argv:
    print("[1/2] Building")
    folder = pathlib.Path(sys.argv[sys.argv.index("--build") + 1]) / "lib"
    folder.mkdir(parents=True)
    for name in {libraries!r}:
        (folder / name).write_text("made")
elif {broken}:
    print("CMake Error: no compiler at all")
    sys.exit(1)
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KT_KERNEL_HOME", str(tmp_path))
    folder = wheel.cache_folder()
    folder.mkdir(parents=True)
    return folder


def write_archive(folder, *names):
    with tarfile.open(folder / llamacpp_build.ARCHIVE, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))


def use_cmake(monkeypatch, tmp_path, libraries=llamacpp_build.LIBRARIES, broken=False):
    path = tmp_path / "cmake"
    path.write_text(FAKE_CMAKE.format(python=sys.executable, libraries=libraries, broken=broken))
    path.chmod(0o755)
    monkeypatch.setattr(llamacpp_build, "_tool", lambda name: str(path))


GGML = "llama_cpp_python-0.3.36/vendor/llama.cpp/ggml"


def test_a_build_is_kept_and_a_torn_one_is_made_again(monkeypatch, tmp_path, cache):
    use_cmake(monkeypatch, tmp_path)
    write_archive(cache, f"{GGML}/CMakeLists.txt", f"{GGML}/../../../../outside", f"{GGML}/src/ggml-cuda/x.cu")
    said = []
    folder = llamacpp_build.build(said.append)
    assert llamacpp_build.is_built()
    assert sorted(path.name for path in folder.iterdir()) == sorted(llamacpp_build.LIBRARIES)
    assert "building llama.cpp, once: 1/2" in said
    assert sorted(path.name for path in cache.iterdir()) == sorted([llamacpp_build.ARCHIVE, folder.name])
    (folder / llamacpp_build.LAYER).unlink()
    assert not llamacpp_build.is_built()
    assert llamacpp_build.build(said.append) == folder
    assert llamacpp_build.is_built()


def test_the_library_for_models_goes_beside_the_same_modules(monkeypatch, tmp_path, cache):
    use_cmake(monkeypatch, tmp_path, (*llamacpp_build.LIBRARIES, *llamacpp_build.MODEL_LIBRARIES))
    write_archive(cache, f"{GGML}/CMakeLists.txt", f"{GGML}/../src/llama.cpp", f"{GGML}/../tools/ui/page.html")
    folder = llamacpp_build.build_model(lambda text: None)
    assert llamacpp_build.is_model_built()
    assert llamacpp_build.is_built()
    made = {path.name for path in folder.iterdir()}
    modules = {name for name in llamacpp_build.LIBRARIES if name.startswith("libggml-cpu-")}
    assert made == {*llamacpp_build.MODEL_LIBRARIES, *modules}
    assert folder != llamacpp_build.folder()


@pytest.mark.parametrize(
    ("names", "broken", "message"),
    [
        ([f"{GGML}/CMakeLists.txt"], True, r"could not be built \(CMake Error: no compiler at all\).*compiler"),
        (["other/CMakeLists.txt"], False, "holds no llama.cpp: delete it"),
    ],
)
def test_a_build_that_fails_leaves_nothing(monkeypatch, tmp_path, cache, names, broken, message):
    use_cmake(monkeypatch, tmp_path, broken=broken)
    write_archive(cache, *names)
    with pytest.raises(BenchError, match=message):
        llamacpp_build.build(lambda text: None)
    assert [path.name for path in cache.iterdir()] == [llamacpp_build.ARCHIVE]
    assert not llamacpp_build.is_built()


def test_a_damaged_archive_is_named(monkeypatch, tmp_path, cache):
    use_cmake(monkeypatch, tmp_path)
    (cache / llamacpp_build.ARCHIVE).write_bytes(b"not an archive")
    with pytest.raises(BenchError, match=r"llama_cpp_python-0.3.36.tar.gz cannot be unpacked .*; delete it"):
        llamacpp_build.build(lambda text: None)


def test_without_network_the_message_tells_what_to_copy(monkeypatch, tmp_path, cache):
    use_cmake(monkeypatch, tmp_path)
    monkeypatch.setattr(llamacpp_build.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match=r"pip could not download.*put llama_cpp_python-0.3.36.tar.gz into .*or copy"):
        llamacpp_build.build(lambda text: None)
    assert list(cache.iterdir()) == []


def test_without_cmake_the_message_tells_how_to_get_it(monkeypatch, cache):
    monkeypatch.setattr(llamacpp_build.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(llamacpp_build.shutil, "which", lambda name: None)
    with pytest.raises(BenchError, match="pip install cmake"):
        llamacpp_build.build(lambda text: None)
    assert list(cache.iterdir()) == []


def test_the_folder_depends_on_our_layer(monkeypatch, tmp_path):
    before = llamacpp_build.folder().name
    (tmp_path / "layer.cc").write_text("another one")
    monkeypatch.setattr(llamacpp_build, "_PROJECT", tmp_path)
    assert llamacpp_build.folder().name != before


def test_every_native_variant_has_a_counterpart():
    assert set(llamacpp_build.MODULES) == {v.name for v in _core.variants() if not v.emulated}
    with pytest.raises(BenchError, match=r"no counterpart of variant 'emu'.*avx2"):
        llamacpp_build.module_of("emu")


def test_gguf_types_go_against_llama_cpp_alone(monkeypatch, capsys):
    def build(say):
        raise BenchError("built no llama.cpp")

    monkeypatch.setattr(llamacpp_build, "build", build)
    monkeypatch.setattr(wheel, "fetch", lambda: pytest.fail("fetched the released package"))
    with pytest.raises(SystemExit) as end:
        main(["bench", "peers", "--formats", "q4_k", "--shape", "4,2,256,256", "--tokens", "1"])
    assert end.value.code == 1
    assert capsys.readouterr().err.strip().endswith("kt bench: built no llama.cpp")


def reference(shape, name, inputs) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    kind = gguf.GGMLQuantizationType[name.upper()]
    x = batch.to_float(inputs.input).astype(np.float64)
    out = np.zeros_like(x)
    for expert in range(shape.experts):
        weights = (dequantize(rows, kind).astype(np.float64) for rows in batch.gguf_weights(shape, name, expert))
        gate, up, down = weights
        a = x @ gate.T
        product = (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T
        out += np.where(inputs.ids[0] == expert, inputs.weights, 0).sum(1, keepdims=True) * product
    return out


@needs_build
@pytest.mark.parametrize("variant", RUNNABLE)
def test_its_layer_computes_ours_in_every_layout(variant):
    shape = shapes.parse("6,3,512,256")
    folder, module = llamacpp_build.folder(), llamacpp_build.module_of(variant)
    with Client("llamacpp", str(folder), module) as side:
        for name in gguf_blocks.BLOCKS:
            # One thread: several wait awake, for long when others use the cores.
            side.call("open", shape=asdict(shape), weight_format=name, threads=1, max_tokens=32, copies=2)
            layouts = side.call("layouts")
            assert layouts[0] == "plain"
            assert "CPU_REPACK" in layouts or name not in {"q4_0", "q4_k", "iq4_nl"}
            for tokens in (1, 20):  # 20: beyond the 8 rows of an expert from which it takes other kernels
                wanted = reference(shape, name, batch.Batch(shape, tokens))
                for layout in layouts:
                    bits = base64.b64decode(side.call("output", tokens=tokens, layout=layout)["bf16"])
                    got = batch.to_float(np.frombuffer(bits, np.uint16)).reshape(wanted.shape)
                    assert peers.relative_error(got, wanted) < 0.03, (name, tokens, layout)


@needs_build
def test_its_times_and_errors():
    shape = shapes.parse("4,2,512,256")
    with Client("llamacpp", str(llamacpp_build.folder()), "haswell") as side:
        arguments = {"shape": asdict(shape), "weight_format": "q4_k", "threads": 1, "max_tokens": 2, "copies": 1}
        side.call("open", **arguments)
        size = side.call("open", **arguments | {"threads": 2})
        assert size["packed_bytes_per_expert"] == 3 * 512 * 256 * 144 // 256
        taken = side.call("time", tokens=2, seconds=0.01)
        assert taken["layout"] in side.call("layouts")
        assert min(taken["us"]) > 0
        with pytest.raises(BenchError, match="q4_k needs sizes in multiples of 256"):
            side.call("open", **arguments | {"shape": asdict(shapes.parse("4,2,320,256"))})


class Twin(Client):
    """Both sides are llama.cpp."""

    def __init__(self, side, *arguments, variant):
        super().__init__("llamacpp", str(llamacpp_build.folder()), llamacpp_build.module_of(variant))

    def call(self, call, **arguments):
        arguments.pop("seeded", None)
        return super().call(call, **arguments)


@needs_build
def test_a_match_against_itself(monkeypatch):
    monkeypatch.setattr(peers, "Client", Twin)
    shape, findings = shapes.parse("4,2,512,256"), Findings()
    settings = Settings(["avx2"], 1, 0.02, [shape], ["q4_k", "q8_0"], [1, 300])
    with Progress(4) as progress:
        peers.measure_peers(settings, findings, progress, None)
    assert findings.notes == []
    assert [(f["format"], f["tokens"]) for f in findings.figures] == [
        (name, tokens) for name in settings.formats for tokens in settings.tokens
    ]
    for figure in findings.figures:
        assert figure["peer"] == "llama.cpp"
        assert figure["peer_layout"] in {"plain", "CPU_REPACK"}
        assert figure["error_between"] < 0.001
        assert figure["gbps"] > 0
        assert figure["speedup"] > 0


@needs_build
def test_peers_on_a_gguf_type(capsys):
    arguments = ["--formats", "q4_k,q6_k", "--shape", "4,2,512,256", "--tokens", "1,20", "--seconds", "0.02"]
    with pytest.raises(SystemExit) as end:
        main(["bench", "peers", *arguments, "--variant", "avx2"])
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    assert said.count("llama.cpp") == 4
