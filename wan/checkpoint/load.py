"""Weights from disk into models: memory-mapped, converted while copied, strictly by name.

A network is built on the meta device (no memory), its tensors are compared with the files' headers,
and only then is each one copied from its mapped file into its final dtype and device. Beside the
model no more than one tensor is ever in anonymous memory. Where a network is shared by several
processes, each one allocates and reads only its own share (`Place`).

A DiT whose quantised layers come from an export (--quant_dit_path), the rest from a checkpoint.

The float weights of quantised layers are neither read nor given memory. On an NPU mindiesd makes
the quantised layers; elsewhere they are our reference of the one algorithm that runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from wan.checkpoint.files import TensorInfo, folder_tensors, safetensors_header
from wan.checkpoint.layout import DitFiles
from wan.checkpoint.quantised import FP8_DYNAMIC, Export, QuantisedDit
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.log import progress
from wan.modules.interfaces import Collaborators
from wan.modules.model import WanModel
from wan.settings.errors import InputError
from wan.settings.numerics import keeps_fp32

DTypeOf = Callable[[str, torch.dtype], torch.dtype]
"""(name, dtype in the file) -> dtype in memory."""


class Place(Protocol):
    """Which rows of each parameter this process keeps (`wan.distributed.fsdp.Sharded`)."""

    def prepare(self, network: nn.Module) -> None:
        """Cut a network that has its dtypes but no memory yet (meta device)."""

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        """What this process keeps of a parameter, to be written to, and which rows that is."""


class Whole:
    """One process keeps everything."""

    def prepare(self, network: nn.Module) -> None:
        """Nothing is cut."""

    def share(self, parameter: Tensor) -> tuple[Tensor, slice]:
        return parameter, slice(None)


def dit_dtypes(compute: torch.dtype, convert_all: bool) -> DTypeOf:
    """The dtype each DiT parameter is kept in.

    compute: dtype of the blocks' matrix products. What the official code computes in float32 stays
    float32, unless convert_all asks for everything in `compute` (as the official
    --convert_model_dtype does); it is then upcast when used.
    """
    return lambda name, _: torch.float32 if keeps_fp32(name) and not convert_all else compute


def load_dit(
    files: DitFiles,
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
    place: Place | None = None,
    collaborators: Collaborators | None = None,
) -> WanModel:
    """A WanModel for inference. collaborators: as in WanModel.

    Raises InputError naming the tensor that is missing, extra or wrongly shaped.
    """
    model = meta_dit(files, collaborators)
    _fill(model, _mapped(files.tensors), device, dtype_of, label, place or Whole())
    return model


def meta_dit(files: DitFiles, collaborators: Collaborators | None = None) -> WanModel:
    """The network without weights, after its names and shapes were compared with the files'."""
    try:
        with torch.device("meta"):
            model = WanModel(**files.config, collaborators=collaborators)
    except (TypeError, ValueError) as error:
        raise InputError(f"{files.folder}/config.json does not fit: {error}") from error
    check_tensors(model, files.tensors, files.folder)
    return model


def check_tensors(model: nn.Module, tensors: Mapping[str, TensorInfo], origin: Path) -> None:
    """Names and shapes must be exactly the model's; a parameter of two names needs its first."""
    expected = dict(model.named_parameters())
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for kind, names in (
        ("lacks", sorted(expected.keys() - tensors.keys())),
        ("has the unknown", sorted(tensors.keys() - known)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{origin} {kind} tensor {names[0]}{more}; config.json and weights do not belong "
                "together: download both again."
            )
    for name, parameter in expected.items():
        info = tensors[name]
        if info.shape != tuple(parameter.shape):
            raise InputError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, the configuration asks "
                f"for {list(parameter.shape)}; download config.json and weights again."
            )


def load_network(
    network: nn.Module,
    path: Path,
    rename: Callable[[str], str],
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
    place: Place | None = None,
) -> None:
    """Give a network on the meta device its weights, for inference.

    path, rename: as `load_tensors`. Raises InputError naming the tensor that is missing, extra or
    wrongly shaped.
    """
    tensors = _renamed(_stored(path), rename)
    check_tensors(network, tensors, path)
    _fill(network, _mapped(tensors), device, dtype_of, label, place or Whole())


