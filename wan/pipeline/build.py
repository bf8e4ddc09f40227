"""The composition root: the one place that knows every class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from wan.cache.policy import Cache
from wan.cache.tea import embedding_changes
from wan.checkpoint.load import (
    WHOLE,
    Adapt,
    Blueprint,
    Place,
    as_stored,
    dit_dtypes,
    mapped,
    rotations,
)
from wan.checkpoint.merge import merged
from wan.device import Device, bf16_gain
from wan.distributed.exchange import ALONE, Group
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import Target
from wan.kernels.select import Selected, dense, select
from wan.log import Stages, logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import Attention, Collaborators, LocalAttention, LocalTokens
from wan.modules.model import WanModel
from wan.modules.schedule import heads_per_chunk
from wan.modules.small_ops import BlockOps, as_written
from wan.pipeline import bound, clip, text, vae
from wan.pipeline.adapt import adaptation
from wan.pipeline.clip import ClipVision
from wan.pipeline.decoding import Codec, MakeRows
from wan.pipeline.pipeline import ONE_PROCESS, Experts, Lazy, Pipeline, Sharing
from wan.pipeline.residency import Residency, streamed
from wan.pipeline.setup import Setup
from wan.pipeline.text import TextEncoder
from wan.pipeline.vae import VideoVAE
from wan.settings.errors import InputError
from wan.settings.parallel import Parallel
from wan.vae.sharded import ShardedRows, even

T = TypeVar("T")
_TIME_EMBEDDING = [f"time_embedding.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pipeline(
    setup: Setup,
    device: Device,
    team: Team | None = None,
    t5_dtype: torch.dtype | None = None,
    caches: Cache | None = None,
    attention: Callable[[Attention], Attention] | None = None,
) -> Pipeline:
    """Everything composed and no weight read yet; names and shapes of all tensors are checked.

    Args:
        setup: The checkpoint and the settings.
        device: This rank's.
        team: The ranks, in the topology of the setup; None for one process.
        t5_dtype: What the text encoder computes in; None: the run's precision.
        caches: In place of those that the setup asks for.
        attention: Gets the self-attention of a block and returns what the block uses instead.

    Raises:
        InputError: For a device that cannot run the setup, and for files that are damaged or do
            not belong together.
    """
    setup.check_device(device.can)
    checkpoint, execution = setup.checkpoint, setup.execution
    compute = DTYPES[execution.dit_precision_on(device.type)]
    exported = {}
    if setup.quantised is not None and setup.attention.fp8:
        exported = rotations(setup.quantised)
    target = Target(device, checkpoint.head_dim, compute)
    selected = select(setup.attention, target, exported, execution.compile)
    caches = step_caches(setup, team) if caches is None else caches

    def given(expert: str) -> Collaborators:
        found = collaborators(setup, selected, team, caches, expert)
        if attention is None:
            return found
        return replace(found, attention=lambda layer: attention(found.attention(layer)))

    beside = partial(bound.beside_blocks, setup)
    residency = Residency(device, execution.resident_blocks, beside, execution.offload_model)
    parts = _Parts(setup, residency, given, team)
    caches.changes = parts.changes
    stages = Stages(device.synchronize)

    def timed(load: Callable[[], T]) -> T:
        with stages("loading"):
            return load()

    logger.info(
        "%s checkpoint, %s, %s, %d x %d heads",
        checkpoint.layout,
        device.name(),
        execution.dit_precision_on(device.type),
        checkpoint.config["num_layers"],
        checkpoint.heads,
    )
    logger.info("%s", attention_line(setup, selected))
    if setup.has_fp8:
        kept = setup.keeps_fp8(device.type)
        logger.info("FP8 weights: %s", "kept, upcast when used" if kept else "upcast once")
    if any(expert.sparse_linear for expert in checkpoint.experts.values()):
        logger.info("Sparse-linear attention (proj_l) is left out; attention is dense.")
    if device.type == "cpu" and execution.precision == "auto" and logger.isEnabledFor(logging.INFO):
        _suggest_bf16()
    text_dtype = t5_dtype or DTYPES[execution.precision_on(device.type)]
    autoencoder = Lazy(lambda: timed(parts.video_vae))
    return Pipeline(
        device=device,
        text=Lazy(lambda: timed(lambda: parts.text_encoder(text_dtype)), parts.text_files()),
        vae=autoencoder,
        codec=Codec(setup, device, autoencoder.get, vae_rows(device, team)),
        clip=Lazy(lambda: timed(lambda: parts.clip_vision(text_dtype))),
        experts=Experts(
            lambda name: timed(lambda: parts.dit(name, compute)),
            offload=execution.offload_model,
            files=_weight_files(setup),
            whole=lambda name: timed(lambda: parts.dit(name, compute, whole=True)),
        ),
        text_size=(checkpoint.config["text_len"], checkpoint.config["text_dim"]),
        residency=residency,
        stages=stages,
        kernel=selected.describe(),
        merges=selected.dense.can_return_lse,
        caches=caches,
        sharing=sharing(setup.parallel, team),
    )


def dense_kernel(setup: Setup, device: Device) -> str:
    """What computes dense attention, in words; InputError where it does not compute here."""
    compute = DTYPES[setup.execution.dit_precision_on(device.type)]
    kernel = dense(setup.attention, Target(device, setup.checkpoint.head_dim, compute))
    return f"{kernel.name} {'with' if kernel.can_return_lse else 'without'} log-sum-exp"


def _suggest_bf16() -> None:
    gain = bf16_gain()
    if gain >= 1.5:
        logger.info(
            "This CPU multiplies matrices %.1f times as fast in bfloat16 as in float32: "
            "--precision bf16 makes use of it.",
            gain,
        )


def attention_line(setup: Setup, selected: Selected) -> str:
    """How self-attention is carried out, in one line for the start of a run."""
    attention, parallel = setup.attention, setup.parallel
    sizes = heads_per_chunk(setup.checkpoint.heads, parallel.ulysses_size, parallel.mode.chunks)
    each = "/".join(str(size) for size in sorted(set(sizes), reverse=True))
    chunks = f"{len(sizes)} head chunk{'s' if len(sizes) > 1 else ''} of {each} per rank"
    ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
    gathered = {
        "RainFusion": attention.use_rainfusion,
        "FP8 attention": attention.fp8,
        selected.dense.name: not attention.fp8 and not selected.dense.can_return_lse,
    }
    names = [name for name, is_it in gathered.items() if is_it] if parallel.ring_size > 1 else []
    without = f"; K/V are gathered over the ring for {' and '.join(names)} (no log-sum-exp)"
    return (
        f"Attention: {parallel.mode.name}, {chunks}; ulysses {parallel.ulysses_size} x ring "
        f"{parallel.ring_size}{ring} x cfg {parallel.cfg_size}; kernel {selected.describe()}; "
        f"{_quantised(setup)}, {_sparse(setup)}{without if names else ''}"
    )


def _quantised(setup: Setup) -> str:
    if not setup.attention.fp8:
        return "no quantisation"
    return "fp8 attention" + (" and exchanges" if setup.attention.quant_alltoall else "")


def _sparse(setup: Setup) -> str:
    attention = setup.attention
    if not attention.use_rainfusion:
        return "no sparsity"
    start, refresh = attention.sparse_start_step, attention.mask_refresh_interval
    begin = "after a quarter of the steps" if start is None else f"from step {start}"
    kept = f", masks for {refresh} steps" if refresh > 1 else ""
    return (
        f"RainFusion {attention.rainfusion_type} of sparsity {attention.sparsity:g} {begin}{kept}"
    )


class _Parts:
    """The networks of a checkpoint: compared with their files here, filled when needed."""

    def __init__(
        self,
        setup: Setup,
        residency: Residency,
        given: Callable[[str], Collaborators],
        team: Team | None,
    ) -> None:
        self._setup, self._residency = setup, residency
        self._device = residency.device.torch_device
        self._dit_place, self._t5_place = places(setup.parallel, team)
        checkpoint = setup.checkpoint
        self._dits = {
            name: Blueprint(
                f"DiT {name}",
                partial(WanModel, **files.config, collaborators=given(name)),
                files.tensors,
                files.folder,
            )
            for name, files in checkpoint.experts.items()
        }
        for dit in self._dits.values():
            dit.check()
        self._vae = None if checkpoint.vae is None else vae.blueprint(checkpoint.vae)
        path = checkpoint.image_encoder
        self._clip = None if path is None else clip.Blueprint(path)
        encoder = checkpoint.text_encoder
        self._encoder = None if encoder is None else text.blueprint(encoder)
        self._check_channels()
        # Each rank checks what it will load: the libraries and a tokenizer take memory and time.
        is_main = team is None or team.is_main
        if self._vae is not None and (is_main or setup.execution.vae_parallel):
            self._vae.check()
        self._tokenizer: object = None
        self._reads_text = is_main or setup.parallel.t5_fsdp
        if self._encoder is not None and self._reads_text:
            self._encoder.check()
            if checkpoint.tokenizer is not None:
                self._tokenizer = text.load_tokenizer(checkpoint.tokenizer)

    def _check_channels(self) -> None:
        """What is there must belong together; embeddings can replace a text encoder."""
        config = self._setup.checkpoint.config
        if self._vae is not None:
            channels = self._vae.tensors["post_quant_conv.weight"].shape[0]
            if channels != config["out_dim"]:
                raise InputError(
                    f"{self._vae.origin} has {channels} latent channels, the DiT "
                    f"{config['out_dim']}; they belong to different checkpoints: download the VAE "
                    "again."
                )
        if self._clip is not None and self._clip.dim != config["image_dim"]:
            raise InputError(
                f"{self._clip.origin} makes features of {self._clip.dim} channels, the DiT takes "
                f"{config['image_dim']}; they belong to different checkpoints: download both again."
            )
        if self._encoder is not None:
            width = self._encoder.tensors["shared.weight"].shape[1]
            if width != config["text_dim"]:
                raise InputError(
                    f"{self._encoder.origin} makes embeddings of {width} channels, the DiT takes "
                    f"{config['text_dim']}; they belong to different checkpoints: download both "
                    "again."
                )

    def dit(self, name: str, compute: torch.dtype, whole: bool = False) -> WanModel:
        """One expert. compute: the dtype of its matrix products. whole: it may be changed."""
        execution, offload = self._setup.execution, False if whole else self._residency.offload
        dtypes = dit_dtypes(compute, execution.convert_model_dtype)
        adapt = adaptation(self._setup, name, self._residency.device, compute)
        if offload == "block":
            resident = self._residency.resident
            adapt = streamed(adapt, "blocks", self._device, dtypes, resident)
        self._residency.leave()  # to what is loaded now
        model = self._dits[name].load(
            device=self._device, dtype_of=dtypes, place=self._dit_place, adapt=adapt
        )
        if offload == "cpu":
            self._residency.park(model, model.forget_text)
        if execution.compile:
            for block in model.blocks:
                block.compile()
        return model

    def changes(self, name: str, timesteps: Sequence[float]) -> list[float]:
        """How much an expert's time embedding differs from that of the timestep before."""
        read = merged(mapped(self._dits[name].tensors), self._setup.loras.get(name, ()))
        weights = {key: read[key].read(slice(None)).float() for key in _TIME_EMBEDDING}
        return embedding_changes(weights, timesteps)

    def text_files(self) -> set[Path]:
        """What is read for the text encoder by this rank."""
        if self._encoder is None or not self._reads_text:
            return set()
        return {info.file for info in self._encoder.tensors.values()}

    def text_encoder(self, compute: torch.dtype) -> TextEncoder:
        """compute: its dtype."""
        checkpoint = self._setup.checkpoint
        checkpoint.require("text_encoder"), checkpoint.require("tokenizer")
        assert self._encoder is not None
        device = torch.device("cpu") if self._setup.execution.t5_cpu else self._device
        offload, dtypes = self._residency.offload, text.dtypes(compute)
        adapt: Adapt = as_stored
        if offload == "block":
            adapt = streamed(adapt, text.BLOCKS, device, dtypes, table=text.TABLE)
        model = self._encoder.load(
            device=device, dtype_of=dtypes, place=self._t5_place, adapt=adapt
        )
        if offload == "cpu" and device.type != "cpu":
            self._residency.park(model)
        text_len = checkpoint.config["text_len"]
        return TextEncoder(model, self._tokenizer, dtype=compute, text_len=text_len)

    def clip_vision(self, compute: torch.dtype) -> ClipVision:
        """compute: its dtype."""
        self._setup.checkpoint.require("image_encoder")
        assert self._clip is not None
        return self._clip.load(self._device, compute)

    def video_vae(self) -> VideoVAE:
        self._setup.checkpoint.require("vae")
        assert self._vae is not None
        rounds = self._setup.execution.vae_precision == "bf16"
        dtype_of = vae.in_bfloat16 if rounds else vae.in_float32
        return VideoVAE(self._vae.load(device=self._device, dtype_of=dtype_of))


