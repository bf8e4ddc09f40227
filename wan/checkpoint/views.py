"""Tensors in files, as views of mapped memory: nothing is read before it is used."""

from __future__ import annotations

import mmap
import pickle
import warnings
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wan.checkpoint.files import TensorInfo, safetensors_places
from wan.settings.errors import InputError
from wan.settings.values import shown

FLOATS = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {
    **{name: dtype for dtype, name in FLOATS.items()},
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
}


def in_safetensors(file: Path, infos: Iterable[TensorInfo]) -> dict[str, Tensor]:
    """By their names there; not to be written to.

    The format's own library maps it writable, which Linux refuses for a file larger than memory.
    """
    places = safetensors_places(file)
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of what is not written
        for info in infos:
            dtype, start = places[info.name]
            of = {"dtype": _DTYPES[dtype], "count": prod(info.shape), "offset": start}
            found[info.name] = torch.frombuffer(memory, **of).view(info.shape)
    return found


def in_pth(path: Path) -> dict[str, Tensor]:
    """All tensors of a file that holds nothing else, which is never run as code."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} holds something other than weights and was not opened, because it could run "
            "code; download it again."
        ) from None
    except Exception as error:  # torch raises half a dozen kinds for damaged files
        reason = shown(error, str)
        raise InputError(f"{path} cannot be read ({reason}); download it again.") from None
    entries = state.items() if isinstance(state, dict) else [(type(state).__name__, None)]
    for name, value in entries:
        if not (isinstance(name, str) and _is_plain(value)):
            raise InputError(
                f"{path} holds something other than weights ({shown(name, str)}); download it "
                "again."
            )
    return dict(entries)


def _is_plain(value: Any) -> bool:
    """A dense tensor whose memory is all there."""
    dense = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return dense and value.untyped_storage().nbytes() >= value.nbytes
