"""Quantized linear layers on Ascend NPUs, through mindiesd."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn


def quantize_npu_linears(
    network: nn.Module,
    description_path: Path,
    linear_names: Iterable[str],
    *,
    use_nz: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replaces linear layers of a network by mindiesd's quantized layers and moves them to device.

    The network may be on the meta device. mindiesd also adds a submodule `fa_quant` to each self-
    attention with FA entries; it is unused, because the FP8 attention backend rotates q and k.

    Args:
        description_path: JSON description of the quantized export. mindiesd's errors about it are
            not caught.
        linear_names: Names of all layers that the description quantizes.
        use_nz: Whether int8 weights are stored in the NPU's FRACTAL_NZ layout.
        dtype: bfloat16 or float16, of the layers' inputs and outputs.
    """
    import torch_npu
    from mindiesd import quantize

    # Without this switch the cast to NZ warns and leaves the weights in the plain layout.
    torch_npu.npu.config.allow_internal_format = use_nz
    try:
        quantize(network, quant_des_path=str(description_path), use_nz=use_nz, dtype=dtype)
    finally:
        torch_npu.npu.config.allow_internal_format = False
    for name in linear_names:
        network.get_submodule(name).to(device)