def step_caches(setup: Setup, team: Team | None) -> Cache:
    """What is kept from step to step, as the policy says."""
    together = setup.parallel.cfg_size == 2
    if setup.policy is None:
        return Cache()
    return setup.policy.cache(together, None if team is None else team.agree)


def collaborators(
    setup: Setup,
    selected: Selected,
    team: Team | None,
    caches: Cache | None = None,
    expert: str = "dit",
) -> Collaborators:
    """What the blocks of a network are given: attention, kernels, the tokens' shards, caches."""
    parallel, text_cache = setup.parallel, setup.execution.text_kv_cache
    ops = BlockOps(selected.ops, selected.run or as_written, selected.device_type)
    kept = (None, None) if caches is None else (caches.at("blocks"), caches.at("attention"))
    several = team is not None and parallel.sequence_size > 1
    if not (several or selected.methods or selected.clock):
        local = LocalAttention(selected.dense)
        return Collaborators(lambda _: local, selected.text, LocalTokens(), ops, text_cache, *kept)
    ulysses: Group = ALONE
    sequence: Group = ALONE
    ring = None
    if team is not None:
        ulysses, sequence = team.group("ulysses"), team.group("ring", "ulysses")
        ring = Ring(team.group("ring"), parallel.ring_type, selected.device_type)

    def attention(layer: int) -> Attention:
        return FAPowerCapAttention(
            parallel,
            ulysses,
            parallel.fa_alltoall_overlap,
            layer=layer,
            kernel=selected.dense,
            ring=ring,
            methods=selected.methods_of(expert, layer),
            clock=selected.clock,
            chunks=parallel.chunks,
        )

    multiple = setup.attention.row_multiple(parallel.ring_size) if several else 1
    tokens = ShardedTokens(sequence, multiple, selected.order)
    return Collaborators(attention, selected.text, tokens, ops, text_cache, *kept)


