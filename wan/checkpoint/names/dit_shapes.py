"""Converts the tensors of a DiT from other programs' shapes to the official ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from wan.checkpoint.formats.tensor_info import FLOATS, TensorInfo
from wan.settings.errors import InputError

_is_constant_tensor = re.compile(r"motion_encoder\..*\.kernel$").match  # the same in every file
_is_conv_bias = re.compile(r"motion_encoder\.enc\.net_app\..*\.bias$").match
_AXES = {"modulation": 3, "emb_pos": 3, "padding_tokens": 4, "audio_encoder.weights": 4}
"""End of a tensor's name -> number of axes, of those whose first axis has length 1."""
_PATCH_SIZE = (1, 2, 2)  # of all published networks


def convert_dit_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors of a DiT, by official name, with their official shapes.

    Merges the keys and values of face attention, reshapes the biases of the motion encoder, and
    restores first axes of length 1, which ggml's writer of GGUF files drops.
    """
    tensors = restore_patch_axes(
        {name: info for name, info in tensors.items() if not _is_constant_tensor(name)}
    )
    for name in [name for name in tensors if ".linear1_k." in name]:
        keys, values = tensors.pop(name), tensors.pop(name.replace("_k.", "_v."), None)
        if values is None or values.shape != keys.shape:
            why = "lacks its value tensor (V), or that has another shape"
            raise InputError(f"{keys.file}: {keys.name}", None, why, "give the whole network")
        tensors[name.replace("_k.", "_kv.")] = TensorInfo(
            keys.file,
            keys.name,
            keys.dtype if keys.dtype == values.dtype in FLOATS else "F32",
            (2 * keys.shape[0], *keys.shape[1:]),
            keys.nbytes + values.nbytes,
            chunks=(keys, values),
        )
    for name, info in tensors.items():
        if _is_conv_bias(name) and len(info.shape) == 1:
            tensors[name] = replace(info, shape=(1, *info.shape, 1, 1))
        axes = next((axes for suffix, axes in _AXES.items() if name.endswith(suffix)), 0)
        if 0 < len(info.shape) < axes:
            tensors[name] = replace(info, shape=(1,) * (axes - len(info.shape)) + info.shape)
    return tensors


def restore_patch_axes(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Gives patch embeddings that were stored with fewer axes the five of a 3D convolution.

    GGUF has at most four axes; other programs store a linear layer of the flattened patches. The
    number of output channels is that of the bias.
    """
    restored = dict(tensors)
    for name, info in tensors.items():
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        if not name.endswith("patch_embedding.weight") or len(info.shape) == 5 or bias is None:
            continue
        out_dim, patch = prod(bias.shape), prod(_PATCH_SIZE)
        if out_dim and not prod(info.shape) % (out_dim * patch):
            shape = out_dim, prod(info.shape) // (out_dim * patch), *_PATCH_SIZE
            restored[name] = replace(info, shape=shape)
    return restored
