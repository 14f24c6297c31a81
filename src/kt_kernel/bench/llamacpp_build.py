"""llama.cpp, built once from the source that llama-cpp-python carries: its CPU kernels for every CPU we know, under
``llamacpp_layer/``; and, for whole models, libllama on the same kernels, under ``llamacpp_model/``.

What is built finds itself wherever the folder lies: a copy of the cache folder serves machines that have neither
compiler nor network.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from kt_kernel import packages
from kt_kernel.bench.errors import BenchError
from kt_kernel.bench.wheel import cache_folder

SOURCE = "llama-cpp-python==0.3.36"
ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
NAME = "llama.cpp"

# Our instruction sets, and its module with the same features. Figures compare like with like.
MODULES = {
    "avx2": "haswell",
    "avx512_base": "skylakex",
    "avx512_vnni": "cascadelake",
    "avx512_vbmi": "icelake",
    "avx512_bf16": "zen4",
    "amx": "sapphirerapids",
}
LAYER = "libkt_llamacpp.so"
MODEL = "libkt_llamacpp_model.so"
_MODULE_FILES = tuple(f"libggml-cpu-{module}.so" for module in MODULES.values())
LIBRARIES = (LAYER, "libggml-base.so.0", *_MODULE_FILES)
MODEL_LIBRARIES = (MODEL, "libllama.so", "libggml-base.so.0")

_PROJECT = Path(__file__).parent / "llamacpp_layer"
_MODEL_PROJECT = Path(__file__).parent / "llamacpp_model"
_SOURCES = "/vendor/llama.cpp/"
_WANTED = re.compile(r"(ggml|src|include)/")
_OTHER_BACKENDS = re.compile(r"ggml/src/ggml-(?!cpu/)[\w-]+/")  # folders of 20 MB, not needed

Say = Callable[[str], None]


def folder() -> Path:
    """Where the libraries of this version, with our layer as it is now, are or will be."""
    return cache_folder() / f"{SOURCE.replace('==', '-')}-{_digest(_PROJECT)}"


def model_folder() -> Path:
    return cache_folder() / f"{SOURCE.replace('==', '-')}-model-{_digest(_PROJECT, _MODEL_PROJECT)}"


def _digest(*projects: Path) -> str:
    files = (path for project in projects for path in sorted(project.iterdir()) if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]


def is_built() -> bool:
    return _has(folder(), LIBRARIES)


def is_model_built() -> bool:
    return _has(model_folder(), (*MODEL_LIBRARIES, *_MODULE_FILES))


def _has(where: Path, names: tuple[str, ...]) -> bool:
    return all((where / name).is_file() for name in names)


def module_of(variant: str) -> str:
    if variant not in MODULES:
        raise BenchError(f"{NAME} has no counterpart of variant '{variant}'; it has those of: {', '.join(MODULES)}")
    return MODULES[variant]


def build(say: Say) -> Path:
    """The folder with the libraries; builds them the first time, which takes minutes of all cores."""
    if not is_built():
        targets = ("kt_llamacpp", *(f"ggml-cpu-{module}" for module in MODULES.values()))
        _build(_PROJECT, targets, LIBRARIES, folder(), {}, say)
    return folder()


def build_model(say: Say) -> Path:
    """The folder with libllama, and the modules of build() beside it."""
    if not is_model_built():
        modules = {name: build(say) / name for name in _MODULE_FILES}
        _build(_MODEL_PROJECT, ("kt_llamacpp_model",), MODEL_LIBRARIES, model_folder(), modules, say)
    return model_folder()


def _build(
    project: Path, targets: tuple[str, ...], libraries: tuple[str, ...], target: Path, copies: dict[str, Path], say: Say
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whatever ends this early takes the temporary folder with it; the rename at the end is all or nothing.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        cmake = _tool("cmake")
        _unpack(_archive(Path(work), say), Path(work) / "source", say)
        _compile(cmake, project, targets, Path(work), say)
        made = Path(work) / "made"
        made.mkdir()
        for name in libraries:
            shutil.copyfile(Path(work) / "build" / "lib" / name, made / name)
        for name, path in copies.items():
            shutil.copyfile(path, made / name)
        if not _has(target, (*libraries, *copies)):  # somebody else may have built it meanwhile
            shutil.rmtree(target, ignore_errors=True)  # files were deleted from it
            made.rename(target)


def _archive(work: Path, say: Say) -> Path:
    """The source package: one that lies in the cache folder, or a download."""
    kept = cache_folder() / ARCHIVE
    if kept.is_file():
        return kept
    say(f"fetching {SOURCE}")
    try:
        return packages.download(SOURCE, work, "*.tar.gz")
    except packages.DownloadError as error:
        raise BenchError(
            f"{error}; put {ARCHIVE} into {cache_folder()}, "
            f"or copy {folder().name} there from a machine that has built it"
        ) from None


def _unpack(archive: Path, target: Path, say: Say) -> None:
    say(f"unpacking {archive.name}")
    try:
        with tarfile.open(archive, "r:gz") as package:
            for member in package:
                _, found, name = member.name.partition(_SOURCES)
                if not found or not member.isfile() or ".." in name.split("/"):
                    continue
                if not _WANTED.match(name) or _OTHER_BACKENDS.match(name):
                    continue
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with package.extractfile(member) as source, path.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise BenchError(f"{archive} cannot be unpacked ({error}); delete it and try again") from None
    if not (target / "ggml" / "CMakeLists.txt").is_file():
        raise BenchError(f"{archive} holds no llama.cpp: delete it and try again")


def _compile(cmake: str, project: Path, targets: tuple[str, ...], work: Path, say: Say) -> None:
    configure = [cmake, "-S", str(project), "-B", str(work / "build"), "-DCMAKE_BUILD_TYPE=Release"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    configure += _compilers()
    say(f"configuring {NAME}")
    sources = [f"-DLLAMA_SOURCE={work / 'source'}", f"-DGGML_SOURCE={work / 'source' / 'ggml'}"]
    _follow([*configure, *sources], lambda line: None)
    command = [cmake, "--build", str(work / "build"), "--parallel", str(len(os.sched_getaffinity(0)))]

    def show(line: str) -> None:
        step = re.match(r"\[\s*(\d+/\d+|\d+%)\]", line)
        if step:
            say(f"building {NAME}, once: {step.group(1)}")

    _follow([*command, "--target", *targets], show)


def _follow(command: list[str], show: Callable[[str], None]) -> None:
    """Runs a command and shows its lines; one that fails gives its first error."""
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout:
                lines.append(line.strip())
                show(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        errors = [line for line in lines if re.search(r"error\b|not found|No such", line, re.IGNORECASE)]
        reason = (errors or lines or ["no output"])[0]
        raise BenchError(
            f"{NAME} could not be built ({reason}); it needs a C++17 compiler (CC, CXX choose one), "
            f"or a copy of {folder().name} from another machine in {cache_folder()}"
        )


def _compilers() -> list[str]:
    """The newest clang, unless CC or CXX say otherwise: its AVX2 prefill of K-quants is 12 % faster than gcc 12's."""
    if os.environ.get("CC") or os.environ.get("CXX"):
        return []
    for version in ("", *(f"-{n}" for n in range(30, 14, -1))):
        if shutil.which(f"clang{version}") and shutil.which(f"clang++{version}"):
            return [f"-DCMAKE_C_COMPILER=clang{version}", f"-DCMAKE_CXX_COMPILER=clang++{version}"]
    return []


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise BenchError(f"{NAME} is built with {name}, which is not here: pip install {name}")
    return found