def places(parallel: Parallel, team: Team | None) -> tuple[Place, Place]:
    """Where the rows of the DiT's and of the text encoder's weights go."""
    dit: Place = WHOLE
    encoder: Place = WHOLE
    if team is not None and parallel.dit_fsdp:
        dit = Sharded(team.world_mesh(), lambda network: network.blocks)
    if team is not None and parallel.t5_fsdp:
        encoder = Sharded(team.world_mesh(), text.umt5_blocks)
    return dit, encoder


def vae_rows(device: Device, team: Team | None) -> MakeRows | None:
    """Which rank encodes and decodes which rows; None for one process."""
    if team is None:
        return None
    ranks, place = team.mesh.size(), device.torch_device

    def rows(height: int, shared: bool) -> ShardedRows:
        heights = even(height, ranks) if shared else (height, *[0] * (ranks - 1))
        return ShardedRows(None, heights, place)

    return rows


def sharing(parallel: Parallel, team: Team | None) -> Sharing:
    """How the ranks come to what only one of them makes, and to the two guidance branches."""
    if team is None:
        return ONE_PROCESS
    found = Sharing(latents=team.from_main)
    if not parallel.t5_fsdp:
        found = replace(found, text=team.from_main)
    if parallel.cfg_size == 2:
        found = replace(found, branches=team.both_branches)
    return found


def _weight_files(setup: Setup) -> dict[str, list[Path]]:
    """Each DiT's files that are worth reading ahead: most of what is read is in them."""
    if setup.quantised is not None:
        return {name: [export.weights] for name, export in setup.quantised.experts.items()}
    return {
        name: [tensor.file for tensor in dit.tensors.values()]
        for name, dit in setup.checkpoint.experts.items()
    }
