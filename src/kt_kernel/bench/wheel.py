"""The released package, downloaded and unpacked once."""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from kt_kernel import folders, packages
from kt_kernel.bench.errors import BenchError

RELEASED = "kt-kernel==0.7.2"


def cache_folder() -> Path:
    return folders.cache_folder() / "peers"


def fetch() -> Path:
    """The folder of the unpacked wheel for this Python; downloads it the first time."""
    tag = f"{RELEASED.replace('==', '-')}-cp{sys.version_info.major}{sys.version_info.minor}"
    target = cache_folder() / tag
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        try:
            wheel = packages.download(RELEASED, Path(work))
        except packages.DownloadError as error:
            raise BenchError(f"{error}; unpack its wheel by hand and pass the folder with --peer-path") from None
        unpacked = Path(work) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            # Only the native modules and their libraries; the rest of the wheel is 200 MB of GPU code.
            wanted = [
                name for name in archive.namelist() if name.startswith(("kt_kernel/_kt_kernel_ext", "kt_kernel.libs/"))
            ]
            archive.extractall(unpacked, wanted)
        shutil.move(unpacked, target)
    return target


def native_module(folder: Path, variant: str) -> Path:
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    found = sorted(folder.glob(f"kt_kernel/_kt_kernel_ext_{variant}.{tag}-*.so"))
    if not found:
        present = sorted({p.name.split(".")[0].removeprefix("_kt_kernel_ext_") for p in folder.glob("kt_kernel/*.so")})
        raise BenchError(
            f"{folder} holds no module for variant '{variant}' and this Python ({tag}); "
            f"it holds: {', '.join(present) or 'none'}"
        )
    return found[0]
