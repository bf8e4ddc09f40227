"""Measures the memory and the communication of a run by running its layers on meta tensors.

Nothing is computed and nothing is sent. This process acts as one rank of a fake process group.
Every tensor storage is counted from its allocation until it is freed. FSDP refuses the meta device,
so sharded networks run on PyTorch's fake tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from wan.cache.policy import BRANCHES
from wan.checkpoint.formats.tensor_info import FLOATS, GGUF, TensorInfo
from wan.checkpoint.load import (
    DTYPES,
    UNSHARDED,
    DtypeRule,
    Sharding,
    check_names_and_shapes,
    make_dit_dtype_rule,
)
from wan.checkpoint.quant.dequantise import TO_FLOAT
from wan.device import Device, select_device
from wan.distributed import mesh
from wan.guidance.nag import NormalizedAttention
from wan.kernels.forward_context import CrossAttentionGuidance, StepInfo
from wan.kernels.interfaces import Target
from wan.kernels.registry import select_kernels
from wan.modules import clip, t5
from wan.modules.lora_branch import LoraBranch
from wan.modules.model import WanModel
from wan.modules.vae import tiles, video_vae
from wan.pipeline import build, memory_estimate, weight_sizes, weight_transforms
from wan.pipeline.denoise import compute_model_kwargs, merge_branch_kwargs
from wan.pipeline.memory_estimate import NetworkSize, NetworkSizes, Usage
from wan.pipeline.preview import count_preview_latents
from wan.pipeline.setup import Setup
from wan.pipeline.video_loras import attach_lora_branches
from wan.pipeline.weight_sizes import PRECISION_DTYPES, WeightBytes
from wan.planner import operators
from wan.settings.attention_modes import TokenPlan
from wan.settings.parallel import Parallel
from wan.tasks.base import VideoParams, build_dit
from wan.utils import log
from wan.utils.torch_private import (
    DatalessFunctionMode,
    StorageTracker,
    init_fake_process_group,
    materialize_without_data,
    skip_dynamo_in_meta_kernels,
)

META = torch.device("meta")
Collectives = list[tuple[str, int]]
"""The collectives of a layer: c10d's name of the operation, bytes of this rank's input tensor."""
_LAYERS = {  # submodule of a block -> name of its tensors in a plan
    "": "norms",
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "cross_attn.k": "text K/V",
    "cross_attn.v": "text K/V",
    "cross_attn.k_img": "text K/V",  # of networks with CLIP features
    "cross_attn.v_img": "text K/V",
    "ffn": "feed-forward",
}


@dataclass(frozen=True)
class ForwardMeasurement:
    """Measurements of the forwards of a DiT on one rank.

    Attributes:
        collectives: Those of a layer in a dense step, and in a sparse step if there are any.
        attention: One line about the attention backends.
    """

    size: NetworkSize
    collectives: tuple[Collectives, ...]
    attention: str


class Planner:
    """Measures a run with any topology and memory settings; measurements are cached."""

    def __init__(self, setup: Setup, params: VideoParams) -> None:
        skip_dynamo_in_meta_kernels()
        self.setup, self.params = setup, params
        self.device = Device(META, memory_estimate.find_planned_capabilities(setup))
        self.precision = setup.execution.get_dit_precision(self.device.type)
        self.dtype = build.DTYPES[setup.execution.get_precision(self.device.type)]
        self._get_text_encoder_size = cache(self._measure_text_encoder)
        self._get_vae_usage = cache(self._measure_vae)
        self._get_forward_measurement = cache(self._measure_dit)

    def compute_stage_memory(self, setup: Setup | None = None) -> dict[str, Usage]:
        """Computes the peak memory of each stage on the rank with the most memory.

        Args:
            setup: The setup of the run, or a variant with another topology or memory settings.
        """
        setup = self.setup if setup is None else setup
        return memory_estimate.compute_stage_memory(
            setup, self.params, self._collect_network_sizes(setup)
        )

    def compute_peak_bytes(self, setup: Setup | None = None) -> int:
        """Returns the peak memory of the rank with the most memory, in bytes."""
        return max(usage.total() for usage in self.compute_stage_memory(setup).values())

    def sum_mapped_weights(self) -> dict[str, Usage]:
        """Sums the memory-mapped weights of each stage."""
        return memory_estimate.get_mapped_weights_by_stage(self._collect_network_sizes(self.setup))

    def compute_host_bytes(self) -> int:
        """Returns the page-locked host memory of the first rank for offloading, in bytes."""
        setup, execution = self.setup, self.setup.execution
        if self.device.type == "cpu" or isinstance(execution.offload_model, bool):
            return self.sum_streamed_kv()
        dit = self.measure_forwards(setup.parallel)[0].size.weights
        encoder = None if execution.t5_cpu else self._get_text_encoder_size(1).weights
        if execution.offload_model == "block":  # networks are streamed one after the other
            blocks = max(dit.all_blocks, encoder.all_blocks if encoder else 0)
            return blocks + self.sum_streamed_kv()
        encoder_bytes = encoder.allocated if encoder else 0
        networks = len(setup.preset.experts) * dit.allocated + encoder_bytes
        return networks + self.sum_streamed_kv()

    def count_streamed_blocks(self) -> tuple[int, int, int]:
        """Computes the copies of `offload_model=block` in a step.

        Returns:
            The streamed blocks of a forward, how often a step copies each of them on a rank, and
            the bytes of all copies.
        """
        setup, execution = self.setup, self.setup.execution
        num_layers = setup.checkpoint.config["num_layers"]
        num_held = execution.count_blocks_on_device(num_layers, self.device.type)
        num_streamed = (
            0 if num_held == num_layers else num_layers - (execution.resident_blocks or 0)
        )
        num_forwards = self.count_weight_uses()
        block_bytes = (
            self.measure_forwards(setup.parallel)[0].size.weights.block if num_streamed else 0
        )
        copied_bytes = num_streamed * block_bytes + self.sum_streamed_kv()
        return num_streamed, num_forwards, num_forwards * copied_bytes

    def sum_streamed_kv(self) -> int:
        """Sums the kept keys and values of all layers, if they are in the host's memory."""
        size = self.measure_forwards(self.setup.parallel)[0].size
        num_held = memory_estimate.count_kv_layers_on_device(self.setup, self.device.type)
        is_streamed = num_held < self.setup.checkpoint.config["num_layers"]
        return is_streamed * size.per_clip["kept K/V"]

    def estimate_upcast_seconds(self) -> float:
        """Estimates the seconds of a step in which a CPU dequantizes weights; 0 if it keeps none.

        The rates are measured on this machine.
        """
        expert, seconds, numbers = next(iter(self.setup.checkpoint.experts)), 0.0, Counter[str]()
        layers = weight_sizes.find_unconverted_layers(self.setup, expert, self.device.type)
        if self.device.type != "cpu" or self.setup.multiplies_fp8:
            return 0
        for info, _ in layers.values():
            numbers[info.dtype] += prod(info.shape)
        for dtype, number in numbers.items():
            seconds += number * measure_upcast_seconds(dtype, build.DTYPES[self.precision])
        return seconds * self.count_weight_uses()

    def count_weight_uses(self) -> int:
        """Returns how often a step needs the weights of a block: in lockstep once."""
        if memory_estimate.runs_in_lockstep(self.setup, self.params, self.device.type):
            return 1
        return len(self.list_branches(self.setup.parallel))

    def list_branches(self, parallel: Parallel) -> tuple[str, ...]:
        """Returns the guidance branches that a rank computes."""
        return ("cond", "uncond")[: memory_estimate.count_branches(self.params, parallel)]

    def make_token_plan(self, parallel: Parallel) -> TokenPlan:
        """Plans how the ranks shard the tokens."""
        num_ranks = parallel.sequence_size
        multiple = self.setup.attention.row_multiple(parallel.ring_size) if num_ranks > 1 else 1
        return TokenPlan(self.params.max_clip_tokens, num_ranks, multiple)

    def measure_forwards(self, parallel: Parallel) -> list[ForwardMeasurement]:
        """Measures the forwards on one rank of each group of ranks with equal memory.

        The ranks are the first one, the last one if tokens are padded, and one in the middle of a
        bidirectional ring.
        """
        tokens, last = self.make_token_plan(parallel), parallel.ring_size - 1
        in_ring = {0, last if tokens.padded_len > tokens.tokens else 0}
        in_ring.add(parallel.ring_size // 2 if parallel.ring_type == "bidirectional" else 0)
        parallel = replace(parallel, t5_fsdp=False)  # it has no effect on a DiT
        return [
            self._get_forward_measurement(parallel, i * parallel.ulysses_size)
            for i in sorted(in_ring)
        ]

    def _collect_network_sizes(self, setup: Setup) -> NetworkSizes:
        execution, parallel = setup.execution, setup.parallel
        on_device = self.device.type == "cpu" or not execution.t5_cpu
        num_vae_ranks = parallel.world_size if execution.vae_parallel else 1
        weights, encoding, decoding, preview = self._get_vae_usage(
            execution.vae_tiling, num_vae_ranks
        )
        dit_sizes = [forward.size for forward in self.measure_forwards(parallel)]
        num_encoder_ranks = parallel.world_size if parallel.t5_fsdp else 1
        return NetworkSizes(
            text=self._get_text_encoder_size(num_encoder_ranks) if on_device else None,
            clip=self._measure_image_encoder(),
            vae=weights,
            encoding_activations=encoding,
            decoding_activations=decoding,
            dit=max(dit_sizes, key=lambda size: size.activations.total()),
            preview_activations=preview,
        )

    def _measure_image_encoder(self) -> WeightBytes:
        path, dtype = self.setup.checkpoint.image_encoder, self.dtype
        if not self.setup.preset.num_clip_vision_images:
            return WeightBytes(0)
        if path is None:
            return WeightBytes(clip.NUM_ELEMENTS * dtype.itemsize)
        dtype_name = PRECISION_DTYPES[self.setup.execution.get_precision(self.device.type)]
        tensors = clip.make_clip_spec(path).tensors
        return weight_sizes.sum_weights(tensors, lambda _: dtype_name, self.device.type == "cpu")

    def _measure_text_encoder(self, num_ranks: int) -> NetworkSize:
        """Measures the text encoder.

        Args:
            num_ranks: Number of ranks that shard the weights.
        """
        checkpoint = self.setup.checkpoint
        path, length = checkpoint.text_encoder, checkpoint.config["text_len"]
        parallel = Parallel(num_ranks, 1, 1, num_ranks, t5_fsdp=num_ranks > 1)
        with self._simulate_rank(0, parallel) as groups:
            network: Any
            with META:
                if path is None:
                    tensors = weight_sizes.read_text_encoder_tensors(self.setup)
                    network = t5.build_published_text_encoder()
                else:
                    spec = t5.read_text_encoder_spec(path)
                    network, tensors = spec.build(), spec.tensors
            _, sharding = build.make_weight_shardings(parallel, groups)
            blocks, dtypes = network.encoder.block, t5.choose_text_encoder_dtypes(self.dtype)
            with _prepare_meta_network(network, blocks, dtypes, sharding, tensors) as tracker:
                t5.TextEncoder(network, None, dtype=self.dtype, text_len=length)
                ids = torch.ones(1, length, dtype=torch.int64, device=tracker.device)
                with tracker:
                    network(ids, torch.ones_like(ids))
        weights = weight_sizes.sum_text_encoder_weights(
            self.setup, self.device.type, tensors, num_ranks
        )
        return NetworkSize(weights, activations=tracker.peak_bytes)

    def _measure_vae(self, tiling: bool, num_ranks: int) -> tuple[WeightBytes, Usage, Usage, Usage]:
        """Measures the weights and the activations of the VAE.

        Args:
            tiling: Whether it decodes in tiles.
            num_ranks: Number of ranks that share the rows. The first rank, with the most rows and
                the complete video, is measured.

        Returns:
            Weights, activations of encoding, activations of decoding, activations of a preview.
        """
        params, preset, path = self.params, self.setup.preset, self.setup.checkpoint.vae
        with META:
            if path is None:
                tensors = weight_sizes.read_vae_tensors(self.setup)
                network = video_vae.build_published_vae(preset.vae)
            else:
                spec = video_vae.read_vae_spec(path)
                network, tensors = spec.build(), spec.tensors
        network.to(build.DTYPES[self.setup.execution.vae_precision]).eval().requires_grad_(False)
        autoencoder = video_vae.VideoVAE(network)
        (channels, _, *latent_size), pixel_size = params.latent_shape, params.frame_size[::-1]
        num_latent_frames = params.task.count_decoded_latents(params)
        temporal_stride, spatial_stride, _ = preset.vae_stride
        if tiling:
            latent_size = [min(side, tiles.SIDE // spatial_stride) for side in latent_size]
        preview_size = [*latent_size]  # on one rank
        latent_size[0] = -(-latent_size[0] // num_ranks)
        num_rows = latent_size[0] * spatial_stride

        def decode(num_latent_frames: int, size: Sequence[int] = latent_size) -> None:
            autoencoder.decode(torch.empty(channels, num_latent_frames, *size))

        def encode(num_latent_frames: int) -> None:
            video = torch.empty(3, (num_latent_frames - 1) * temporal_stride + 1, *pixel_size)
            host_video = None  # the caller's video in host memory
            if self.device.type == "cpu":
                host_video = params.task.make_encoder_input(params, video, torch.empty)
            autoencoder.encode(video[:, :, :num_rows] if num_ranks > 1 else video)
            del host_video

        def measure_peak(work: Callable[[int], None], num_latent_frames: int) -> Usage:
            """Returns the peak usage of `work`, extrapolated from 3 and 4 latent frames.

            Each further frame adds as much as the fourth one.
            """
            peaks = []
            for num_frames in (min(num_latent_frames, 3), min(num_latent_frames, 4)):
                tracker = StorageTracker("meta")
                tracker.exclude(network.parameters())
                with self._simulate_rank(0, Parallel()), META, tracker:
                    work(num_frames)
                peaks.append(tracker.peak_bytes)
            further = max(0, num_latent_frames - 4) * (peaks[1].total() - peaks[0].total())
            return peaks[1] + Usage(activations=further)

        def estimate_tiles(num_frames: int) -> int:
            return tiles.estimate_tile_bytes(pixel_size, num_frames) if tiling else 0

        num_encoded_frames = params.task.count_encoded_latents(params)
        encoding = measure_peak(encode, num_encoded_frames) if num_encoded_frames else Usage()
        num_pixel_frames = 1 + (num_latent_frames - 1) * temporal_stride
        tile_bytes = estimate_tiles(num_pixel_frames)
        received_bytes = (
            (pixel_size[0] - num_rows) * pixel_size[1] * 3 * num_pixel_frames * 4
            if num_ranks > 1
            else 0
        )
        decoding = measure_peak(decode, num_latent_frames) + Usage(
            {"tiles": tile_bytes, "other ranks' rows": received_bytes}
        )
        preview_bytes = 0
        if num_preview_latents := count_preview_latents(params):
            preview_bytes = measure_peak(
                partial(decode, size=preview_size), num_preview_latents
            ).total()
            num_pixel_frames = 1 + (num_preview_latents - 1) * temporal_stride
            preview_bytes += estimate_tiles(num_pixel_frames)
        weights = weight_sizes.sum_vae_weights(self.setup, self.device.type, tensors)
        return weights, encoding, decoding, +Usage(preview=preview_bytes)

    def _measure_dit(self, parallel: Parallel, rank: int) -> ForwardMeasurement:
        """Measures a DiT with two or three blocks, and scales cached state to all blocks."""
        setup, checkpoint = replace(self.setup, parallel=parallel), self.setup.checkpoint
        compute = build.DTYPES[self.precision]
        with self._simulate_rank(rank, parallel) as groups:
            target = Target(self.device, checkpoint.head_dim, compute, operators.load_operator)
            selected = select_kernels(setup.attention, target, {})
            step_cache = build.build_step_cache(setup, groups)
            components = build.build_components(setup, selected, groups, step_cache)
            step_cache.start_run(dict.fromkeys(BRANCHES, step_cache.memory_plan_steps))
            network = self._build_first_expert(setup, components)
            if setup.execution.offload_model == "block" and network.hold_weights is None:
                network.hold_weights = nullcontext
            sharding, _ = build.make_weight_shardings(parallel, groups)
            dtypes = make_dit_dtype_rule(compute, setup.execution.convert_model_dtype)
            with _prepare_meta_network(
                network, network.blocks, dtypes, sharding, {}, network.adapter_modules
            ) as tracker:
                self._attach_loras(network, tracker)
                branches = self.list_branches(parallel)
                collectives, model_kwargs = self._run_forwards(network, tracker, branches)
                activations = tracker.peak_bytes - tracker.live_bytes
                cached_usage = +tracker.live_bytes
                residual_bytes = step_cache.cached_bytes()
                kept_kv = model_kwargs.pop("reference_kv", model_kwargs.pop("kv_cache", None))
        num_layers = checkpoint.config["num_layers"] + checkpoint.num_control_blocks
        num_measured = len(network.self_attention_blocks())
        cached_usage["text K/V"] = cached_usage["text K/V"] * num_layers // num_measured
        per_clip = Usage()
        if kept_kv is not None:
            cached_usage["self-attention"] -= kept_kv.nbytes
            per_clip["kept K/V"] = kept_kv.nbytes * num_layers // num_measured
        cached_usage = (
            cached_usage - Usage(embeddings=residual_bytes) + Usage({"step cache": residual_bytes})
        )
        cache_label = "attention cache" if kept_kv is None else "kept K/V"
        cache_label = "masks" if setup.attention.use_rainfusion else cache_label
        cached_usage[cache_label] = (
            cached_usage.pop("self-attention", 0) * num_layers // num_measured
        )
        num_ranks = parallel.world_size if parallel.dit_fsdp else 1
        weights = weight_sizes.sum_dit_weights(setup, self.device.type, num_ranks)
        size = NetworkSize(weights, +cached_usage, activations, per_clip)
        return ForwardMeasurement(size, collectives, build.describe_attention(setup, selected))

    def _attach_loras(self, network: WanModel, tracker: StorageTracker) -> None:
        """Attaches the LoRAs of the video to the remaining layers; their factors are not tracked.

        They are those of the expert with the most factors.
        """
        factors = max(
            (
                weight_sizes.list_video_lora_factors(self.setup, expert, self.device.type)
                for expert in self.setup.video_loras
            ),
            key=lambda items: sum(map(prod, chain.from_iterable(x.values() for _, x, _ in items))),
            default=[],
        )
        layers, branches = dict(network.named_modules()), dict[str, tuple[LoraBranch, ...]]()
        for layer, shapes, dtype in factors:
            if layer in layers:
                tensors = {
                    name: torch.empty(shape, dtype=DTYPES[dtype], device=tracker.device)
                    for name, shape in shapes.items()
                }
                tracker.exclude(tensors.values())
                branches[layer] = (*branches.get(layer, ()), LoraBranch(1.0, tensors))
        for layer, layer_branches in branches.items():
            attach_lora_branches(layers[layer], layer_branches)

    def _build_first_expert(self, setup: Setup, components: Any) -> WanModel:
        """Builds the first expert's DiT with its quantized layers on the meta device."""
        expert, files = next(iter(setup.checkpoint.experts.items()))
        compute, device_type = build.DTYPES[self.precision], self.device.type
        with META:
            network = build_dit(files.config, components)
            for dit in setup.checkpoint.experts.values():
                if dit.tensors:  # none without a checkpoint
                    check_names_and_shapes(network, dit.tensors, dit.folder)
            if setup.quantized_dit is None:
                weight_transforms.install_weight_only_linears(
                    setup, expert, device_type, network, compute
                )
                return network
            export = setup.quantized_dit.experts[expert]
            if device_type == "npu":
                operators.insert_quantized_linears(network, export.linear_bytes)
            else:
                weight_transforms.install_w8a8_linears(network, export, device_type, compute)
        return network

    def _run_forwards(
        self, network: WanModel, tracker: StorageTracker, branches: tuple[str, ...]
    ) -> tuple[tuple[Collectives, ...], dict[str, Any]]:
        """Runs each guidance branch in a dense and a sparse step.

        With a step cache the first step runs twice: the second time the cache holds the residuals
        of the first.

        Returns:
            A layer's collectives, and the keywords of the network.
        """
        tracker.track_module(network, "embeddings")
        tracker.track_module(network.text_embedding, "text")
        tracker.track_module(network.head, "head")
        for block in network.self_attention_blocks():
            modules = dict(block.named_modules())
            for name in modules.keys() & _LAYERS.keys():
                tracker.track_module(modules[name], _LAYERS[name])
        setup, config = self.setup, self.setup.checkpoint.config
        params = self.params.task.make_forward_params(self.params)
        (channels, *size), grid, steps = params.latent_shape, params.grid, params.num_forwards

        def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=tracker.device)

        x, y = empty(channels, *size), empty(config["in_dim"] - channels, *size)
        text_size = config["text_len"], config["text_dim"]
        contexts = [empty(*text_size, dtype=self.dtype) for _ in branches]
        num_images = setup.preset.num_clip_vision_images
        model_kwargs = params.task.make_model_kwargs(self.params, config, empty)
        if num_images:
            model_kwargs["clip_fea"] = empty(num_images, clip.NUM_TOKENS, config["image_dim"])
        text_guidance = None
        if params.nag_scale is not None:
            second_text = empty(*text_size, dtype=self.dtype)
            text_guidance = CrossAttentionGuidance(second_text, NormalizedAttention(params))
            tracker.exclude([second_text])
        tracker.exclude((x, y, *contexts, *_iter_tensors(model_kwargs)))
        t = torch.tensor([500.0])
        token_timesteps = model_kwargs.pop("t", None)
        if token_timesteps is not None and tracker.device == "meta":
            t = token_timesteps
        with tracker:
            model_kwargs = compute_model_kwargs(network, {"cond": model_kwargs})["cond"]
        attention, sparse_from = setup.attention, 0
        if attention.use_rainfusion:
            sparse_from = attention.resolve_sparse_start_step(steps)
        step_indices, collectives = sorted({0, sparse_from}), list[Collectives]()
        for index in [0, *step_indices] if setup.cache.policy != "none" else step_indices:
            tracker.sent_operations.clear()
            calls = list[dict[str, Any]]()
            for branch, text_LC in zip(branches, contexts, strict=True):
                step = StepInfo(
                    *(index, steps, "cond", setup.preset.experts[0], grid, prod(grid)),
                    text_guidance=text_guidance,
                ).for_branch(branch)
                calls.append({**model_kwargs, "context": [text_LC], "step": step})
                calls[-1] |= {"y": [y]} if len(y) else {}
            with tracker:
                if len(calls) == 2 and network.runs_in_lockstep(prod(grid)):
                    network([x, x], t, seq_len=prod(grid), **merge_branch_kwargs(*calls))
                else:
                    for kwargs in calls:
                        network([x], t, seq_len=prod(grid), **kwargs)
            num_calls = len(branches) * len(network.self_attention_blocks())
            operations = tracker.sent_operations
            collectives.append(operations[: len(operations) // num_calls])
        return tuple(collectives[-len(step_indices) :]), model_kwargs

    @contextmanager
    def _simulate_rank(self, rank: int, parallel: Parallel) -> Iterator[mesh.ParallelGroups | None]:
        """Simulates a rank of a run, and yields its parallel groups; None for a single rank."""
        is_distributed = parallel.world_size > 1
        with torch.no_grad(), DatalessFunctionMode(), log.silence_thread(), ExitStack() as stack:
            if is_distributed:
                init_fake_process_group(rank, parallel.world_size)
                stack.callback(dist.destroy_process_group)
            groups = None
            if is_distributed:
                groups = mesh.make_parallel_groups(select_device("cpu"), parallel.mesh_shape)
            yield groups


def measure_upcast_seconds(stored_dtype: str, dtype: torch.dtype) -> float:
    """Measures the seconds that dequantizing a weight takes on this CPU; `WeightOnlyLinear`."""
    block_values, block_bytes = GGUF.get(stored_dtype, (1, 1))
    stored = torch.zeros(1 << 10, (1 << 10) // block_values * block_bytes, dtype=torch.uint8)
    stored = stored.view(DTYPES.get(stored_dtype, torch.uint8))
    weights, seconds = torch.empty(1 << 20, dtype=dtype), list[float]()
    for _ in range(5):
        start = time.perf_counter()
        weights.copy_(TO_FLOAT[stored_dtype](stored).flatten())
        seconds.append(time.perf_counter() - start)
    return min(seconds) / len(weights)


def _iter_tensors(model_kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among the keywords of a model, including those in lists."""
    for value in model_kwargs.values():
        items = value if isinstance(value, list) else [value]
        yield from (item for item in items if isinstance(item, torch.Tensor))


@contextmanager
def _prepare_meta_network(
    network: nn.Module,
    blocks: nn.ModuleList,
    dtype_of: DtypeRule,
    sharding: Sharding,
    tensors: Mapping[str, TensorInfo],
    adapter_modules: Callable[[int], Sequence[nn.Module]] = lambda layer: (),
) -> Iterator[StorageTracker]:
    """Prepares a network to run on meta or fake tensors, with two or three of its blocks.

    FSDP needs three blocks: the first, the last and one in the middle.

    Args:
        tensors: The stored tensors, if `dtype_of` depends on their dtypes.
        adapter_modules: layer -> the modules that are copied together with a block.

    Yields:
        The tracker of live tensor storages.
    """
    for name, parameter in network.named_parameters():
        dtype = tensors[name].dtype if name in tensors else "BF16"
        stored_dtype = DTYPES[dtype] if dtype in FLOATS else torch.float32
        parameter.data = parameter.data.to(dtype_of(name, stored_dtype))
    is_unsharded, count = sharding is UNSHARDED, len(blocks)
    num_kept = 2 if is_unsharded else 3
    names = {module: name for name, module in network.named_modules()}
    for module in chain.from_iterable(map(adapter_modules, range(num_kept, count))):
        network.set_submodule(names[module], nn.Identity())
    del blocks[num_kept:]
    sharding.shard(network.eval().requires_grad_(False))
    with materialize_without_data(network, sharded=not is_unsharded) as tracker:
        yield tracker
