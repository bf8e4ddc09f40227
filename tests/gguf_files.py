"""Writes GGUF files for tests and benchmarks: the `gguf` package writes and dequantizes them.

The package has no quantizer for the types with 256 values per block. The quantizers here, of three
of them, are simple (a scale, or a scale and an offset, from the largest and smallest value of each
part), so their files are less exact than published ones of the same type; the layouts are those of
ggml.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

try:
    import gguf
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
PACKAGED = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4")
BLOCK = 256


def get_quant_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def quantize(values: Tensor, kind: str) -> Bytes:
    """Returns the bytes of quantized rows; no block crosses a row."""
    array = values.float().numpy()
    if kind in PACKAGED:
        return gguf.quants.quantize(array, get_quant_type(kind))
    blocks = _QUANTIZERS[kind](array.reshape(-1, BLOCK))
    return blocks.reshape(len(array), -1)


def dequantize(stored: Bytes, kind: str) -> Tensor:
    """Returns the values as the package dequantizes them."""
    return torch.from_numpy(gguf.quants.dequantize(stored, get_quant_type(kind)))


def write_gguf(
    path: Path, tensors: Mapping[str, Tensor], kinds: Mapping[str, str]
) -> dict[str, Tensor]:
    """Writes a file of the tensors; returns their dequantized values.

    A matrix whose rows are not whole blocks is flattened, as ComfyUI's converter does. Tensors
    without a kind are float32.
    """
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    values = {}
    for name, tensor in tensors.items():
        if name not in kinds:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
            values[name] = tensor.float()
            continue
        kind, rows = kinds[name], tensor
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[get_quant_type(kind)][0]:
            rows = tensor.reshape(-1, BLOCK)
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensor.shape))
        stored = quantize(rows, kind)
        writer.add_tensor(name, stored, raw_dtype=get_quant_type(kind))
        values[name] = dequantize(stored, kind).reshape(tensor.shape)
    finish_gguf(writer)
    return values


def finish_gguf(writer: gguf.GGUFWriter) -> None:
    """Writes the file and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(path: Path, values: Mapping[str, Any]) -> Path:
    """Writes a text encoder's file with values of a vocabulary, by llama.cpp's keys."""
    writer = gguf.GGUFWriter(path, "t5encoder")
    for name, value in values.items():
        kinds: dict[type, Callable[..., None]] = {str: writer.add_string, int: writer.add_uint32}
        kinds[float] = writer.add_float32
        kinds.get(type(value), writer.add_array)(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("enc.output_norm.weight", torch.zeros(4).numpy())
    finish_gguf(writer)
    return path


def make_gguf_folders(source: Path, kind: str, out: Path) -> tuple[Path, Path]:
    """Makes two checkpoint folders: one with GGUF files as published, one with their values."""
    folders = out / "gguf" / source.name, out / "plain" / source.name
    ignored = shutil.ignore_patterns("diffusion_pytorch_model*", "*_model", "config.json")
    for folder in folders:
        shutil.copytree(source, folder, ignore=ignored)
    shutil.copy(next(source.rglob("config.json")), folders[0] / "config.json")
    for path in sorted({file.parent for file in source.rglob("diffusion_pytorch_model*")}):
        network, (files, plain) = path.relative_to(source), folders
        expert = {"high_noise_model": "HighNoise", "low_noise_model": "LowNoise"}.get(path.name, "")
        (files / expert).mkdir(exist_ok=True)
        (plain / network).mkdir(exist_ok=True)
        state: dict[str, Tensor] = {}
        for shard in sorted(path.glob("*.safetensors")):
            state |= load_file(shard)
        matrices = [n for n, x in state.items() if x.dim() == 2 and n.startswith("blocks.")]
        kinds = {name: kind for name in matrices if name.endswith("weight")}
        file = files / expert / f"Wan2.2-{expert}-{kind}.gguf"
        values = write_gguf(file, state, kinds)
        save_file(values, plain / network / "diffusion_pytorch_model.safetensors")
        shutil.copy(path / "config.json", plain / network / "config.json")
    return folders


def _to_fp16_bytes(values: Floats) -> Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _divide_or_zero(values: Floats, divisor: Floats) -> Floats:
    return np.divide(values, divisor, out=np.zeros_like(values), where=divisor != 0)


def _pack_bits(values: NDArray[Any], width: int, bits: int) -> Bytes:
    """Packs values into bytes, the lowest bits first, in groups of `width` bytes."""
    parts = values.reshape(len(values), -1, 8 // bits, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(values), -1)


def _quantize_with_offsets(
    blocks: Floats, parts: int, levels: int, most: int
) -> tuple[NDArray, ...]:
    """Returns scales, offsets and values of parts quantized from their minimum to their maximum."""
    x = blocks.reshape(len(blocks), parts, -1)
    least = np.minimum(x.min(axis=2), 0)
    reach = (x.max(axis=2) - least) / levels
    d, m = (side.max(axis=1, keepdims=True) / most for side in (reach, -least))
    d, m = (side.astype(np.float16).astype(np.float32) for side in (d, m))
    scales = np.clip(np.rint(_divide_or_zero(reach, d * np.ones_like(reach))), 0, most).astype(
        np.uint8
    )
    offsets = np.clip(np.rint(_divide_or_zero(-least, m * np.ones_like(least))), 0, most).astype(
        np.uint8
    )
    scale = (d * scales)[..., None] * np.ones_like(x)
    values = np.clip(np.rint(_divide_or_zero(x + (m * offsets)[..., None], scale)), 0, levels)
    return d, m, scales, offsets, values.astype(np.uint8).reshape(len(x), -1)


def _pack_six_bits(scales: NDArray[np.uint8], offsets: NDArray[np.uint8]) -> Bytes:
    """Packs eight scales and eight offsets of six bits into twelve bytes."""
    first = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    second = (offsets[:, :4] & 63) | (offsets[:, 4:] >> 4 << 6)
    last = (scales[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4
    return np.concatenate([first, second, last], axis=1)


def _q4_k(blocks: Floats) -> Bytes:
    d, m, scales, offsets, values = _quantize_with_offsets(blocks, 8, 15, 63)
    parts = (
        _to_fp16_bytes(d),
        _to_fp16_bytes(m),
        _pack_six_bits(scales, offsets),
        _pack_bits(values, 32, 4),
    )
    return np.concatenate(parts, axis=1)


def _quantize_symmetric(blocks: Floats, half: int, most: int) -> tuple[NDArray, ...]:
    """Returns the scales and the values, from -half to half - 1, of sixteen parts."""
    x = blocks.reshape(len(blocks), 16, 16)
    reach = np.abs(x).max(axis=2) / (half - 0.5)
    d = (reach.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    scales = np.clip(np.rint(_divide_or_zero(reach, d * np.ones_like(reach))), 0, most).astype(
        np.int8
    )
    scale = (d * scales)[..., None] * np.ones_like(x)
    values = np.clip(np.rint(_divide_or_zero(x, scale)), -half, half - 1).astype(np.int8)
    return d, scales, (values + half).astype(np.uint8).reshape(len(x), -1)


def _q6_k(blocks: Floats) -> Bytes:
    d, scales, values = _quantize_symmetric(blocks, 32, 127)
    low, high = _pack_bits(values & 15, 64, 4), _pack_bits(values >> 4, 32, 2)
    return np.concatenate([low, high, scales.view(np.uint8), _to_fp16_bytes(d)], axis=1)


def _q3_k(blocks: Floats) -> Bytes:
    d, scales, values = _quantize_symmetric(blocks, 4, 31)
    biased_scales = (scales + 32).astype(np.uint8)
    packed = np.concatenate(
        [_pack_bits(biased_scales & 15, 8, 4), _pack_bits(biased_scales >> 4, 4, 2)], axis=1
    )
    third, low = _pack_bits(values >> 2, 32, 1), _pack_bits(values & 3, 32, 2)
    return np.concatenate([third, low, packed, _to_fp16_bytes(d)], axis=1)


_QUANTIZERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
