"""Quantised matrices of checkpoints: as a layer keeps them, or decoded to bf16, exactly or rounded once.

An encoding is a row of ENCODINGS. The tensors that are there, their dtypes and, where these do not decide, their shapes
tell which one a matrix has.
"""

from kt_kernel.weights.encodings.awq import AWQ
from kt_kernel.weights.encodings.fp8_block import FP8_BLOCK, FP8_BLOCK_SCALE
from kt_kernel.weights.encodings.fp8_channel import FP8_CHANNEL
from kt_kernel.weights.encodings.gptq import GPTQ, GPTQ_V2, VERSION_2
from kt_kernel.weights.encodings.mxfp4 import MXFP4
from kt_kernel.weights.encodings.mxfp8 import MXFP8
from kt_kernel.weights.encodings.native import Target, name_tensor
from kt_kernel.weights.encodings.nvfp4 import NVFP4
from kt_kernel.weights.encodings.rawint4 import RAWINT4
from kt_kernel.weights.encodings.stored import FLOATS, Encoding, Parts, Stored
from kt_kernel.weights.tensor_files import Entry, TensorFiles

ENCODINGS = (NVFP4, MXFP4, MXFP8, FP8_BLOCK, FP8_BLOCK_SCALE, FP8_CHANNEL, RAWINT4, AWQ, GPTQ)

# Suffixes of tensors that hold codes, and of all tensors that some encoding looks at.
CODES = tuple(dict.fromkeys(["weight", *(encoding.codes for encoding in ENCODINGS)]))
SUFFIXES = tuple(dict.fromkeys(name for row in ENCODINGS for name in (*row.needed, *row.optional, *row.refused)))

__all__ = [
    "CODES",
    "ENCODINGS",
    "FLOATS",
    "SUFFIXES",
    "Encoding",
    "Parts",
    "Stored",
    "Target",
    "find",
    "name_tensor",
    "open_parts",
]


def find(files: TensorFiles, stem: str, said: str | None = None) -> Encoding | None:
    """How the matrix `stem` is encoded; None if it is plain, or not there. `said`: checkpoint_format of config.json."""
    entries = {name: files.entry(f"{stem}.{name}") for name in SUFFIXES if f"{stem}.{name}" in files}
    codes = next((name for name in CODES if name in entries), None)
    if codes is None or (codes == "weight" and _plain(entries)):
        return None
    for encoding in ENCODINGS:
        if _has(encoding, entries):
            for name in encoding.refused:
                if name in entries:
                    raise ValueError(
                        f"{files.file_of(f'{stem}.{name}')}: tensor {f'{stem}.{name}'!r} is there; needed is "
                        f"{encoding.name} without it, which is all that is decoded"
                    )
            return GPTQ_V2 if encoding is GPTQ and said == VERSION_2 else encoding
    raise _unknown(files, stem, codes, entries)


def open_parts(files: TensorFiles, stem: str, encoding: Encoding) -> Parts:
    """Views of the tensors of one matrix."""
    parts = {}
    for suffix, dtypes in (encoding.needed | encoding.optional).items():
        name = f"{stem}.{suffix}"
        if suffix in encoding.needed or name in files:
            entry = files.entry(name)
            array = files.array(name, dtypes, entry.shape)
            parts[suffix] = Stored(f"{files.file_of(name)}: tensor {name!r}", entry.dtype, array)
    return parts


def _plain(entries: dict[str, Entry]) -> bool:
    """Floats, or something without scales that is no float of 8 bits, and that a reader of floats will refuse."""
    dtype = entries["weight"].dtype
    return dtype in FLOATS or (len(entries) == 1 and not dtype.startswith("F8_"))


def _has(encoding: Encoding, entries: dict[str, Entry]) -> bool:
    there = all(name in entries and entries[name].dtype in dtypes for name, dtypes in encoding.needed.items())
    return there and encoding.fits({name: entry.shape for name, entry in entries.items()})


def _unknown(files: TensorFiles, stem: str, codes: str, entries: dict[str, Entry]) -> ValueError:
    found = ", ".join(f"{name} {entry.dtype} {list(entry.shape)}" for name, entry in entries.items())
    rows = [row for row in ENCODINGS if row.codes == codes]
    rows = [row for row in rows if entries[codes].dtype in row.needed[codes]] or rows
    known = "; ".join(
        f"{row.name}: " + ", ".join(f"{name} {'/'.join(dtypes)}" for name, dtypes in row.needed.items()) for row in rows
    )
    name = f"{stem}.{codes}"
    e5m2 = "; e5m2 is not supported" if entries[codes].dtype.startswith("F8_E5M2") else ""
    return ValueError(
        f"{files.file_of(name)}: tensor {name!r} is in no known encoding: found are {found}{e5m2}; needed is one of "
        f"{known}, in shapes that fit each other"
    )
