"""Weights from disk into models: memory-mapped, converted while copied, strictly by name.

A network is built on the meta device (no memory), its tensors are compared with the files' headers,
and only then is each one copied from its mapped file into its final dtype and device. Beside the
model no more than one tensor is ever in anonymous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from wan.log import progress
from wan.modules.model import WanModel, keeps_fp32
from wan.settings.checkpoint import DitFiles
from wan.settings.errors import InputError
from wan.settings.files import TensorInfo, folder_tensors, safetensors_header

DTypeOf = Callable[[str, torch.dtype], torch.dtype]
"""(name, dtype in the file) -> dtype in memory."""


def dit_dtypes(compute: torch.dtype, convert_all: bool) -> DTypeOf:
    """The dtype each DiT parameter is kept in.

    compute: dtype of the blocks' matrix products. What the official code computes in float32 stays
    float32, unless convert_all asks for everything in `compute` (as the official
    --convert_model_dtype does); it is then upcast when used.
    """
    return lambda name, _: torch.float32 if keeps_fp32(name) and not convert_all else compute


def load_dit(
    files: DitFiles, *, device: torch.device, dtype_of: DTypeOf, label: str, **collaborators: Any
) -> WanModel:
    """A WanModel for inference. collaborators: the keyword-only arguments of WanModel.

    Raises InputError naming the tensor that is missing, extra or wrongly shaped.
    """
    model = meta_dit(files, **collaborators)
    tensors = _read_safetensors(files.tensors)
    model.load_state_dict(
        _copied(tensors, _total(files.tensors), device, dtype_of, label), strict=True, assign=True
    )
    return model.eval().requires_grad_(False)


def meta_dit(files: DitFiles, **collaborators: Any) -> WanModel:
    """The network without weights, after its names and shapes were compared with the files'."""
    try:
        with torch.device("meta"):
            model = WanModel(**files.config, **collaborators)
    except (TypeError, ValueError) as error:
        raise InputError(f"{files.folder}/config.json does not fit: {error}") from error
    check_tensors(model, files.tensors, files.folder)
    return model


def check_tensors(model: nn.Module, tensors: Mapping[str, TensorInfo], origin: Path) -> None:
    """Names and shapes must be exactly the model's."""
    expected = model.state_dict()
    for kind, names in (
        ("lacks", sorted(expected.keys() - tensors.keys())),
        ("has the unknown", sorted(tensors.keys() - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{origin} {kind} tensor {names[0]}{more}; config.json and weights do not belong "
                "together: download both again."
            )
    for name, info in tensors.items():
        if info.shape != tuple(expected[name].shape):
            raise InputError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, the configuration asks "
                f"for {list(expected[name].shape)}; download config.json and weights again."
            )


def tensor_shapes(path: Path, rename: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that `load_tensors` would give, without reading a weight."""
    if path.suffix == ".pth":
        found = {name: tuple(tensor.shape) for name, tensor in _read_pickle(path).items()}
    else:
        tensors = safetensors_header(path) if path.is_file() else _library_folder(path)
        found = {name: info.shape for name, info in tensors.items()}
    return {rename(name): shape for name, shape in found.items()}


def load_tensors(
    path: Path,
    rename: Callable[[str], str],
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
) -> dict[str, Tensor]:
    """A state dict under new names, copied to its device.

    path: a `.pth` of plain tensors (never unpickled as code), a `.safetensors` file, or a folder in
    the layout of diffusers or transformers. Raises InputError for anything else.
    """
    if path.suffix == ".pth":
        state = _read_pickle(path)
        source, total = iter(state.items()), sum(tensor.nbytes for tensor in state.values())
    else:
        tensors = safetensors_header(path) if path.is_file() else _library_folder(path)
        source, total = _read_safetensors(tensors), _total(tensors)
    renamed = ((rename(name), tensor) for name, tensor in source)
    return _copied(renamed, total, device, dtype_of, label)


def _copied(
    tensors: Iterator[tuple[str, Tensor]],
    total: int,
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
) -> dict[str, Tensor]:
    """Copies in their final dtype and place; `total` bytes in the files are the bar's length.

    Always copies: memory that PyTorch allocates is aligned, a tensor inside a mapped file is not,
    and products of differently aligned weights may differ in the last bit. The same tensors must
    give the same video from every file layout.
    """
    state = {}
    with progress(total, f"loading {label}", "B") as bar:
        for name, source in tensors:
            dtype = dtype_of(name, source.dtype)
            state[name] = torch.empty(source.shape, dtype=dtype, device=device).copy_(source)
            bar.update(source.numel() * source.element_size())
    return state


def _read_safetensors(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """(our name, mapped tensor), file by file."""
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, []).append((name, info.name))
    for file, names in by_file.items():
        with safe_open(file, framework="pt", device="cpu") as handle:
            for name, stored in names:
                yield name, handle.get_tensor(stored)


def _total(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(info.nbytes for info in tensors.values())


def _library_folder(path: Path) -> dict[str, TensorInfo]:
    for stem in ("diffusion_pytorch_model", "model"):
        found = folder_tensors(path, stem)
        if found:
            return found
    raise InputError(f"{path} holds no safetensors weights; download them.")


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if all(isinstance(tensor, Tensor) for tensor in state.values()):
            return dict(state)
        reason = "it holds more than tensors"
    except Exception as error:  # torch raises half a dozen kinds for damaged or unsafe pickles
        reason = str(error).strip().splitlines()[0]
    raise InputError(f"{path} is not a plain state dict ({reason}); download it again.")
