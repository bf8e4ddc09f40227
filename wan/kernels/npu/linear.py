"""Quantised linear layers on an NPU, by mindiesd."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn


def quantise(
    network: nn.Module,
    description: Path,
    linears: Iterable[str],
    *,
    use_nz: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Let mindiesd replace the layers of an export in a network, which may be on the meta device.

    description: the export's JSON; files of a mode mindiesd refuses are the caller's to explain.
    linears: names of the layers it replaces, whose tensors are moved to device here. use_nz: int8
    weights in the NPU's own layout. dtype: bfloat16 or float16, of inputs and results. Self-
    attentions with FA entries also get mindiesd's `fa_quant`, which nothing calls: rotations are
    the FP8 method's.
    """
    import torch_npu
    from mindiesd import quantize

    # The layout cast falls back to the plain layout, with a warning, where the switch is off.
    torch_npu.npu.config.allow_internal_format = use_nz
    try:
        quantize(network, quant_des_path=str(description), use_nz=use_nz, dtype=dtype)
    finally:
        torch_npu.npu.config.allow_internal_format = False
    for name in linears:
        network.get_submodule(name).to(device)
