"""Downloads a model of the hub by huggingface_hub: files that are there and unchanged are not fetched again, and
large ones go on where they stopped.

Until all is there the folder may be used for nothing else; it is locked while a download runs.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from kt_kernel import env, settings
from kt_kernel.errors import UserError
from kt_kernel.registry.resumable import LARGE_BYTES, METADATA, fetch_large

_SPARE = 1 << 30  # bytes that a disk keeps free
# Weights of other programs, which stand beside the safetensors of some models.
_OTHERS = (
    "*.pth",
    "*.pt",
    "*.msgpack",
    "*.h5",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "original/*",
    "metal/*",
    "consolidated*",
)
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


class DownloadError(UserError):
    """Nothing, or not all, was downloaded; the message says why and what to do."""


@dataclass(frozen=True)
class HubFile:
    name: str
    bytes: int


@dataclass(frozen=True)
class Download:
    repo: str
    commit: str
    folder: Path
    files: tuple[HubFile, ...]
    endpoint: str | None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def missing(self) -> list[HubFile]:
        """Those that are not there in the size of the hub's."""
        return [file for file in self.files if _size(self.folder / file.name) != file.bytes]

    @property
    def missing_bytes(self) -> int:
        return sum(file.bytes for file in self.missing)


def prepare(
    repo: str, folder: Path, revision: str | None = None, include: list[str] | None = None,
    exclude: list[str] | None = None,
) -> Download:  # fmt: skip
    """Asks the hub what there is, and the disk whether it fits. Downloads nothing."""
    hub = _import_hub()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / METADATA).is_dir():
        raise DownloadError(
            "{folder} holds files that no download left there: choose another folder with --dir", folder=folder
        )
    endpoint = None if env.hub_endpoint() else settings.get("download.mirror") or None
    with _explained(repo, revision, endpoint):
        api = hub.HfApi(endpoint=endpoint, library_name="kt-kernel")
        commit = api.model_info(repo, revision=revision).sha
        tree = api.list_repo_tree(repo, recursive=True, revision=commit)
        files = [HubFile(entry.path, entry.size) for entry in tree if isinstance(entry, hub.hf_api.RepoFile)]
    for file in files:
        if Path(file.name).is_absolute() or ".." in Path(file.name).parts:
            raise DownloadError("{repo} has a file '{file}', outside of its folder", repo=repo, file=file.name)
    wanted = _choose(repo, files, include or [], exclude or [])
    download = Download(repo, commit, folder, tuple(wanted), endpoint)
    _check_space(download)
    return download


def fetch(
    download: Download, bars: bool, meter: Callable[[int], AbstractContextManager[Callable[[int], None]]]
) -> None:
    """Fetches what is missing, and looks at the sizes of everything.

    `meter(total)` gives what counts the bytes of large files; `bars`: huggingface_hub may show its own for the others.
    """
    hub = _import_hub()
    (hub.utils.enable_progress_bars if bars else hub.utils.disable_progress_bars)()
    with _locked(download.folder), _explained(download.repo, download.commit, download.endpoint):
        missing = download.missing
        for file in missing:
            (download.folder / file.name).unlink(missing_ok=True)  # else notes of an earlier download vouch for it
        large = {file.name: file.bytes for file in missing if file.bytes >= LARGE_BYTES}
        with meter(sum(large.values())) as progress:
            fetch_large(download.repo, download.commit, list(large), download.folder, download.endpoint, progress)
        hub.snapshot_download(
            download.repo,
            revision=download.commit,
            local_dir=download.folder,
            allow_patterns=[_literal(file.name) for file in download.files],
            endpoint=download.endpoint,
            library_name="kt-kernel",
        )
    for file in download.files:
        if (size := _size(download.folder / file.name)) != file.bytes:
            raise DownloadError(
                "{file} has {size} bytes, not {expected}: remove it, and download again",
                file=download.folder / file.name,
                size=size or 0,
                expected=file.bytes,
            )


