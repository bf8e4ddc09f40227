"""The parts of a run made from a checkpoint, each in its number format: DiT, text encoder, VAE.

The composition root: the one place that knows every class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from wan import device as devices
from wan.checkpoint import load as loading
from wan.checkpoint.keymaps import t5_transformers_name, vae_diffusers_name
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.load import Place, load_quantised_dit, rotations
from wan.checkpoint.quantised import QuantisedDit
from wan.device import Device
from wan.distributed import mesh
from wan.distributed.exchange import ALONE
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.kernels.select import Selected, select
from wan.log import Stages, logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import Collaborators, LocalAttention, LocalTokens
from wan.modules.model import WanModel
from wan.pipeline import attention_line
from wan.pipeline import build as parts
from wan.pipeline.pipeline import Experts, Lazy, Pipeline
from wan.pipeline.text import TextEncoder, umt5, umt5_blocks, umt5_sizes
from wan.pipeline.vae import VideoVAE, autoencoder_sizes
from wan.settings import devices as on_device
from wan.settings import parallel as parallel_settings
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel


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
    collaborators: Collaborators,
    place: Place | None,
    quantised: QuantisedDit | None = None,
) -> WanModel:
    """A network. quantised: where its quantised layers come from; such a network is not cut."""
    compute = dit_dtype(execution, dtype)
    arguments: dict[str, Any] = {
        "device": device.torch_device,
        "dtype_of": loading.dit_dtypes(compute, execution.convert_model_dtype),
        "label": f"DiT {name}",
        "collaborators": replace(collaborators, text_kv_cache=execution.text_kv_cache),
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


T = TypeVar("T")
ONE_PROCESS = Parallel()
PLAIN = Attention()


def pipeline(
    checkpoint: Checkpoint,
    execution: Execution,
    *,
    parallel: Parallel = ONE_PROCESS,
    attention: Attention = PLAIN,
    quantised: QuantisedDit | None = None,
    team: Team | None = None,
    device_index: int = 0,
    t5_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Everything composed, no weight read yet; names and shapes of the networks are checked.

    parallel, team: the topology, and the processes that form it. quantised: where quantised weights
    are. device_index: which device, where there is no team. t5_dtype: the text encoder computes in
    the run's precision unless this says otherwise.
    """
    device = devices.resolve(execution.device, device_index) if team is None else team.device
    dtype = parts.precision(execution, device)
    networks = {name: loading.meta_dit(files) for name, files in checkpoint.experts.items()}
    network = next(iter(networks.values()))
    parts.check_parts(checkpoint, network)
    stages = Stages(device.synchronize)
    compute = parts.dit_dtype(execution, dtype)
    head_dim = checkpoint.head_dim
    on_device.check(execution, attention, quantised, head_dim, device.type, device.chip)
    exported = {} if quantised is None or attention.fa_quant is None else rotations(quantised)
    chosen = select(attention, device, head_dim, compute, exported)
    collaborators = _collaborators(parallel, attention, chosen, team)
    dit_place, t5_place = _places(parallel, team)

    def timed(make: Callable[[], T]) -> Lazy[T]:
        def load() -> T:
            with stages("loading"):
                return make()

        return Lazy(load)

    def expert(name: str) -> WanModel:
        with stages("loading"):
            return parts.expert(
                checkpoint, execution, device, dtype, name, collaborators, dit_place, quantised
            )

    logger.info(
        "%s checkpoint, %s, %s, %d x %d heads",
        checkpoint.layout,
        device.name(),
        parts.dtype_name(compute),
        network.num_layers,
        network.num_heads,
    )
    logger.info("%s", attention_line.line(attention, parallel, network.num_heads, chosen))
    return Pipeline(
        device=device,
        text=timed(
            lambda: parts.text_encoder(
                checkpoint, execution, device, t5_dtype or dtype, network.text_len, t5_place
            )
        ),
        vae=timed(lambda: parts.vae(checkpoint, execution, device)),
        experts=Experts(
            expert,
            offload=execution.offload_model,
            files=parts.weight_files(checkpoint, quantised),
        ),
        text_dim=network.text_dim,
        text_len=network.text_len,
        offload=execution.offload_model,
        stages=stages,
        kernel=chosen.describe(),
        **_shared(parallel, team),
    )


def team(
    checkpoint: Checkpoint,
    use_sp: bool,
    values: dict[str, Any],
    execution: Execution,
    device_index: int,
) -> tuple[Parallel, Team | None]:
    """The topology for checked settings, and the team of the group that the caller made."""
    world = mesh.running() if use_sp else 1
    if use_sp and world == 1:
        raise InputError(
            "use_sp shares a video among processes, but torch.distributed is not initialised for "
            "several; start with torchrun and call init_process_group first."
        )
    topology, notices = parallel_settings.resolve(values, world, checkpoint.heads, (0, 0))
    for notice in notices:
        logger.warning(notice)
    sizes = (topology.cfg_size, topology.ring_size, topology.ulysses_size)
    if world == 1:
        return topology, None
    return topology, mesh.form(devices.resolve(execution.device, device_index), sizes)


def _collaborators(
    parallel: Parallel, attention: Attention, chosen: Selected, team: Team | None
) -> Collaborators:
    """What all blocks of all networks share: attention, its kernels, and the tokens' shards."""
    several = team is not None and parallel.sequence_size > 1
    if not (several or chosen.methods or chosen.clock):
        return Collaborators(LocalAttention(chosen.dense), chosen.text, LocalTokens(), chosen.ops)
    group = ALONE if team is None else team.group("ring", "ulysses")
    multiple = attention.row_multiple(parallel.ring_size) if several else 1
    layer = FAPowerCapAttention(
        parallel,
        ALONE if team is None else team.group("ulysses"),
        parallel.fa_alltoall_overlap,
        kernel=chosen.dense,
        ring=None if team is None else Ring(team.group("ring"), parallel.ring_type),
        methods=chosen.methods,
        clock=chosen.clock,
    )
    tokens = ShardedTokens(group, multiple, chosen.order)
    return Collaborators(layer, chosen.text, tokens, chosen.ops)


def _places(parallel: Parallel, team: Team | None) -> tuple[Sharded | None, Sharded | None]:
    """Where the rows of the DiT's and of the text encoder's weights go; None: all to every rank."""
    if team is None:
        return None, None
    cut = Sharded(team.world_mesh(), lambda network: network.blocks) if parallel.dit_fsdp else None
    return cut, Sharded(team.world_mesh(), umt5_blocks) if parallel.t5_fsdp else None


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


def resolved(execution: Execution, pipeline: Pipeline) -> dict[str, str]:
    """What "auto" came to, for the record."""
    device = pipeline.device
    dtype = parts.precision(execution, device)
    return {
        "device": device.name(),
        "precision": "fp32" if dtype == torch.float32 else "bf16",
        "dit_dtype": parts.dtype_name(parts.dit_dtype(execution, dtype)),
        "kernel": pipeline.kernel,
    }


def demo_checkpoint(task: str, folder: Path) -> None:
    """Write the tiny random checkpoint that stands in where no trained one does."""
    from wan.pipeline.tiny import make_checkpoint

    logger.info("Making the tiny demo checkpoint %s (once).", folder)
    try:
        make_checkpoint(task, folder)
    except (OSError, InputError):
        if not folder.is_dir():  # otherwise another run has just made the same one
            raise
