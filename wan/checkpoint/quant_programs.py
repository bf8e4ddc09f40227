"""Renames the quantized values and scales of quanto and TurboDiffusion to ComfyUI's names."""

from __future__ import annotations

from collections.abc import Mapping

from wan.checkpoint.tensor_info import FP8, TensorInfo

_READ_LAYOUTS = ((".weight._data", ".weight._scale"), (".int8_weight", ".scale"))
"""Ends of the values and of their scales: quanto's and TurboDiffusion's."""


def rename_scaled_values(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Names values and scales that can be read `X.weight` and `X.weight_scale`."""
    renamed = dict(tensors)
    for name, info in tensors.items():
        for values_end, scale_end in _READ_LAYOUTS:
            layer = name.removesuffix(values_end)
            scale = tensors.get(f"{layer}{scale_end}")
            if layer == name or scale is None or info.dtype not in ("I8", *FP8):
                continue
            if f"{layer}.weight._shift" in tensors or f"{layer}.weight" in tensors:
                continue
            del renamed[name], renamed[f"{layer}{scale_end}"]
            renamed |= {f"{layer}.weight": info, f"{layer}.weight_scale": scale}
    return renamed


def has_scaled_int8(info: TensorInfo) -> bool:
    """Whether the program that stored int8 values only multiplies them by their scales."""
    return info.name.endswith(tuple(values_end for values_end, _ in _READ_LAYOUTS))
