"""A DiT whose quantised layers come from an export (--quant_dit_path), the rest from a checkpoint.

The float weights of quantised layers are neither read nor given memory. On an NPU mindiesd makes
the quantised layers; elsewhere they are our reference of the one algorithm that runs everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wan.kernels import npu_linear
from wan.kernels.w8a8 import W8A8Linear
from wan.loading import DTypeOf, meta_dit, read_tensors
from wan.modules.model import WanModel
from wan.settings.checkpoint import DitFiles
from wan.settings.quant_export import FP8_DYNAMIC, Export
from wan.settings.quantised import QuantisedDit

Rotation = tuple[Tensor, Tensor]


def load_quantised_dit(
    files: DitFiles,
    export: Export,
    *,
    device: torch.device,
    dtype_of: DTypeOf,
    compute: torch.dtype,
    label: str,
    **collaborators: Any,
) -> WanModel:
    """A WanModel for inference. dtype_of, collaborators: as in `wan.loading.load_dit`.

    compute: what goes into the quantised layers and comes out; 16 bits on an NPU. Raises InputError
    where the checkpoint does not fit its configuration.
    """
    model = meta_dit(files, **collaborators).requires_grad_(False)
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
