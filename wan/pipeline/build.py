"""Builds a pipeline from a checkpoint and settings.

Modules that only some runs need (several ranks, changed weights, an image encoder, offloading) are
imported in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from wan.cache.policy import Cache
from wan.checkpoint.config import S2VConfig
from wan.checkpoint.formats.tensor_info import E4M3, FP8, GGUF
from wan.checkpoint.load import (
    UNSHARDED,
    ModelSpec,
    Sharding,
    WeightTransform,
    keep_sources,
    load_rotations,
    make_dit_dtype_rule,
    open_sources,
)
from wan.checkpoint.lora.merge import merge_loras
from wan.device import Device
from wan.kernels.interfaces import Target
from wan.kernels.registry import SelectedKernels, make_dense_kernel, select_kernels
from wan.modules import audio_encoder, t5
from wan.modules.fused_ops import BlockOps, run_eager
from wan.modules.interfaces import (
    ModelComponents,
    SelfAttention,
    SingleDeviceAttention,
    UnshardedSequence,
)
from wan.modules.model import WanModel
from wan.modules.t5 import TextEncoder
from wan.modules.vae import video_vae
from wan.modules.vae.video_vae import VideoVAE
from wan.pipeline import memory_estimate
from wan.pipeline.pipeline import (
    Experts,
    LazyModule,
    OffloadManager,
    Pipeline,
    run_locally,
)
from wan.pipeline.setup import Setup
from wan.pipeline.vae_runner import MakeRows, VaeRunner
from wan.pipeline.video_loras import VideoLoraLoader
from wan.settings.attention_modes import count_heads_per_chunk
from wan.settings.errors import InputError
from wan.settings.parallel import Parallel
from wan.tasks.base import VideoParams, build_dit
from wan.utils import system
from wan.utils.log import StageTimer, logger
from wan.utils.torch_private import has_amx, has_avx512_bf16, use_private_compiler_cache

if TYPE_CHECKING:
    from wan.distributed.mesh import ParallelGroups
    from wan.distributed.ulysses import Group
    from wan.media.audio import Audio
    from wan.modules.clip import ClipVision
    from wan.modules.vae.sharded import ShardedRows

_TIME_EMBEDDING = [f"time_embedding.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build_pipeline(
    setup: Setup,
    device: Device,
    groups: ParallelGroups | None = None,
    t5_dtype: torch.dtype | None = None,
    step_cache: Cache | None = None,
    wrap_attention: Callable[[SelfAttention], SelfAttention] | None = None,
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
    setup.check_device(device.capabilities)
    checkpoint, execution = setup.checkpoint, setup.execution
    compute_dtype = DTYPES[execution.get_dit_precision(device.type)]
    exported = {}
    if setup.quantized_dit is not None and setup.attention.fp8:
        exported = load_rotations(setup.quantized_dit)
    if setup.multiplies_fp8:
        from wan.kernels.weight_only_linear import check_fp8_device

        check_fp8_device(device.torch_device)
    target = Target(device, checkpoint.head_dim, compute_dtype)
    selected = select_kernels(setup.attention, target, exported, execution.compile)
    step_cache = build_step_cache(setup, groups) if step_cache is None else step_cache

    def keeps_kv_in_host_memory() -> bool:
        params, num_bytes = loader.offload_manager.params, device.process_memory()
        if params is None or num_bytes is None:
            return False
        host_memory = system.read_available_memory()
        video_setup = memory_estimate.place_kept_kv(
            setup, params, device.type, num_bytes, host_memory
        )
        if video_setup.keeps_kv_in_host_memory:
            logger.info("Kept keys and values do not fit on the device; host memory has them.")
        return video_setup.keeps_kv_in_host_memory

    def select_ops(params: VideoParams) -> None:
        if selected.compiled_ops is not None:
            work = memory_estimate.count_block_elements(setup, params)
            selected.compiled_ops.start_video(work)

    def make_components(expert: str) -> ModelComponents:
        components = replace(
            build_components(setup, selected, groups, step_cache, expert),
            streams_reference=execution.offload_model == "block",
            keeps_kv_in_host_memory=keeps_kv_in_host_memory,
        )
        if wrap_attention is None:
            return components
        return replace(
            components, attention=lambda layer: wrap_attention(components.attention(layer))
        )

    loader = NetworkLoader(
        setup=setup,
        offload_manager=OffloadManager(
            device,
            execution.resident_blocks,
            partial(memory_estimate.estimate_denoising_bytes_without_blocks, setup),
            execution.offload_model,
        ),
        groups=groups,
        compute_dtype=compute_dtype,
        encoder_dtype=t5_dtype or DTYPES[execution.get_precision(device.type)],
        make_components=make_components,
        compiles_blocks=execution.compile and _can_compile_blocks(groups),
    )
    step_cache.compute_changes = loader.compute_embedding_changes
    _log_setup(setup, device, selected)
    parallel = setup.parallel
    run_on_rank0 = run_locally if groups is None else groups.broadcast_from_rank0
    stages = StageTimer(device.synchronize)
    loading = stages("loading")
    autoencoder = LazyModule(loading(loader.load_video_vae))
    return Pipeline(
        device=device,
        text_encoder=LazyModule(
            loading(loader.load_text_encoder), loader.list_text_encoder_files()
        ),
        vae=autoencoder,
        vae_runner=VaeRunner(setup, device, autoencoder.get, assign_vae_rows(device, groups)),
        clip_vision=LazyModule(loading(loader.load_clip_vision)),
        experts=Experts(
            loading(loader.load_dit),
            offload=execution.offload_model,
            files=loader.list_dit_files(),
            load_editable=loading(partial(loader.load_dit, editable=True)),
        ),
        text_size=(checkpoint.config["text_len"], checkpoint.config["text_dim"]),
        offload_manager=loader.offload_manager,
        stage_timer=stages,
        kernel_name=selected.describe(),
        can_return_lse=selected.dense_kernel.can_return_lse,
        step_cache=step_cache,
        run_text_encoder=run_locally if parallel.t5_fsdp else run_on_rank0,
        run_on_rank0=run_on_rank0,
        run_branches=None if groups is None or parallel.cfg_size < 2 else groups.compute_branches,
        encode_audio=loader.encode_audio,
        is_main=groups is None or groups.is_main,
        overlap_decoding=execution.overlap_decoding,
        select_ops=select_ops,
        video_loras=VideoLoraLoader(
            device.torch_device,
            make_dit_dtype_rule(compute_dtype, execution.convert_model_dtype),
            int(setup.lora_options.lora_cache * 1e9),
        ),
    )


def check_network_files(setup: Setup) -> None:
    """Refuses files that do not fit their networks, as the start of a run does; reads no weight.

    Networks without files, of which a plan has the published sizes, are not checked.
    """
    if setup.quantized_dit is not None and setup.attention.fp8:
        load_rotations(setup.quantized_dit)
    device = Device(torch.device("meta"), memory_estimate.find_planned_capabilities(setup))
    NetworkLoader(
        setup=setup,
        offload_manager=OffloadManager(device, None, lambda _: 0),
        groups=None,
        compute_dtype=torch.float32,
        encoder_dtype=torch.float32,
        make_components=lambda _: ModelComponents(),
    )


def describe_dense_kernel(setup: Setup, device: Device) -> str:
    """Names the dense attention kernel; raises InputError if this device cannot run it."""
    dtype = DTYPES[setup.execution.get_dit_precision(device.type)]
    kernel = make_dense_kernel(setup.attention, Target(device, setup.checkpoint.head_dim, dtype))
    return f"{kernel.name} {'with' if kernel.can_return_lse else 'without'} log-sum-exp"


def _log_setup(setup: Setup, device: Device, selected: SelectedKernels) -> None:
    """Logs the checkpoint, the device, attention settings and dtypes of weights."""
    checkpoint, execution = setup.checkpoint, setup.execution
    precision, layers = execution.get_dit_precision(device.type), checkpoint.config["num_layers"]
    network = f"{precision}, {layers} x {checkpoint.num_heads} heads"
    layout = f"Checkpoint in the {checkpoint.folder_format} layout"
    logger.info("%s, %s, %s", layout, device.name(), network)
    logger.info("%s", describe_attention(setup, selected))
    for name, kinds in {"FP8": FP8, "GGUF": GGUF}.items():
        if stored_dtypes := setup.checkpoint_dtypes & {*kinds}:
            dtypes = stored_dtypes & setup.unconverted_dtypes(device.type)
            usage = "kept, upcast when used" if dtypes else "upcast once"
            usage = "kept, products in FP8" if E4M3 in dtypes and setup.multiplies_fp8 else usage
            logger.info("%s weights: %s", name, usage)
    if any(expert.sparse_linear for expert in checkpoint.experts.values()):
        logger.info("Sparse-linear attention (proj_l) is left out; attention is dense.")
    precisions = execution.get_dit_precision(device.type), execution.vae_precision
    is_auto = device.type == "cpu" and execution.precision == "auto"
    is_large = checkpoint.config["dim"] >= 1024  # not that of the demo
    could_be_bf16 = is_auto and is_large and precisions == ("fp32", "fp32")
    if could_be_bf16 and (has_amx() or has_avx512_bf16()):
        logger.info(
            "This CPU has bfloat16 units: --precision bf16 --vae_precision bf16 takes less time "
            "(with AMX about 0.4 of it)."
        )


def describe_attention(setup: Setup, selected: SelectedKernels) -> str:
    """Describes the self-attention settings in one line, for the start of a run."""
    attention, parallel = setup.attention, setup.parallel
    sizes = count_heads_per_chunk(
        setup.checkpoint.num_heads, parallel.ulysses_size, parallel.mode.chunks
    )
    chunk_sizes = "/".join(str(size) for size in sorted(set(sizes), reverse=True))
    chunks = f"{len(sizes)} head chunk{'s' if len(sizes) > 1 else ''} of {chunk_sizes} per rank"
    exchange = ""
    if parallel.ulysses_size > 1:
        exchange = f"; exchanges {setup.exchange_on(selected.device_type)}"
        if parallel.exchange == "auto" and exchange.endswith("split"):
            exchange += " (fused: not measured here)"
    ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
    quantization = "no quantisation"
    if attention.fp8:
        quantization = "fp8 attention" + (" and exchanges" if attention.quant_alltoall else "")
    sparse = "no sparsity"
    if attention.use_rainfusion:
        start, refresh = attention.sparse_start_step, attention.mask_refresh_interval
        start_text = "after a quarter of the steps" if start is None else f"from step {start}"
        mask_reuse = f", masks for {refresh} steps" if refresh > 1 else ""
        kind = f"RainFusion {attention.rainfusion_type} of sparsity {attention.sparsity:g}"
        sparse = f"{kind} {start_text}{mask_reuse}"
    gathered = {
        "RainFusion": attention.use_rainfusion,
        "FP8 attention": attention.fp8,
        selected.dense_kernel.name: not attention.fp8 and not selected.dense_kernel.can_return_lse,
    }
    names = (
        [name for name, is_used in gathered.items() if is_used] if parallel.ring_size > 1 else []
    )
    gather_note = f"; K/V are gathered over the ring for {' and '.join(names)} (no log-sum-exp)"
    return (
        f"Attention: {parallel.mode.name}, {chunks}; ulysses {parallel.ulysses_size} x ring "
        f"{parallel.ring_size}{ring} x cfg {parallel.cfg_size}{exchange}; "
        f"kernel {selected.describe()}; {quantization}, {sparse}{gather_note if names else ''}"
    )


def _can_compile_blocks(groups: ParallelGroups | None) -> bool:
    """Whether all ranks have a folder for compiled code; a warning gives the reason."""
    try:
        use_private_compiler_cache()
        problem = None
    except InputError as error:
        problem = str(error)
    problems = [problem] if groups is None else groups.gather(problem)
    problem = next(filter(None, problems), None)
    if problem is not None:
        logger.warning("The blocks are not compiled, which costs speed only: %s", problem)
    return problem is None


def _check_channels(spec: ModelSpec[Any], noun: str, channels: int, expected: int) -> None:
    """Refuses a network that was made for DiTs of other sizes."""
    if channels != expected:
        why = f"has {channels} {noun}, the DiT {expected}: they belong to different checkpoints"
        raise InputError(str(spec.origin), None, why, "download both again")


@dataclass
class NetworkLoader:
    """Checks a checkpoint's files against its networks at once, and loads the networks on demand.

    Attributes:
        groups: The parallel groups; None for one process.
        compute_dtype: The dtype of the DiTs' matrix products.
        encoder_dtype: The dtype of the text and the image encoder.
        make_components: Returns the components of an expert's blocks.
        compiles_blocks: The blocks are compiled by torch.compile.
    """

    setup: Setup
    offload_manager: OffloadManager
    groups: ParallelGroups | None
    compute_dtype: torch.dtype
    encoder_dtype: torch.dtype
    make_components: Callable[[str], ModelComponents]
    compiles_blocks: bool = False

    def __post_init__(self) -> None:
        setup, ckpt = self.setup, self.setup.checkpoint
        self._device = self.offload_manager.device.torch_device
        self._dit_sharding, self._t5_sharding = make_weight_shardings(setup.parallel, self.groups)
        self._dit_specs = {
            name: ModelSpec(
                f"DiT {name}",
                partial(build_dit, files.config, self.make_components(name)),
                files.tensors,
                files.folder,
            )
            for name, files in ckpt.experts.items()
            if files.tensors
        }
        for dit in self._dit_specs.values():
            dit.check()
        config, is_main = ckpt.config, self.groups is None or self.groups.is_main
        self._vae_spec = self._clip_spec = self._text_encoder_spec = None
        # Each rank only checks networks that it loads: a tokenizer takes memory and time.
        if ckpt.vae is not None:
            self._vae_spec = video_vae.read_vae_spec(ckpt.vae)
            shape = self._vae_spec.tensors["post_quant_conv.weight"].shape
            _check_channels(self._vae_spec, "latent channels", shape[0], config["out_dim"])
            if is_main or setup.execution.vae_parallel:
                self._vae_spec.check()
        if ckpt.image_encoder is not None:
            from wan.modules import clip

            self._clip_spec = clip.make_clip_spec(ckpt.image_encoder)
            shape = self._clip_spec.tensors["embeddings.patch_embedding.weight"].shape
            _check_channels(self._clip_spec, "channels of features", shape[0], config["image_dim"])
            if is_main:
                self._clip_spec.check()
        if ckpt.audio_encoder is not None and is_main:
            audio_dim = cast(S2VConfig, config)["audio_dim"]
            audio_encoder.check_audio_encoder(ckpt.audio_encoder, audio_dim)
        self._tokenizer: object = None
        self._runs_text_encoder = is_main or setup.parallel.t5_fsdp
        if ckpt.text_encoder is not None:
            self._text_encoder_spec = spec = t5.read_text_encoder_spec(ckpt.text_encoder)
            shape = spec.tensors["shared.weight"].shape
            _check_channels(spec, "channels of embeddings", shape[1], config["text_dim"])
            if self._runs_text_encoder:
                spec.check()
                self._tokenizer = t5.load_tokenizer(ckpt.tokenizer) if ckpt.tokenizer else None

    def load_dit(self, name: str, *, editable: bool = False) -> WanModel:
        """Loads one expert. editable: Its weights stay on the device and may be changed."""
        setup, execution = self.setup, self.setup.execution
        offload = False if editable else self.offload_manager.offload
        dtypes = make_dit_dtype_rule(self.compute_dtype, execution.convert_model_dtype)
        transform: WeightTransform = keep_sources
        if setup.changes_weights(name, self._device.type):
            from wan.pipeline.weight_transforms import make_weight_transform

            transform = make_weight_transform(
                setup, name, self.offload_manager.device, self.compute_dtype
            )
        if offload == "block":
            from wan.pipeline.offload import stream_blocks

            count_resident_blocks = self.offload_manager.count_resident_blocks
            get_adapters = lambda network, layer: network.adapter_modules(layer)  # noqa: E731
            transform = stream_blocks(
                transform,
                "blocks",
                self._device,
                dtypes,
                count_resident_blocks,
                adapter_modules=get_adapters,
            )
        self.offload_manager.free_device_memory()  # free memory for the new network
        model = self._dit_specs[name].load(
            device=self._device, dtype_of=dtypes, sharding=self._dit_sharding, transform=transform
        )
        if offload == "block" and model.hold_weights is None:
            model.hold_weights = nullcontext  # the first sample's call copies the block
        if offload == "cpu":
            self.offload_manager.register(model, model.clear_caches)
        if self.compiles_blocks:
            for block in model.self_attention_blocks():
                block.compile()
        return model

    def list_dit_files(self) -> dict[str, list[Path]]:
        """Lists the files with most of each expert's weights, for prefetching."""
        if self.setup.quantized_dit is not None:
            exports = self.setup.quantized_dit.experts
            return {name: [export.weights] for name, export in exports.items()}
        return {
            name: [tensor.file for tensor in dit.tensors.values()]
            for name, dit in self._dit_specs.items()
        }

    def compute_embedding_changes(self, name: str, timesteps: Sequence[float]) -> list[float]:
        """Computes the change of an expert's time embedding from each timestep to the next."""
        from wan.cache.tea import compute_embedding_changes

        sources = merge_loras(
            open_sources(self._dit_specs[name].tensors), self.setup.loras.get(name, ())
        )
        weights = {key: sources[key].read(slice(None)).float() for key in _TIME_EMBEDDING}
        return compute_embedding_changes(weights, timesteps)

    def list_text_encoder_files(self) -> set[Path]:
        """Lists the files of the text encoder that this rank reads."""
        if self._text_encoder_spec is None or not self._runs_text_encoder:
            return set()
        return {info.file for info in self._text_encoder_spec.tensors.values()}

    def load_text_encoder(self) -> TextEncoder:
        """Loads the text encoder."""
        checkpoint = self.setup.checkpoint
        checkpoint.require("text_encoder"), checkpoint.require("tokenizer")
        assert self._text_encoder_spec is not None
        device = torch.device("cpu") if self.setup.execution.t5_cpu else self._device
        offload = self.offload_manager.offload
        dtypes = t5.choose_text_encoder_dtypes(self.encoder_dtype)
        transform: WeightTransform = keep_sources
        if offload == "block":
            from wan.pipeline.offload import stream_blocks

            transform = stream_blocks(
                transform, t5.BLOCKS_NAME, device, dtypes, embedding_name=t5.EMBEDDING_NAME
            )
        model = self._text_encoder_spec.load(
            device=device, dtype_of=dtypes, sharding=self._t5_sharding, transform=transform
        )
        if offload == "cpu" and device.type != "cpu":
            self.offload_manager.register(model)
        length = checkpoint.config["text_len"]
        return TextEncoder(model, self._tokenizer, dtype=self.encoder_dtype, text_len=length)

    def load_clip_vision(self) -> ClipVision:
        """Loads the image encoder."""
        self.setup.checkpoint.require("image_encoder")
        assert self._clip_spec is not None
        from wan.modules.clip import ClipVision, add_clip_position_ids

        network = self._clip_spec.load(
            device=self._device,
            dtype_of=lambda *_: self.encoder_dtype,
            transform=add_clip_position_ids,
        )
        return ClipVision(network)

    def encode_audio(self, audio: Audio) -> Tensor:
        """Computes audio features on the CPU; the encoder is released afterwards."""
        return audio_encoder.extract_audio_features(
            self.setup.checkpoint.require("audio_encoder"), audio
        )

    def load_video_vae(self) -> VideoVAE:
        """Loads the VAE."""
        self.setup.checkpoint.require("vae")
        assert self._vae_spec is not None
        dtype = DTYPES[self.setup.execution.vae_precision]
        return VideoVAE(self._vae_spec.load(device=self._device, dtype_of=lambda *_: dtype))


def build_step_cache(setup: Setup, groups: ParallelGroups | None) -> Cache:
    """Builds the step cache from the setup's policy."""
    syncs_branches = setup.parallel.cfg_size == 2
    if setup.policy is None:
        return Cache()
    return setup.policy.make_cache(syncs_branches, None if groups is None else groups.all_agree)


def build_components(
    setup: Setup,
    selected: SelectedKernels,
    groups: ParallelGroups | None,
    step_cache: Cache | None = None,
    expert: str = "dit",
) -> ModelComponents:
    """Builds the components of an expert's blocks: attention, kernels, sequence shard, caches."""
    parallel = setup.parallel
    ops = BlockOps(
        selected.vendor_ops,
        selected.compiled_ops or run_eager,
        selected.device_type,
        selected.fuses_gelu,
    )
    skip_hooks = (
        (None, None)
        if step_cache is None
        else (step_cache.get_if_skips("blocks"), step_cache.get_if_skips("attention"))
    )
    is_sharded = groups is not None and parallel.sequence_size > 1
    if not (is_sharded or selected.backends or selected.frequency_cap):
        local = SingleDeviceAttention(selected.dense_kernel)
        return ModelComponents(
            lambda _: local,
            selected.cross_attention_kernel,
            UnshardedSequence(),
            ops,
            True,
            *skip_hooks,
        )
    from wan.distributed.ring import Ring
    from wan.distributed.sequence_shards import ShardedSequence
    from wan.distributed.ulysses import SINGLE_RANK
    from wan.modules.attnlayer import FAPowerCapAttention

    ulysses: Group = SINGLE_RANK
    sequence: Group = SINGLE_RANK
    ring = None
    if groups is not None:
        ulysses, sequence = groups.group("ulysses"), groups.group("ring", "ulysses")
        ring = Ring(groups.group("ring"), parallel.ring_type, selected.device_type)

    def make_attention(layer: int) -> SelfAttention:
        return FAPowerCapAttention(
            parallel,
            ulysses,
            parallel.fa_alltoall_overlap,
            layer=layer,
            kernel=selected.dense_kernel,
            ring=ring,
            methods=selected.get_backends(expert, layer),
            clock=selected.frequency_cap,
            chunks=parallel.chunks,
            exchange=setup.exchange_on(selected.device_type),
            contiguous=selected.device_type not in setup.attention.dense_kernel.strided_devices,
        )

    multiple = setup.attention.row_multiple(parallel.ring_size) if is_sharded else 1
    tokens = ShardedSequence(sequence, multiple, selected.token_order)
    return ModelComponents(
        make_attention, selected.cross_attention_kernel, tokens, ops, True, *skip_hooks
    )


