"""Recognizes weights that other programs quantized, by the names of their tensors; no torch.

Two layouts are renamed to ComfyUI's and read: quanto's and TurboDiffusion's, of values with scales.
All others are refused with the name of their program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from wan.checkpoint.tensor_info import E4M3, FP8, TensorInfo

REMEDY = f"get it in BF16, in FP8 with scales ({E4M3}), or as a GGUF file"
_PROGRAMS = {
    "quanto": r"\.weight\._(data|scale|shift|group|data\._data)",
    "torchao": r"\._weight_\w+|\.weight[.:](_data|qdata|scale|zero_point|tensor_impl\b.*"
    r"|int_data|float8_data|layout_tensor\b.*|original_weight_tensor\b.*)",
    "Nunchaku (SVDQuant)": r"\.(wscales|wcscales|wtscale|wzeros|smooth_factor(_orig)?)",
    "bitsandbytes (NF4)": r"\.weight\.quant_state\.bitsandbytes__nf4",
    "bitsandbytes (FP4)": r"\.weight\.quant_state\.bitsandbytes__fp4",
    "bitsandbytes (int8)": r"\.(SCB|weight_format)",
    "bitsandbytes": r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\b.*)",
    "GPTQ": r"\.g_idx",
    "AWQ": r"\.qzeros",
    "GPTQ or AWQ": r"\.qweight",
    "compressed-tensors": r"\.weight_(packed|g_idx|zero_point|global_scale)",
    "HQQ": r"\.(W_q|W_nbits)",
    "SDNQ": r"\.(svd_up|svd_down|zero_point)",
    "ExLlama": r"\.(q_weight|q_scale|q_scale_max|q_groups|q_perm|q_invperm|trellis)",
    "TurboDiffusion": r"\.int8_weight",
    "AQLM or QuIP#": r"\.(codes|codebooks|Qidxs)",
    "PyTorch's own quantization": r"\._packed_params(\..*)?",
}
_END_PATTERNS = {program: re.compile(rf"(?:{end})$") for program, end in _PROGRAMS.items()}
"""Program -> pattern of the ends of names that only it writes; the first that matches counts."""
_MODULES = {
    "optimum": "quanto",
    "quanto": "quanto",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "nunchaku": "Nunchaku (SVDQuant)",
    "auto_gptq": "GPTQ",
    "gptqmodel": "GPTQ",
    "awq": "AWQ",
    "hqq": "HQQ",
    "sdnq": "SDNQ",
    "compressed_tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "transformer_engine": "Transformer Engine",
    "turbodiffusion": "TurboDiffusion",
}
"""Python package of a pickled class -> the program."""
_READ_LAYOUTS = ((".weight._data", ".weight._scale"), (".int8_weight", ".scale"))
"""Ends of the values and of their scales: quanto's and TurboDiffusion's."""
_PART = re.compile(r"[.:]")


class QuantizedTensor(NamedTuple):
    """A tensor of a format that is not read, and the program that writes it."""

    program: str
    name: str


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


def find_program(names: Iterable[str]) -> QuantizedTensor | None:
    """Returns the first tensor that shows which program quantized the weights."""
    names = [*names]
    for program, pattern in _END_PATTERNS.items():
        for name in names:
            if pattern.search(name):
                return QuantizedTensor(program, name)
    return None


def find_program_of_class(full_name: str) -> str | None:
    """Returns the program whose class or function a pickle names, as `MODULE NAME`."""
    if full_name.endswith("_rebuild_qtensor"):
        return "PyTorch's own quantization"
    return _MODULES.get(full_name.split(" ")[0].split(".")[0])


def is_parameter(name: str) -> bool:
    """Whether a tensor has the name of a network's parameter, not of a part of one."""
    return name.endswith((".weight", ".bias", "modulation"))


def list_weight_names(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns tensors by the names of weights of which they may be parts: X.weight of `X.part`."""
    weights: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        for match in () if is_parameter(name) else _PART.finditer(name):
            weights.setdefault(f"{name[: match.start()]}.weight", info)
    return weights | {**tensors}
