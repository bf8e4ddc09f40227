"""The description of a tensor in a checkpoint file, and the dtypes of weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
PICKLE_SUFFIXES = (".pth", ".ckpt", ".pt", ".bin")
WEIGHT_FILES = (*SAFETENSORS_SUFFIXES, ".gguf", *PICKLE_SUFFIXES)  # suffixes of weight files
FLOATS = ("F32", "BF16", "F16", "F64")  # dtypes of weights that are not quantized
E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
FP8 = (E4M3, E5M2)
GET_READ_FORMAT = (
    f"get it in {', '.join((*FLOATS, *FP8))}, as a GGUF file, or in a format of "
    "docs/quantised_weights.md"
)
"""Remedy for weights in a format that is not read."""
GGUF = {
    "Q8_0": (32, 34),
    "Q6_K": (256, 210),
    "Q5_K": (256, 176),
    "Q5_1": (32, 24),
    "Q5_0": (32, 22),
    "Q4_K": (256, 144),
    "Q4_1": (32, 20),
    "Q4_0": (32, 18),
    "Q3_K": (256, 110),
    "Q2_K": (256, 84),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
"""Quantized GGUF type -> (values per block, bytes per block)."""
MAX_AXES = 8  # of a tensor; weights have at most 5. Files are damaged before their sizes multiply
NVFP4 = "NVFP4"  # ComfyUI's: two 4-bit values per byte, an FP8 scale per 16 values


def get_tensor_alignment(itemsize: int) -> int:
    """Returns the byte alignment at which a memory-mapped tensor can be used without a copy.

    64, PyTorch's own alignment, for elements of 4 and 8 bytes; the element size for smaller ones.
    """
    return 64 if itemsize > 2 else itemsize


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        name: The tensor's name in the file.
        dtype: In safetensors' spelling ("BF16"), a key of `GGUF`, or `NVFP4`.
        nbytes: Bytes in the file.
        scale: Scale of quantized values: one number, or one per row or block.
        scale_block: Rows and columns of the block that has one scale; None for another scale.
        block_scales: Scales of the blocks of NVFP4.
        full_precision: Matrix products must not run in the stored dtype.
        first_row: First row of this tensor in the file's tensor, of which it is a slice.
        data_offset: First byte in the file.
        strided: Shape and strides of the stored tensor, in elements, if it is not contiguous.
        chunks: Tensors in the file that are concatenated along dim 0; () for a single one.
        number: The value of a Python number, which is stored in a pickle; None for a tensor.
        state: The file's state when its header was read; None if unknown.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    scale: TensorInfo | None = None
    scale_block: tuple[int, int] | None = None
    block_scales: TensorInfo | None = None
    full_precision: bool = False
    first_row: int = 0
    data_offset: int = 0
    strided: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    chunks: tuple[TensorInfo, ...] = ()
    number: float | None = None
    state: FileState | None = field(default=None, compare=False)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scale of a matrix: [1], or [rows, 1], or a scale for each block."""
        count = 1 if self.scale is None else prod(self.scale.shape)
        if self.scale_block is None:
            return (1,) if count == 1 else (count, 1)
        num_row_blocks = -(-self.shape[0] // self.scale_block[0])
        return num_row_blocks, count // num_row_blocks


FileState = tuple[int, int]
"""A file's size in bytes and the time of its last modification in nanoseconds."""


def read_file_state(file: Path | int) -> FileState:
    """Returns the state of a path or a file descriptor."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def view_as_bytes(info: TensorInfo) -> TensorInfo:
    """Returns the tensor as stored: GGUF blocks as bytes [rows, bytes], others without a scale."""
    if info.dtype in GGUF:
        return replace(info, dtype="U8", shape=(info.shape[0], info.nbytes // info.shape[0]))
    return replace(info, scale=None, scale_block=None)