def make_weight_shardings(
    parallel: Parallel, groups: ParallelGroups | None
) -> tuple[Sharding, Sharding]:
    """Returns the FSDP sharding of the DiT's and of the text encoder's weights."""
    dit: Sharding = UNSHARDED
    encoder: Sharding = UNSHARDED
    if groups is not None and (parallel.dit_fsdp or parallel.t5_fsdp):
        from wan.distributed.fsdp import FsdpSharding

        if parallel.dit_fsdp:
            dit = FsdpSharding(groups.world_mesh(), lambda network: network.blocks_and_adapters())
        if parallel.t5_fsdp:
            encoder = FsdpSharding(groups.world_mesh(), t5.list_umt5_blocks)
    return dit, encoder


def assign_vae_rows(device: Device, groups: ParallelGroups | None) -> MakeRows | None:
    """Assigns the rows that each rank encodes and decodes; None for one process."""
    if groups is None:
        return None
    from wan.modules.vae.sharded import ShardedRows, split_rows_evenly

    world, torch_device = groups.mesh.size(), device.torch_device

    def make_rows(height: int, shared: bool) -> ShardedRows:
        heights = split_rows_evenly(height, world) if shared else (height, *[0] * (world - 1))
        return ShardedRows(None, heights, torch_device)

    return make_rows