def _choose(repo: str, files: list[HubFile], include: list[str], exclude: list[str]) -> list[HubFile]:
    names = [file.name for file in files]
    if not include and any(name.endswith(".safetensors") for name in names):
        exclude = [*exclude, *_OTHERS, "*.bin", "*.gguf"]
    ggufs = sorted({_PART.sub("", name) for name in names if name.lower().endswith(".gguf")})
    if not include and "*.gguf" not in exclude and len(ggufs) > 1:
        shown = ", ".join(ggufs[:8]) + (f" and {len(ggufs) - 8} more" if len(ggufs) > 8 else "")
        raise DownloadError(
            "{repo} has several GGUF models ({names}): choose with --include, as in --include '*Q4_K_M*'",
            repo=repo,
            names=shown,
        )
    # A choice of weights does not mean to go without what is small.
    small = ("*.json", "*.jinja", "*.txt", "*.model", "*.py") if include else ()
    chosen = [
        file
        for file in files
        if (not include or _matches(file.name, [*include, *small])) and not _matches(file.name, exclude)
    ]
    if not any(file.name.endswith((".safetensors", ".gguf")) for file in chosen):
        raise DownloadError("{repo} has no *.safetensors or *.gguf, or --include and --exclude leave none", repo=repo)
    return chosen


def _matches(name: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _literal(name: str) -> str:
    """As a pattern that only this name matches."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _check_space(download: Download) -> None:
    place = download.folder
    while not place.exists():
        place = place.parent
    free, needed = shutil.disk_usage(place).free, download.missing_bytes
    if needed and needed + _SPARE > free:
        raise DownloadError(
            "{repo} needs {needed} GB more in {folder}, and its disk has {free} GB free: free some, or choose another "
            "folder with --dir",
            repo=download.repo,
            needed=f"{needed / 1e9:.1f}",
            folder=download.folder,
            free=f"{free / 1e9:.1f}",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """For one download at a time; what a killed one left half-written is removed."""
    try:
        (folder / METADATA).mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / METADATA, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DownloadError(
            "cannot write to {folder}: {reason}; choose another with --dir", folder=folder, reason=error.strerror
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for leftover in (folder / METADATA).rglob("*.incomplete"):
            leftover.unlink(missing_ok=True)
        yield
    except BlockingIOError:
        raise DownloadError("another process downloads into {folder}: wait for it", folder=folder) from None
    finally:
        os.close(lock)


def _import_hub():
    try:
        import huggingface_hub
        import huggingface_hub.hf_api
        import huggingface_hub.utils
    except ImportError:
        raise DownloadError("downloads need huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub


@contextmanager
def _explained(repo: str, revision: str | None, endpoint: str | None) -> Iterator[None]:
    """Errors of the hub as ours, in one line each."""
    import huggingface_hub
    from huggingface_hub import errors

    address = endpoint or huggingface_hub.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        raise DownloadError(
            "{repo} asks for its licence to be accepted: do so on {address}/{repo}, then 'hf auth login'",
            repo=repo,
            address=address,
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadError(
            "{repo} has no revision '{revision}' on {address}", repo=repo, revision=revision, address=address
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            "{address} has no model '{repo}', or it is private: check the name, or 'hf auth login'",
            address=address,
            repo=repo,
        ) from None
    except errors.HFValidationError as error:
        raise DownloadError(
            "'{repo}' is no id of a model, as in org/name ({reason})", repo=repo, reason=error
        ) from None
    except UserError:
        raise
    except ValueError as error:  # as for a file over 50 GB without hf_xet
        reason = " ".join(str(error).split())
        raise DownloadError("huggingface_hub cannot download {repo}: {reason}", repo=repo, reason=reason) from None
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError):
            raise DownloadError(
                "cannot write {path}: {reason}", path=error.filename or repo, reason=error.strerror
            ) from None
        raise _unreachable(repo, address, error) from None
    except Exception as error:
        # Of the HTTP library, which is another one with each version of huggingface_hub.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3", "huggingface_hub")):
            raise
        raise _unreachable(repo, address, error) from None


def _unreachable(repo: str, address: str, error: Exception) -> DownloadError:
    return DownloadError(
        "could not get {repo} from {address} ({reason}): check the network and run the same command again, which goes "
        "on with what is missing; 'kt config set download.mirror https://hf-mirror.com' takes a mirror",
        repo=repo,
        address=address,
        reason=(str(error).strip().splitlines() or [type(error).__name__])[0],
    )
