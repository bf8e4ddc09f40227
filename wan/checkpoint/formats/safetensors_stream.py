"""Writing of safetensors files one tensor at a time, for results larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan.utils.log import make_progress_bar

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor."""

_SIZES = {torch.int8: ("I8", 1), torch.float32: ("F32", 4), torch.bfloat16: ("BF16", 2)}


def stream_safetensors(
    path: Path, specs: TensorSpecs, tensors: Iterable[tuple[str, Tensor]], label: str
) -> None:
    """Writes a safetensors file; the header comes first, so all tensors of `specs` must follow.

    The header is padded to a multiple of 64 bytes. Within a dtype, tensors whose size is a multiple
    of 64 bytes come first, so that large tensors are aligned and can be used memory-mapped. Wider
    dtypes come first, as in the format's writer.

    Args:
        tensors: Names and values, in any order.
        label: Label of the progress bar.
    """
    header: dict[str, Any] = {}
    end = 0

    def count_bytes(name: str) -> int:
        dtype, shape = specs[name]
        return torch.Size(shape).numel() * _SIZES[dtype][1]

    for name in sorted(
        specs, key=lambda name: (-_SIZES[specs[name][0]][1], count_bytes(name) % 64 > 0)
    ):
        dtype, shape = specs[name]
        start, end = end, end + count_bytes(name)
        header[name] = {"dtype": _SIZES[dtype][0], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with path.open("wb") as file, make_progress_bar(end, label, "B") as bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
            bar.update(tensor.nbytes)
