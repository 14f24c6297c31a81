"""Which experts were on the GPU in each forward pass: --record-kt-gpu-expert-distribution.

SGLang's recorder of expert distributions says when: passes between its start and its stop, the first rank alone. Its
dump then also writes gpu_expert_distribution_{time}.pt into its folder, a dict with `gpu_expert_masks`: bool
[passes, layers, E], the oldest pass first. An expert is False where the CPU had to compute it when the pass began:
rows of layers that have no experts here, which are dense or another pipeline stage's, are all True.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from kt_kernel.integrations.sglang import engine
from kt_kernel.integrations.sglang.options import flag
from kt_kernel.integrations.sglang.plan import current_plan
from kt_kernel.weights.whole_file import WholeFile

KEY = "gpu_expert_masks"
MOST_BYTES = 1 << 30  # of a dump: 70,000 passes of 60 layers with 256 experts


class MaskRecord:
    """Masks of passes. They change after long prompts only, so that equal ones in a row are kept once, and counted."""

    def __init__(self, layers: int, experts: int, buffer_size: int):
        """`buffer_size`: passes, as SGLang's recorder has it; below 0 it means as many as there are."""
        self._shape = (layers, experts)
        self._most = max(1, MOST_BYTES // (layers * experts))
        self._bound = f"{MOST_BYTES / 1e9:.1f} GB of masks; dump more often to keep all"
        if 0 <= buffer_size <= self._most:
            self._most = max(1, buffer_size)
            self._bound = "--expert-distribution-recorder-buffer-size"
        self._runs: deque[tuple[torch.Tensor, int]] = deque()
        self.passes, self._is_full = 0, False

    def clear(self) -> None:
        self._runs.clear()
        self.passes, self._is_full = 0, False

    def append(self, masks: torch.Tensor) -> None:
        """A pass with these masks, bool [layers, E] on the CPU, which nobody changes from now on."""
        last, count = self._runs[-1] if self._runs else (None, 0)
        if last is not None and (last is masks or torch.equal(last, masks)):
            self._runs[-1] = (last, count + 1)
        else:
            self._runs.append((masks, 1))
        self.passes += 1
        if self.passes > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        masks, count = self._runs.popleft()
        if count > 1:
            self._runs.appendleft((masks, count - 1))
        self.passes -= 1
        if not self._is_full:
            self._is_full = True
            engine.log.warning(
                f"{flag('record_kt_gpu_expert_distribution')} keeps the last {self._most} passes ({self._bound})"
            )

    def masks(self) -> torch.Tensor:
        """Of all passes, bool [passes, layers, E]."""
        if not self._runs:
            return torch.zeros(0, *self._shape, dtype=torch.bool, device="cpu")
        kinds, counts = zip(*self._runs, strict=True)
        return torch.stack(kinds).repeat_interleave(torch.tensor(counts, device="cpu"), dim=0)

    def write(self, folder: Path) -> Path:
        """The file is there whole or not at all."""
        masks = self.masks()
        path = folder / f"gpu_expert_distribution_{time.time()}.pt"
        with (
            WholeFile(path, masks.numel(), "masks of experts", "gpu_expert_distribution_*.pt.tmp") as file,
            open(file.fd, "wb", closefd=False) as stream,
        ):
            torch.save({KEY: masks}, stream)
        return path


# Hooks of SGLang's recorder


def before_pass(recorder: Any, *_: Any, **__: Any) -> None:
    if recorder.recording and (record := _record()) is not None:
        record.append(current_plan().gpu_masks())


def after_start(_: None, recorder: Any) -> None:
    if (record := _record()) is not None:
        record.clear()


def after_dump(output: dict | None, recorder: Any, output_mode: str = "file") -> None:
    """What SGLang returns as an object instead of writing it gets the masks too."""
    if (record := _record()) is None:
        return
    if output_mode == "file":
        _write(record)
    elif output is not None:
        output[KEY] = record.masks()
    record.clear()


def _record() -> MaskRecord | None:
    plan = current_plan()
    return None if plan is None else plan.record


def _write(record: MaskRecord) -> None:
    """A disk that is full ends no server: SGLang's own file is written by now, and requests are under way."""
    if not record.passes:
        engine.log.warning("no pass was recorded: post to /start_expert_distribution_record before requests")
    try:
        path = record.write(engine.recorder_folder())
    except (OSError, RuntimeError) as error:  # the latter: torch, of a stream that it cannot write to
        engine.log.error(f"the experts on the GPU of {record.passes} passes are lost: {error}")
        return
    engine.log.info(f"{path} has the experts on the GPU of {record.passes} passes")
