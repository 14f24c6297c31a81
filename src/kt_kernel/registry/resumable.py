"""Large files of the hub over plain HTTP, each of which goes on where it stopped.

huggingface_hub 2 begins a file anew if a download ended within it, and files have up to 50 GB. What is there of one is
kept in .cache/huggingface/download/FILE.CHECKSUM.part; when it is whole it gets the note that huggingface_hub would
write, FILE.metadata, which keeps it from fetching the file again. Files that it gets by xet are left to it.
"""

import glob
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

METADATA = Path(".cache") / "huggingface" / "download"  # where huggingface_hub notes what it put into a folder
LARGE_BYTES = 16_000_000
_MOST_BYTES = 50_000_000_000  # of a file that the hub gives out over plain HTTP
_CONNECTIONS = 4


class _StoppedError(Exception):
    """Somebody, or another file, ended the download."""


def fetch_large(
    repo: str, commit: str, files: list[str], folder: Path, endpoint: str | None, progress: Callable[[int], None]
) -> None:
    """Fetches those of the files that plain HTTP gives. `progress` gets counts of bytes, from several threads."""
    stop = Event()
    with ThreadPoolExecutor(_CONNECTIONS) as connections:
        tasks = [connections.submit(_fetch, repo, commit, name, folder, endpoint, progress, stop) for name in files]
        try:
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
    for task in done:
        task.result()


def _fetch(
    repo: str, commit: str, name: str, folder: Path, endpoint: str | None, progress: Callable[[int], None], stop: Event
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
    headers = build_hf_headers(library_name="kt-kernel")
    found = get_hf_file_metadata(url, headers=headers, endpoint=endpoint)
    if _by_xet(found) or not found.etag or not found.size or found.size > _MOST_BYTES:
        return
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
    part = folder / METADATA / f"{name}.{found.etag}.part"
    part.parent.mkdir(parents=True, exist_ok=True)

    def bar(**_: object) -> _Bar:
        return _Bar(progress, stop)

    with open(part, "ab") as file:
        there = file.tell()
        if there > found.size:
            file.truncate(0)
            there = 0
        progress(there)
        http_get(found.location, file, resume_size=there, headers=headers, expected_size=found.size, tqdm_class=bar)
    _finish(part, folder, name, commit, found.etag)


def _by_xet(found: object) -> bool:
    if getattr(found, "xet_file_data", None) is None:
        return False
    from huggingface_hub.utils._runtime import is_xet_available

    return is_xet_available()


def _finish(part: Path, folder: Path, name: str, commit: str, etag: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, path)
    (folder / METADATA / f"{name}.metadata").write_text(f"{commit}\n{etag}\n{time.time()}\n")
    for other in part.parent.glob(f"{glob.escape(part.name.removesuffix(f'{etag}.part'))}*.part"):
        other.unlink(missing_ok=True)  # of another version of the file


class _Bar:
    """What http_get takes for a bar of tqdm."""

    def __init__(self, progress: Callable[[int], None], stop: Event):
        self._progress, self._stop = progress, stop

    def update(self, count: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self._progress(count)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass
