"""Builds a pipeline from a checkpoint and settings.

Modules that only some runs need (several ranks, changed weights, an image encoder, offloading) are
imported in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from wan import host
from wan.cache.policy import Cache
from wan.checkpoint.config import SoundConfig
from wan.checkpoint.files import FP8
from wan.checkpoint.load import (
    UNSHARDED,
    Adapt,
    Blueprint,
    Sharding,
    as_stored,
    dit_dtypes,
    mapped,
    merged,
    rotations,
)
from wan.device import Device
from wan.kernels.base import Target
from wan.kernels.select import SelectedKernels, make_dense_kernel, select_kernels
from wan.log import Stages, logger
from wan.modules.interfaces import LocalAttention, ModelComponents, SelfAttention, UnshardedSequence
from wan.modules.model import WanModel
from wan.modules.networks import build_dit
from wan.modules.small_ops import BlockOps, run_eager
from wan.pipeline import memory, sound, text, vae
from wan.pipeline.decoding import Codec, MakeRows
from wan.pipeline.denoise import both_here
from wan.pipeline.pipeline import Experts, Lazy, Pipeline, Residency, Sharing, make_here
from wan.pipeline.setup import KEEPABLE, Setup
from wan.pipeline.text import TextEncoder
from wan.pipeline.vae import VideoVAE
from wan.settings.errors import InputError
from wan.settings.parallel import Parallel
from wan.settings.schedule import heads_per_chunk

if TYPE_CHECKING:
    from wan.distributed.exchange import Group
    from wan.distributed.mesh import ParallelGroups
    from wan.pipeline.clip import ClipVision
    from wan.pipeline.media import Sound
    from wan.vae.sharded import ShardedRows

_TIME_EMBEDDING = [f"time_embedding.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pipeline(
    setup: Setup,
    device: Device,
    team: ParallelGroups | None = None,
    t5_dtype: torch.dtype | None = None,
    caches: Cache | None = None,
    attention: Callable[[SelfAttention], SelfAttention] | None = None,
) -> Pipeline:
    """Builds a pipeline; checks names and shapes of all tensors, but reads no weight.

    Args:
        groups: The parallel groups; None for one process.
        t5_dtype: The dtype of the text encoder; default: that of the run.
        step_cache: Replaces the step cache of the setup.
        wrap_attention: Gets a block's self-attention and returns its replacement.

    Raises:
        InputError: The device cannot run the setup, or files are damaged or do not belong together.
    """
    setup.check_device(device.can)
    checkpoint, execution = setup.checkpoint, setup.execution
    compute = DTYPES[execution.dit_precision_on(device.type)]
    exported = {}
    if setup.quantised is not None and setup.attention.fp8:
        exported = rotations(setup.quantised)
    if setup.multiplies_fp8:
        from wan.kernels.weight_only_linear import check_fp8_device

        check_fp8_device(device.torch_device)
    target = Target(device, checkpoint.head_dim, compute)
    selected = select_kernels(setup.attention, target, exported, execution.compile)
    caches = step_caches(setup, team) if caches is None else caches

    def given(expert: str) -> ModelComponents:
        found = collaborators(setup, selected, team, caches, expert)
        if attention is None:
            return found
        return replace(found, attention=lambda layer: attention(found.attention(layer)))

    loader = NetworkLoader(
        setup=setup,
        residency=Residency(
            device,
            execution.resident_blocks,
            partial(memory.beside_blocks, setup),
            execution.offload_model,
        ),
        team=team,
        compute=compute,
        encode_in=t5_dtype or DTYPES[execution.precision_on(device.type)],
        given=given,
    )
    caches.compute_changes = loader.changes
    _log_start(setup, device, selected)
    sharing, parallel = Sharing(), setup.parallel
    if team is not None:
        sharing = Sharing(
            text=make_here if parallel.t5_fsdp else team.broadcast_from_rank0,
            latents=team.broadcast_from_rank0,
            branches=team.compute_branches if parallel.cfg_size == 2 else both_here,
        )
    stages = Stages(device.synchronize)
    loading = stages("loading")
    autoencoder = Lazy(loading(loader.video_vae))
    return Pipeline(
        device=device,
        text=Lazy(loading(loader.text_encoder), loader.text_files()),
        vae=autoencoder,
        codec=Codec(setup, device, autoencoder.get, vae_rows(device, team)),
        clip=Lazy(loading(loader.clip_vision)),
        experts=Experts(
            loading(loader.dit),
            offload=execution.offload_model,
            files=loader.dit_files(),
            whole=loading(partial(loader.dit, whole=True)),
        ),
        text_size=(checkpoint.config["text_len"], checkpoint.config["text_dim"]),
        residency=loader.residency,
        stages=stages,
        kernel=selected.describe(),
        merges=selected.dense_kernel.can_return_lse,
        caches=caches,
        sharing=sharing,
        hearing=loader.hear,
        is_main=team is None or team.is_main,
        overlaps=execution.overlap_decoding,
    )


def dense_kernel(setup: Setup, device: Device) -> str:
    """Names the dense attention kernel; raises InputError if this device cannot run it."""
    compute = DTYPES[setup.execution.dit_precision_on(device.type)]
    kernel = make_dense_kernel(setup.attention, Target(device, setup.checkpoint.head_dim, compute))
    return f"{kernel.name} {'with' if kernel.can_return_lse else 'without'} log-sum-exp"


def _log_start(setup: Setup, device: Device, selected: SelectedKernels) -> None:
    """Logs the checkpoint, the device, attention settings and dtypes of weights."""
    checkpoint, execution = setup.checkpoint, setup.execution
    precision, layers = execution.dit_precision_on(device.type), checkpoint.config["num_layers"]
    network = f"{precision}, {layers} x {checkpoint.heads} heads"
    logger.info("%s checkpoint, %s, %s", checkpoint.layout, device.name(), network)
    logger.info("%s", attention_line(setup, selected))
    for name, kinds in KEEPABLE.items():
        if held := setup.kinds & {*kinds}:
            kept = held & setup.kept(device.type)
            how = "kept, upcast when used" if kept else "upcast once"
            how = "kept, products in FP8" if kept & {*FP8} and setup.multiplies_fp8 else how
            logger.info("%s weights: %s", name.removesuffix("_weights").upper(), how)
    if any(expert.sparse_linear for expert in checkpoint.experts.values()):
        logger.info("Sparse-linear attention (proj_l) is left out; attention is dense.")
    is_large = checkpoint.config["dim"] >= 1024  # not that of the demo
    could_be_bf16 = device.type == "cpu" and execution.precision == "auto" and is_large
    if could_be_bf16 and host.has_bfloat16():
        logger.info("This CPU has bfloat16 units: --precision bf16 uses them.")


def attention_line(setup: Setup, selected: SelectedKernels) -> str:
    """Describes the self-attention settings in one line, for the start of a run."""
    attention, parallel = setup.attention, setup.parallel
    sizes = heads_per_chunk(setup.checkpoint.heads, parallel.ulysses_size, parallel.mode.chunks)
    each = "/".join(str(size) for size in sorted(set(sizes), reverse=True))
    chunks = f"{len(sizes)} head chunk{'s' if len(sizes) > 1 else ''} of {each} per rank"
    exchange = ""
    if parallel.ulysses_size > 1:
        exchange = f"; exchanges {setup.exchange_on(selected.device_type)}"
        if parallel.exchange == "auto" and exchange.endswith("split"):
            exchange += " (fused: not measured here)"
    ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
    quantised = "no quantisation"
    if attention.fp8:
        quantised = "fp8 attention" + (" and exchanges" if attention.quant_alltoall else "")
    sparse = "no sparsity"
    if attention.use_rainfusion:
        start, refresh = attention.sparse_start_step, attention.mask_refresh_interval
        begin = "after a quarter of the steps" if start is None else f"from step {start}"
        kept = f", masks for {refresh} steps" if refresh > 1 else ""
        kind = f"RainFusion {attention.rainfusion_type} of sparsity {attention.sparsity:g}"
        sparse = f"{kind} {begin}{kept}"
    gathered = {
        "RainFusion": attention.use_rainfusion,
        "FP8 attention": attention.fp8,
        selected.dense_kernel.name: not attention.fp8 and not selected.dense_kernel.can_return_lse,
    }
    names = [name for name, is_it in gathered.items() if is_it] if parallel.ring_size > 1 else []
    without = f"; K/V are gathered over the ring for {' and '.join(names)} (no log-sum-exp)"
    return (
        f"Attention: {parallel.mode.name}, {chunks}; ulysses {parallel.ulysses_size} x ring "
        f"{parallel.ring_size}{ring} x cfg {parallel.cfg_size}{exchange}; "
        f"kernel {selected.describe()}; {quantised}, {sparse}{without if names else ''}"
    )


@dataclass
class NetworkLoader:
    """Checks a checkpoint's files against its networks at once, and loads the networks on demand.

    Attributes:
        groups: The parallel groups; None for one process.
        compute_dtype: The dtype of the DiTs' matrix products.
        encoder_dtype: The dtype of the text and the image encoder.
        make_components: Returns the components of an expert's blocks.
    """

    setup: Setup
    residency: Residency
    team: ParallelGroups | None
    compute: torch.dtype
    encode_in: torch.dtype
    given: Callable[[str], ModelComponents]

    def __post_init__(self) -> None:
        setup, checkpoint = self.setup, self.setup.checkpoint
        self._device = self.residency.device.torch_device
        self._dit_sharding, self._t5_sharding = shardings(setup.parallel, self.team)
        self._dits = {
            name: Blueprint(
                f"DiT {name}",
                partial(build_dit, files.config, self.given(name)),
                files.tensors,
                files.folder,
            )
            for name, files in checkpoint.experts.items()
        }
        for dit in self._dits.values():
            dit.check()
        found, config = [], checkpoint.config
        self._vae = self._clip = self._encoder = None
        if checkpoint.vae is not None:
            self._vae = vae.blueprint(checkpoint.vae)
            channels = self._vae.tensors["post_quant_conv.weight"].shape[0]
            found.append((self._vae.origin, "latent channels", channels, config["out_dim"]))
        if checkpoint.image_encoder is not None:
            from wan.pipeline import clip

            self._clip = clip.blueprint(checkpoint.image_encoder)
            channels = self._clip.tensors["embeddings.patch_embedding.weight"].shape[0]
            found.append((self._clip.origin, "channels of features", channels, config["image_dim"]))
        if checkpoint.text_encoder is not None:
            self._encoder = text.blueprint(checkpoint.text_encoder)
            channels = self._encoder.tensors["shared.weight"].shape[1]
            name = "channels of embeddings"
            found.append((self._encoder.origin, name, channels, config["text_dim"]))
        for origin, name, own, taken in found:
            if own != taken:
                why = f"has {own} {name}, the DiT {taken}: they belong to different checkpoints"
                raise InputError(str(origin), None, why, "download both again")
        # Each rank only checks networks that it loads: a tokenizer takes memory and time.
        is_main = self.team is None or self.team.is_main
        if self._vae is not None and (is_main or setup.execution.vae_parallel):
            self._vae.check()
        if self._clip is not None and is_main:
            self._clip.check()
        if checkpoint.sound_encoder is not None and is_main:
            sound.check(checkpoint.sound_encoder, cast(SoundConfig, config)["audio_dim"])
        self._tokenizer: object = None
        self._reads_text = is_main or setup.parallel.t5_fsdp
        if self._encoder is not None and self._reads_text:
            self._encoder.check()
            if checkpoint.tokenizer is not None:
                self._tokenizer = text.load_tokenizer(checkpoint.tokenizer)

    def dit(self, name: str, *, whole: bool = False) -> WanModel:
        """Loads one expert. editable: Its weights stay on the device and may be changed."""
        setup, execution = self.setup, self.setup.execution
        offload = False if whole else self.residency.offload
        dtypes = dit_dtypes(self.compute, execution.convert_model_dtype)
        adapt: Adapt = as_stored
        if setup.changes_weights(name, self._device.type):
            from wan.pipeline.adapt import adaptation

            adapt = adaptation(setup, name, self.residency.device, self.compute)
        if offload == "block":
            from wan.pipeline.residency import streamed

            resident = self.residency.resident
            behind = lambda network, layer: network.behind(layer)  # noqa: E731
            adapt = streamed(adapt, "blocks", self._device, dtypes, resident, behind=behind)
        self.residency.leave()  # free memory for the new network
        model = self._dits[name].load(
            device=self._device, dtype_of=dtypes, sharding=self._dit_sharding, adapt=adapt
        )
        if offload == "cpu":
            self.residency.park(model, model.clear_caches)
        if execution.compile:
            for block in model.wan_blocks():
                block.compile()
        return model

    def dit_files(self) -> dict[str, list[Path]]:
        """Lists the files with most of each expert's weights, for prefetching."""
        if self.setup.quantised is not None:
            exports = self.setup.quantised.experts
            return {name: [export.weights] for name, export in exports.items()}
        return {
            name: [tensor.file for tensor in dit.tensors.values()]
            for name, dit in self._dits.items()
        }

    def changes(self, name: str, timesteps: Sequence[float]) -> list[float]:
        """Computes the change of an expert's time embedding from each timestep to the next."""
        from wan.cache.tea import compute_embedding_changes

        read = merged(mapped(self._dits[name].tensors), self.setup.loras.get(name, ()))
        weights = {key: read[key].read(slice(None)).float() for key in _TIME_EMBEDDING}
        return compute_embedding_changes(weights, timesteps)

    def text_files(self) -> set[Path]:
        """Lists the files of the text encoder that this rank reads."""
        if self._encoder is None or not self._reads_text:
            return set()
        return {info.file for info in self._encoder.tensors.values()}

    def text_encoder(self) -> TextEncoder:
        """Loads the text encoder."""
        checkpoint = self.setup.checkpoint
        checkpoint.require("text_encoder"), checkpoint.require("tokenizer")
        assert self._encoder is not None
        device = torch.device("cpu") if self.setup.execution.t5_cpu else self._device
        offload, dtypes = self.residency.offload, text.dtypes(self.encode_in)
        adapt: Adapt = as_stored
        if offload == "block":
            from wan.pipeline.residency import streamed

            adapt = streamed(adapt, text.BLOCKS, device, dtypes, table=text.TABLE)
        model = self._encoder.load(
            device=device, dtype_of=dtypes, sharding=self._t5_sharding, adapt=adapt
        )
        if offload == "cpu" and device.type != "cpu":
            self.residency.park(model)
        length = checkpoint.config["text_len"]
        return TextEncoder(model, self._tokenizer, dtype=self.encode_in, text_len=length)

    def clip_vision(self) -> ClipVision:
        """Loads the image encoder."""
        self.setup.checkpoint.require("image_encoder")
        assert self._clip is not None
        from wan.pipeline.clip import ClipVision, with_positions

        network = self._clip.load(
            device=self._device, dtype_of=lambda *_: self.encode_in, adapt=with_positions
        )
        return ClipVision(network)

    def hear(self, heard: Sound) -> Tensor:
        """Computes audio features on the CPU; the encoder is released afterwards."""
        return sound.features(self.setup.checkpoint.require("sound_encoder"), heard)

    def video_vae(self) -> VideoVAE:
        """Loads the VAE."""
        self.setup.checkpoint.require("vae")
        assert self._vae is not None
        dtype = DTYPES[self.setup.execution.vae_precision]
        return VideoVAE(self._vae.load(device=self._device, dtype_of=lambda *_: dtype))


def step_caches(setup: Setup, team: ParallelGroups | None) -> Cache:
    """Builds the step cache from the setup's policy."""
    together = setup.parallel.cfg_size == 2
    if setup.policy is None:
        return Cache()
    return setup.policy.make_cache(together, None if team is None else team.all_agree)


def collaborators(
    setup: Setup,
    selected: SelectedKernels,
    team: ParallelGroups | None,
    caches: Cache | None = None,
    expert: str = "dit",
) -> ModelComponents:
    """Builds the components of an expert's blocks: attention, kernels, sequence shard, caches."""
    parallel, text_cache = setup.parallel, setup.execution.text_kv_cache
    ops = BlockOps(selected.ops, selected.op_runner or run_eager, selected.device_type)
    kept = (
        (None, None)
        if caches is None
        else (caches.get_if_skips("blocks"), caches.get_if_skips("attention"))
    )
    several = team is not None and parallel.sequence_size > 1
    if not (several or selected.backends or selected.clock):
        local = LocalAttention(selected.dense_kernel)
        return ModelComponents(
            lambda _: local, selected.text_kernel, UnshardedSequence(), ops, text_cache, *kept
        )
    from wan.distributed.exchange import SINGLE_RANK
    from wan.distributed.ring import Ring
    from wan.distributed.tokens import ShardedSequence
    from wan.modules.attnlayer import FAPowerCapAttention

    ulysses: Group = SINGLE_RANK
    sequence: Group = SINGLE_RANK
    ring = None
    if team is not None:
        ulysses, sequence = team.group("ulysses"), team.group("ring", "ulysses")
        ring = Ring(team.group("ring"), parallel.ring_type, selected.device_type)

    def attention(layer: int) -> SelfAttention:
        return FAPowerCapAttention(
            parallel,
            ulysses,
            parallel.fa_alltoall_overlap,
            layer=layer,
            kernel=selected.dense_kernel,
            ring=ring,
            methods=selected.get_backends(expert, layer),
            clock=selected.clock,
            chunks=parallel.chunks,
            exchange=setup.exchange_on(selected.device_type),
            contiguous=selected.device_type not in setup.attention.dense.strided,
        )

    multiple = setup.attention.row_multiple(parallel.ring_size) if several else 1
    tokens = ShardedSequence(sequence, multiple, selected.token_order)
    return ModelComponents(attention, selected.text_kernel, tokens, ops, text_cache, *kept)


def shardings(parallel: Parallel, team: ParallelGroups | None) -> tuple[Sharding, Sharding]:
    """Returns the FSDP sharding of the DiT's and of the text encoder's weights."""
    dit: Sharding = UNSHARDED
    encoder: Sharding = UNSHARDED
    if team is not None and (parallel.dit_fsdp or parallel.t5_fsdp):
        from wan.distributed.fsdp import FsdpSharding

        if parallel.dit_fsdp:
            dit = FsdpSharding(team.world_mesh(), lambda network: network.parts())
        if parallel.t5_fsdp:
            encoder = FsdpSharding(team.world_mesh(), text.umt5_blocks)
    return dit, encoder


def vae_rows(device: Device, team: ParallelGroups | None) -> MakeRows | None:
    """Assigns the rows that each rank encodes and decodes; None for one process."""
    if team is None:
        return None
    from wan.vae.sharded import ShardedRows, split_rows_evenly

    ranks, place = team.mesh.size(), device.torch_device

    def rows(height: int, shared: bool) -> ShardedRows:
        heights = split_rows_evenly(height, ranks) if shared else (height, *[0] * (ranks - 1))
        return ShardedRows(None, heights, place)

    return rows
