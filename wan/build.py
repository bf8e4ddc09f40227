"""The composition root: the one place that knows every class."""

from __future__ import annotations

from pathlib import Path

import torch

from wan import device as devices
from wan import loading
from wan.device import Device
from wan.experts import Experts
from wan.kernels.sdpa import SdpaKernel
from wan.keymaps import t5_transformers_name, vae_diffusers_name
from wan.log import logger
from wan.modules.local import LocalAttention, LocalTokens
from wan.modules.model import WanModel
from wan.modules.textcache import TextKVCache
from wan.pipeline import Lazy, Pipeline
from wan.settings.checkpoint import Checkpoint
from wan.settings.execution import Execution
from wan.text import TextEncoder
from wan.vae import VideoVAE


def pipeline(
    checkpoint: Checkpoint,
    execution: Execution,
    *,
    device_index: int = 0,
    t5_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Everything composed, no weight read yet; names and shapes of the networks are checked.

    t5_dtype: the text encoder computes in the run's precision unless this says otherwise.
    """
    device = devices.resolve(execution.device, device_index)
    dtype = _compute_dtype(execution, device)
    models = {name: loading.meta_dit(files) for name, files in checkpoint.experts.items()}
    model = next(iter(models.values()))
    logger.info(
        "%s, %s, %d x %d heads, kernel %s",
        device.name(),
        str(dtype).removeprefix("torch."),
        model.num_layers,
        model.num_heads,
        SdpaKernel.name,
    )
    return Pipeline(
        device=device,
        text=Lazy(lambda: _text_encoder(checkpoint, execution, device, t5_dtype or dtype, model)),
        vae=Lazy(lambda: _vae(checkpoint, execution, device)),
        experts=Experts(
            lambda name: _expert(checkpoint, execution, device, dtype, name),
            offload=execution.offload_model,
        ),
        text_dim=model.text_dim,
        text_len=model.text_len,
        offload=execution.offload_model,
    )


def demo_checkpoint(task: str, folder: Path) -> None:
    """Write the tiny random checkpoint that stands in when there is none."""
    from tools.make_tiny_checkpoint import make_checkpoint

    logger.info("Making the tiny demo checkpoint %s (once).", folder)
    make_checkpoint(task, folder)


def _compute_dtype(execution: Execution, device: Device) -> torch.dtype:
    if execution.convert_model_dtype:
        return torch.bfloat16
    choices = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": device.default_precision}
    return choices[execution.precision]


def _expert(
    checkpoint: Checkpoint, execution: Execution, device: Device, dtype: torch.dtype, name: str
) -> WanModel:
    kernel = SdpaKernel()
    model = loading.load_dit(
        checkpoint.experts[name],
        device=device.torch_device,
        dtype_of=loading.dit_dtypes(dtype, execution.convert_model_dtype),
        label=f"DiT {name}",
        attention=LocalAttention(kernel),
        kernel=kernel,
        tokens=LocalTokens(),
        text_cache=TextKVCache() if execution.text_kv_cache else None,
    )
    if execution.compile:
        for block in model.blocks:
            block.compile()
    return model


def _text_encoder(
    checkpoint: Checkpoint,
    execution: Execution,
    device: Device,
    dtype: torch.dtype,
    model: WanModel,
) -> TextEncoder:
    weights = loading.load_tensors(
        checkpoint.require("text_encoder"),
        t5_transformers_name,
        device=torch.device("cpu") if execution.t5_cpu else device.torch_device,
        dtype_of=lambda _, stored: stored if dtype == torch.float32 else dtype,
        label="text encoder",
    )
    return TextEncoder(
        weights, checkpoint.require("tokenizer"), dtype=dtype, text_len=model.text_len
    )


def _vae(checkpoint: Checkpoint, execution: Execution, device: Device) -> VideoVAE:
    weights = loading.load_tensors(
        checkpoint.require("vae"),
        vae_diffusers_name,
        device=device.torch_device,
        dtype_of=lambda *_: torch.float32,
        label="VAE",
    )
    return VideoVAE(weights, tiling=execution.vae_tiling)
