"""The parts of a run made from a checkpoint, each in its number format: DiT, text encoder, VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wan import loading
from wan.device import Device
from wan.keymaps import t5_transformers_name, vae_diffusers_name
from wan.loading import Place
from wan.loading_quantised import load_quantised_dit
from wan.modules.model import WanModel
from wan.modules.textcache import TextKVCache
from wan.settings.checkpoint import Checkpoint
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.quantised import QuantisedDit
from wan.text import TextEncoder, umt5, umt5_sizes
from wan.vae import VideoVAE, autoencoder_sizes


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_parts(checkpoint: Checkpoint, network: WanModel) -> None:
    """The VAE and the text encoder must be whole and belong to the networks; weights stay unread.

    Parts that are absent are left to those who need them: embeddings can replace a text encoder.
    """
    if checkpoint.vae is not None:
        sizes = autoencoder_sizes(loading.tensor_shapes(checkpoint.vae, vae_diffusers_name))
        if sizes["z_dim"] != network.out_dim:
            raise InputError(
                f"{checkpoint.vae} has {sizes['z_dim']} latent channels, the DiT "
                f"{network.out_dim}; they belong to different checkpoints: download the VAE again."
            )
    if checkpoint.text_encoder is not None:
        shapes = loading.tensor_shapes(checkpoint.text_encoder, t5_transformers_name)
        width = umt5_sizes(shapes)["d_model"]
        if width != network.text_dim:
            raise InputError(
                f"{checkpoint.text_encoder} makes embeddings of {width} channels, the DiT takes "
                f"{network.text_dim}; they belong to different checkpoints: download both again."
            )


def precision(execution: Execution, device: Device) -> torch.dtype:
    choices = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": device.default_precision}
    return choices[execution.precision]


def dit_dtype(execution: Execution, dtype: torch.dtype) -> torch.dtype:
    """--convert_model_dtype stores the DiT in bf16, and so its products are computed in bf16."""
    return torch.bfloat16 if execution.convert_model_dtype else dtype


def expert(
    checkpoint: Checkpoint,
    execution: Execution,
    device: Device,
    dtype: torch.dtype,
    name: str,
    collaborators: dict[str, Any],
    place: Place | None,
    quantised: QuantisedDit | None = None,
) -> WanModel:
    """A network. quantised: where its quantised layers come from; such a network is not cut."""
    compute = dit_dtype(execution, dtype)
    arguments = {
        "device": device.torch_device,
        "dtype_of": loading.dit_dtypes(compute, execution.convert_model_dtype),
        "label": f"DiT {name}",
        **collaborators,
        "text_cache": TextKVCache() if execution.text_kv_cache else None,
    }
    files = checkpoint.experts[name]
    if quantised is None:
        model = loading.load_dit(files, place=place, **arguments)
    else:
        model = load_quantised_dit(files, quantised.experts[name], compute=compute, **arguments)
    if execution.compile:
        for block in model.blocks:
            block.compile()
    return model


def weight_files(checkpoint: Checkpoint, quantised: QuantisedDit | None) -> dict[str, list[Path]]:
    """Each network's files that are worth reading ahead: most of what is read is in them."""
    if quantised is not None:
        return {name: [export.weights] for name, export in quantised.experts.items()}
    return {
        name: [tensor.file for tensor in dit.tensors.values()]
        for name, dit in checkpoint.experts.items()
    }


def text_encoder(
    checkpoint: Checkpoint,
    execution: Execution,
    device: Device,
    dtype: torch.dtype,
    text_len: int,
    place: Place | None,
) -> TextEncoder:
    path = checkpoint.require("text_encoder")
    network = umt5(loading.tensor_shapes(path, t5_transformers_name))
    loading.load_network(
        network,
        path,
        t5_transformers_name,
        device=torch.device("cpu") if execution.t5_cpu else device.torch_device,
        dtype_of=lambda _, stored: stored if dtype == torch.float32 else dtype,
        label="text encoder",
        place=place,
    )
    return TextEncoder(network, checkpoint.require("tokenizer"), dtype=dtype, text_len=text_len)


def vae(checkpoint: Checkpoint, execution: Execution, device: Device) -> VideoVAE:
    weights = loading.load_tensors(
        checkpoint.require("vae"),
        vae_diffusers_name,
        device=device.torch_device,
        dtype_of=lambda *_: torch.float32,
        label="VAE",
    )
    return VideoVAE(weights, tiling=execution.vae_tiling)