def tensor_shapes(path: Path, rename: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that `load_tensors` would give, without reading a weight."""
    return {rename(name): info.shape for name, info in _stored(path).items()}


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
    return read_tensors(
        _renamed(_stored(path), rename), device=device, dtype_of=dtype_of, label=label
    )


def read_tensors(
    tensors: Mapping[str, TensorInfo], *, device: torch.device, dtype_of: DTypeOf, label: str
) -> dict[str, Tensor]:
    """These tensors and no others, each copied from its file to the device under its key here."""
    sources = _mapped(tensors)
    state = {
        name: torch.empty(source.shape, dtype=dtype_of(name, source.dtype), device=device)
        for name, source in sources.items()
    }
    _copied([(state[name], source) for name, source in sources.items()], label)
    return state


def _fill(
    network: nn.Module,
    sources: Mapping[str, Tensor],
    device: torch.device,
    dtype_of: DTypeOf,
    label: str,
    place: Place,
) -> None:
    """Memory for this process's share of a network, filled from mapped tensors."""
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, sources[name].dtype))  # still meta
    place.prepare(network.eval().requires_grad_(False))
    network.to_empty(device=device)
    shares = {name: place.share(parameter) for name, parameter in network.named_parameters()}
    _copied([(kept, sources[name][rows]) for name, (kept, rows) in shares.items()], label)


@torch.no_grad()
def _copied(pairs: Sequence[tuple[Tensor, Tensor]], label: str) -> None:
    """Fill each first tensor with its second, a mapped one, of which only these rows are read.

    Always copies: memory that PyTorch allocates is aligned, a tensor inside a mapped file is not,
    and products of differently aligned weights may differ in the last bit. The same tensors must
    give the same video from every file layout.
    """
    total = sum(source.nbytes for _, source in pairs)
    with progress(total, f"loading {label}", "B") as bar:
        for target, source in pairs:
            target.copy_(source)
            bar.update(source.nbytes)


def _stored(path: Path) -> dict[str, TensorInfo]:
    """What a file or folder of `load_tensors` holds, under the names it has there."""
    if path.suffix == ".pth":
        return {
            name: TensorInfo(path, name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in _read_pickle(path).items()
        }
    return safetensors_header(path) if path.is_file() else _library_folder(path)


def _renamed(
    tensors: Mapping[str, TensorInfo], rename: Callable[[str], str]
) -> dict[str, TensorInfo]:
    return {rename(name): info for name, info in tensors.items()}


def _mapped(tensors: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """The same tensors as views of their mapped files: only what is copied from is read."""
    by_file: dict[Path, list[str]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, []).append(name)
    views = {}
    for file, names in by_file.items():
        if file.suffix == ".pth":
            state = _read_pickle(file)
            views.update({name: state[tensors[name].name] for name in names})
            continue
        with safe_open(file, framework="pt", device="cpu") as handle:
            views.update({name: handle.get_tensor(tensors[name].name) for name in names})
    return views


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


Rotation = tuple[Tensor, Tensor]


def load_quantised_dit(
    files: DitFiles,
    export: Export,
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    compute: torch.dtype,
    label: str,
    collaborators: Collaborators | None = None,
) -> WanModel:
    """A WanModel for inference. dtype_of, collaborators: as in `load_dit`.

    compute: what goes into the quantised layers and comes out; 16 bits on an NPU. Raises InputError
    where the checkpoint does not fit its configuration.
    """
    model = meta_dit(files, collaborators).requires_grad_(False)
    if device.type != "npu":
        _replace(model, export, device, compute, label)
    elif export.linears:
        npu_linear.quantise(
            model,
            export.description,
            export.linears,
            use_nz=export.use_nz,
            dtype=compute,
            device=device,
        )
    rest = {name: files.tensors[name] for name, _ in model.named_parameters()}
    state = read_tensors(rest, device=device, dtype_of=dtype_of, label=label)
    model.load_state_dict(state, assign=True)  # to_empty would wipe the layers that are there
    return model.eval()


def _replace(
    model: nn.Module, export: Export, device: torch.device, compute: torch.dtype, label: str
) -> None:
    infos = {
        f"{name}.{part}": info
        for name, layer in export.linears.items()
        for part, info in layer.tensors.items()
    }
    tensors = read_tensors(
        infos, device=device, dtype_of=lambda _, stored: stored, label=f"{label}, int8"
    )
    for name in export.linears:
        layer = W8A8Linear(
            tensors[f"{name}.weight"],
            tensors[f"{name}.weight_scale"],
            tensors.get(f"{name}.bias"),
            tensors.get(f"{name}.mul_scale"),
            dtype=compute,
        )
        model.set_submodule(name, layer)


def rotations(quantised: QuantisedDit) -> dict[tuple[str, int], Rotation]:
    """(expert, block index) -> the exported FP8 rotations of queries and keys, [D,D], on the CPU.

    Empty for an export without entries for attention. Where it is not, the layers that are absent
    are those the export keeps in the run's number format.
    """
    layers = {
        (expert, index): layer.tensors
        for expert, export in quantised.experts.items()
        for index, layer in export.attentions.items()
        if layer.algorithm == FP8_DYNAMIC
    }
    read = read_tensors(
        {f"{key}{part}": info for key, parts in layers.items() for part, info in parts.items()},
        device=torch.device("cpu"),
        dtype_of=lambda _, stored: stored,
        label="rotations",
    )
    return {key: (read[f"{key}q_rot"], read[f"{key}k_rot"]) for key in layers}
