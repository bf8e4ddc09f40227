"""The composition root: the one place that knows every class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from wan import device as devices
from wan import loading
from wan.device import Device
from wan.distributed.mesh import Team
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.experts import Experts
from wan.kernels.sdpa import SdpaKernel
from wan.keymaps import t5_transformers_name, vae_diffusers_name
from wan.log import Stages, logger
from wan.modules import schedule
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.local import Attention, LocalAttention, LocalTokens, TokenShard
from wan.modules.model import WanModel
from wan.modules.textcache import TextKVCache
from wan.pipeline import Lazy, Pipeline
from wan.settings.checkpoint import Checkpoint
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.text import TextEncoder, umt5_sizes
from wan.vae import VideoVAE, autoencoder_sizes

T = TypeVar("T")
ALONE = Parallel()


def pipeline(
    checkpoint: Checkpoint,
    execution: Execution,
    *,
    parallel: Parallel = ALONE,
    team: Team | None = None,
    device_index: int = 0,
    t5_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Everything composed, no weight read yet; names and shapes of the networks are checked.

    parallel, team: the topology, and the processes that form it. device_index: which device, where
    there is no team. t5_dtype: the text encoder computes in the run's precision unless this says
    otherwise.
    """
    device = devices.resolve(execution.device, device_index) if team is None else team.device
    dtype = _precision(execution, device)
    networks = {name: loading.meta_dit(files) for name, files in checkpoint.experts.items()}
    network = next(iter(networks.values()))
    _check_parts(checkpoint, network)
    stages = Stages(device.synchronize)
    collaborators = _collaborators(parallel, team)

    def timed(make: Callable[[], T]) -> Lazy[T]:
        def load() -> T:
            with stages("loading"):
                return make()

        return Lazy(load)

    def expert(name: str) -> WanModel:
        with stages("loading"):
            return _expert(checkpoint, execution, device, dtype, name, collaborators)

    logger.info(
        "%s checkpoint, %s, %s, %d x %d heads",
        checkpoint.layout,
        device.name(),
        dtype_name(_dit_dtype(execution, dtype)),
        network.num_layers,
        network.num_heads,
    )
    logger.info("%s", attention_line(parallel, network.num_heads))
    return Pipeline(
        device=device,
        text=timed(
            lambda: _text_encoder(checkpoint, execution, device, t5_dtype or dtype, network)
        ),
        vae=timed(lambda: _vae(checkpoint, execution, device)),
        experts=Experts(expert, offload=execution.offload_model),
        text_dim=network.text_dim,
        text_len=network.text_len,
        offload=execution.offload_model,
        stages=stages,
        **_shared(parallel, team),
    )


def attention_line(parallel: Parallel, heads: int) -> str:
    """How self-attention is carried out, in one line."""
    mode = ("baseline", "InsertComm", "BlockAttn")[parallel.comm_type]
    count = schedule.MAX_CHUNKS if parallel.comm_type else 1
    if parallel.fa_alltoall_overlap:
        mode, count = "A2A/FA overlap", schedule.MAX_CHUNKS
    sizes = [
        (b - a) // parallel.ulysses_size
        for a, b in schedule.head_ranges(heads, parallel.ulysses_size, count)
    ]
    heads_each = "/".join(str(size) for size in sorted(set(sizes), reverse=True))
    ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
    return (
        f"Attention: {mode}, {len(sizes)} x {heads_each} heads per card; ulysses "
        f"{parallel.ulysses_size} x ring {parallel.ring_size}{ring} x cfg {parallel.cfg_size}; "
        f"kernel {SdpaKernel.name}, no quantisation, no sparsity"
    )


def _collaborators(parallel: Parallel, team: Team | None) -> dict[str, Any]:
    """What all blocks of all networks share: attention, its kernel, and the tokens' shards."""
    kernel = SdpaKernel()
    attention: Attention = LocalAttention(kernel)
    tokens: TokenShard = LocalTokens()
    if team is not None and parallel.sequence_size > 1:
        attention = FAPowerCapAttention(
            parallel,
            team.group("ulysses"),
            parallel.fa_alltoall_overlap,
            kernel=kernel,
            ring=Ring(team.group("ring"), parallel.ring_type),
        )
        tokens = ShardedTokens(team.group("ring", "ulysses"))
    return {"attention": attention, "kernel": kernel, "tokens": tokens}


def _shared(parallel: Parallel, team: Team | None) -> dict[str, Any]:
    """How the processes of a team come to what only one of them needs to make."""
    if team is None:
        return {}
    shared: dict[str, Any] = {"share_latents": team.from_main}
    if not parallel.t5_fsdp:
        shared["share_text"] = team.from_main
    if parallel.cfg_size == 2:
        shared["branches"] = team.both_branches
    return shared


def resolved(execution: Execution, device: Device) -> dict[str, str]:
    """What "auto" came to, for the record."""
    dtype = _precision(execution, device)
    return {
        "device": device.name(),
        "precision": "fp32" if dtype == torch.float32 else "bf16",
        "dit_dtype": dtype_name(_dit_dtype(execution, dtype)),
        "kernel": SdpaKernel.name,
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def demo_checkpoint(task: str, folder: Path) -> None:
    """Write the tiny random checkpoint that stands in when there is none."""
    from tools.make_tiny_checkpoint import make_checkpoint

    logger.info("Making the tiny demo checkpoint %s (once).", folder)
    try:
        make_checkpoint(task, folder)
    except (OSError, InputError):
        if not folder.is_dir():  # otherwise another run has just made the same one
            raise


def _check_parts(checkpoint: Checkpoint, network: WanModel) -> None:
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


def _precision(execution: Execution, device: Device) -> torch.dtype:
    choices = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": device.default_precision}
    return choices[execution.precision]


def _dit_dtype(execution: Execution, dtype: torch.dtype) -> torch.dtype:
    """--convert_model_dtype stores the DiT in bf16, and so its products are computed in bf16."""
    return torch.bfloat16 if execution.convert_model_dtype else dtype


def _expert(
    checkpoint: Checkpoint,
    execution: Execution,
    device: Device,
    dtype: torch.dtype,
    name: str,
    collaborators: dict[str, Any],
) -> WanModel:
    model = loading.load_dit(
        checkpoint.experts[name],
        device=device.torch_device,
        dtype_of=loading.dit_dtypes(_dit_dtype(execution, dtype), execution.convert_model_dtype),
        label=f"DiT {name}",
        **collaborators,
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
