"""The parts of a run made from a checkpoint, each in its number format: DiT, text encoder, VAE.

The composition root: the one place that knows every class.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from wan import device as devices
from wan.checkpoint.layout import Checkpoint, DitConfig, DitFiles
from wan.checkpoint.load import (
    WHOLE,
    Adapt,
    Blueprint,
    Place,
    Sources,
    as_stored,
    dit_dtypes,
    int8_sources,
    rotations,
)
from wan.checkpoint.quantised import Export, QuantisedDit
from wan.device import Device
from wan.distributed import mesh
from wan.distributed.exchange import ALONE
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.kernels import select as attentions
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.kernels.select import AttentionParts
from wan.log import Stages, logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import LocalAttention, LocalTokens
from wan.modules.model import WanModel
from wan.modules.textcache import TextKVCache
from wan.pipeline.pipeline import Experts, Lazy, Pipeline
from wan.pipeline.text import TextEncoder, load_tokenizer, umt5_blocks
from wan.pipeline.text import blueprint as text_blueprint
from wan.pipeline.text import dtypes as text_dtypes
from wan.pipeline.vae import VideoVAE, in_float32
from wan.pipeline.vae import blueprint as vae_blueprint
from wan.settings import devices as on_device
from wan.settings import parallel as parallel_settings
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_parts(
    config: DitConfig, vae: Blueprint[nn.Module] | None, text: Blueprint[nn.Module] | None
) -> None:
    """The VAE and the text encoder must belong to the networks.

    Parts that are absent are left to those who need them: embeddings can replace a text encoder.
    """
    if vae is not None:
        channels = vae.tensors["post_quant_conv.weight"].shape[0]
        if channels != config["out_dim"]:
            raise InputError(
                f"{vae.origin} has {channels} latent channels, the DiT {config['out_dim']}; they "
                "belong to different checkpoints: download the VAE again."
            )
    if text is not None:
        width = text.tensors["shared.weight"].shape[1]
        if width != config["text_dim"]:
            raise InputError(
                f"{text.origin} makes embeddings of {width} channels, the DiT takes "
                f"{config['text_dim']}; they belong to different checkpoints: download both again."
            )


def precision(execution: Execution, device: Device) -> torch.dtype:
    choices = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": device.default_precision}
    return choices[execution.precision]


def dit_dtype(execution: Execution, dtype: torch.dtype) -> torch.dtype:
    """--convert_model_dtype stores the DiT in bf16, and so its products are computed in bf16."""
    return torch.bfloat16 if execution.convert_model_dtype else dtype


def dit(
    files: DitFiles, name: str, collaborators: dict[str, Any], execution: Execution
) -> Blueprint[WanModel]:
    """The network of one expert, not loaded yet."""

    def make() -> WanModel:
        cache = TextKVCache() if execution.text_kv_cache else None
        return WanModel(**files.config, **collaborators, text_cache=cache)

    return Blueprint(f"DiT {name}", make, files.tensors, files.folder)


def quantised_layers(export: Export, device: torch.device, compute: torch.dtype) -> Adapt:
    """Puts the layers of an export in the place of a DiT's linear layers: mindiesd's on an NPU,
    elsewhere our reference of the one algorithm that runs everywhere. The float weights of these
    layers are neither read nor given memory.

    compute: what goes into the layers and comes out; 16 bits on an NPU.
    """

    def on_npu(network: nn.Module, sources: Sources) -> Sources:
        npu_linear.quantise(
            network,
            export.description,
            export.linears,
            use_nz=export.use_nz,
            dtype=compute,
            device=device,
        )
        return sources

    def anywhere(network: nn.Module, sources: Sources) -> Sources:
        for name, layer in export.linears.items():
            empty = {
                part: torch.empty(info.shape, device="meta") for part, info in layer.tensors.items()
            }
            made = W8A8Linear(
                empty["weight"].to(torch.int8),
                empty["weight_scale"],
                empty.get("bias"),
                empty.get("mul_scale"),
                dtype=compute,
            )
            network.set_submodule(name, made)
        return {**sources, **int8_sources(export, compute)}

    if not export.linears:
        return as_stored
    return on_npu if device.type == "npu" else anywhere


def weight_files(checkpoint: Checkpoint, quantised: QuantisedDit | None) -> dict[str, list[Path]]:
    """Each network's files that are worth reading ahead: most of what is read is in them."""
    if quantised is not None:
        return {name: [export.weights] for name, export in quantised.experts.items()}
    return {
        name: [tensor.file for tensor in dit.tensors.values()]
        for name, dit in checkpoint.experts.items()
    }


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
    dtype = precision(execution, device)
    stages = Stages(device.synchronize)
    compute = dit_dtype(execution, dtype)
    config, head_dim = checkpoint.config, checkpoint.head_dim
    on_device.check(execution, attention, quantised, head_dim, device.type, device.chip)
    exported = {} if quantised is None or attention.fa_quant is None else rotations(quantised)
    chosen = attentions.parts(attention, device, head_dim, compute, exported)
    collaborators = _collaborators(parallel, attention, chosen, team)
    dit_place, t5_place = _places(parallel, team)
    networks = {
        name: dit(files, name, collaborators, execution)
        for name, files in checkpoint.experts.items()
    }
    for blueprint in networks.values():
        blueprint.check()
    vae = None if checkpoint.vae is None else vae_blueprint(checkpoint.vae)
    encoder = None if checkpoint.text_encoder is None else text_blueprint(checkpoint.text_encoder)
    check_parts(config, vae, encoder)
    # Each rank checks what it will load: the libraries and a tokenizer take memory and time.
    main, tokenizer = team is None or team.is_main, None
    if vae is not None and main:
        vae.check()
    if encoder is not None and (main or parallel.t5_fsdp):
        encoder.check()
        if checkpoint.tokenizer is not None:
            tokenizer = load_tokenizer(checkpoint.tokenizer)

    def timed(make: Callable[[], T]) -> Lazy[T]:
        def load() -> T:
            with stages("loading"):
                return make()

        return Lazy(load)

    def text_encoder() -> TextEncoder:
        checkpoint.require("tokenizer")
        compute = t5_dtype or dtype
        where = torch.device("cpu") if execution.t5_cpu else device.torch_device
        blueprint = encoder or text_blueprint(checkpoint.require("text_encoder"))
        model = blueprint.load(device=where, dtype_of=text_dtypes(compute), place=t5_place)
        return TextEncoder(model, tokenizer, dtype=compute, text_len=config["text_len"])

    def video_vae() -> VideoVAE:
        blueprint = vae or vae_blueprint(checkpoint.require("vae"))
        model = blueprint.load(device=device.torch_device, dtype_of=in_float32)
        return VideoVAE(model, tiling=execution.vae_tiling)

    def expert(name: str) -> WanModel:
        adapt: Adapt = as_stored
        if quantised is not None:
            adapt = quantised_layers(quantised.experts[name], device.torch_device, compute)
        with stages("loading"):
            model = networks[name].load(
                device=device.torch_device,
                dtype_of=dit_dtypes(compute, execution.convert_model_dtype),
                place=dit_place,
                adapt=adapt,
            )
        if execution.compile:
            for block in model.blocks:
                block.compile()
        return model

    logger.info(
        "%s checkpoint, %s, %s, %d x %d heads",
        checkpoint.layout,
        device.name(),
        dtype_name(compute),
        config["num_layers"],
        config["num_heads"],
    )
    logger.info("%s", attentions.line(attention, parallel, config["num_heads"], chosen.dense))
    return Pipeline(
        device=device,
        text=timed(text_encoder),
        vae=timed(video_vae),
        experts=Experts(
            expert,
            offload=execution.offload_model,
            files=weight_files(checkpoint, quantised),
        ),
        text_dim=config["text_dim"],
        text_len=config["text_len"],
        offload=execution.offload_model,
        stages=stages,
        kernel=chosen.dense.name,
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
    parallel: Parallel, attention: Attention, chosen: AttentionParts, team: Team | None
) -> dict[str, Any]:
    """What all blocks of all networks share: attention, its kernels, and the tokens' shards."""
    shared = {"kernel": chosen.text, "ops": chosen.ops}
    several = team is not None and parallel.sequence_size > 1
    if not (several or chosen.methods or chosen.clock):
        return shared | {"attention": LocalAttention(chosen.dense), "tokens": LocalTokens()}
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
    return shared | {"attention": layer, "tokens": ShardedTokens(group, multiple, chosen.order)}


def _places(parallel: Parallel, team: Team | None) -> tuple[Place, Place]:
    """Where the rows of the DiT's and of the text encoder's weights go."""
    dit: Place = WHOLE
    text: Place = WHOLE
    if team is not None and parallel.dit_fsdp:
        dit = Sharded(team.world_mesh(), lambda network: network.blocks)
    if team is not None and parallel.t5_fsdp:
        text = Sharded(team.world_mesh(), umt5_blocks)
    return dit, text


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
    dtype = precision(execution, device)
    return {
        "device": device.name(),
        "precision": "fp32" if dtype == torch.float32 else "bf16",
        "dit_dtype": dtype_name(dit_dtype(execution, dtype)),
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
