"""Measures the memory and the communication of a run by running its layers on meta tensors.

Nothing is computed and nothing is sent. This process acts as one rank of a fake process group.
Every tensor storage is counted from its allocation until it is freed. FSDP refuses the meta device,
so sharded networks run on PyTorch's fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from wan import log
from wan.cache.policy import BRANCHES
from wan.checkpoint.config import S2VConfig, VaceConfig
from wan.checkpoint.files import TensorInfo
from wan.checkpoint.load import UNSHARDED, DtypeRule, Sharding, make_dit_dtype_rule, open_sources
from wan.checkpoint.source import TensorSources, count_mapped_bytes
from wan.device import Device, select_device
from wan.distributed import mesh
from wan.kernels.base import StepInfo, Target
from wan.kernels.select import select_kernels
from wan.modules.model import WanModel
from wan.modules.networks import build_dit
from wan.pipeline import adapt, build, clip, memory, text, vae
from wan.pipeline.memory import NetworkSize, NetworkSizes, Usage, WeightBytes
from wan.pipeline.setup import Setup
from wan.planner import operators
from wan.settings.attention_modes import TokenPlan
from wan.settings.parallel import Parallel
from wan.settings.presets import FACE_SIZE
from wan.settings.request import VideoParams
from wan.settings.sound import AUDIO_LAYERS, MOTION_LATENTS
from wan.torch_private import (
    DatalessFunctionMode,
    StorageTracker,
    count_weight_bytes,
    init_fake_process_group,
    materialize_without_data,
)
from wan.vae import tiles

META = torch.device("meta")
Sends = list[tuple[str, int]]
"""The collectives of a layer: c10d's name of the operation, bytes of this rank's input tensor."""
_LAYERS = {  # submodule of a block -> name of its tensors in a plan
    "": "norms",
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "cross_attn.k": "text K/V",
    "cross_attn.v": "text K/V",
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
    sends: tuple[Sends, ...]
    attention: str


class Planner:
    """Measures a run with any topology and memory settings; measurements are cached."""

    def __init__(self, setup: Setup, params: VideoParams) -> None:
        self.setup, self.params = setup, params
        self.device = Device(META, memory.find_planned_capabilities(setup))
        self.precision = setup.execution.get_dit_precision(self.device.type)
        self.dtype = build.DTYPES[setup.execution.get_precision(self.device.type)]
        self._text_encoder = cache(self._measure_text_encoder)
        self._autoencoder = cache(self._measure_autoencoder)
        self._transformer = cache(self._measure_transformer)

    def stage_memory(self, setup: Setup | None = None) -> dict[str, Usage]:
        """Computes the peak memory of each stage on the rank with the most memory.

        Args:
            setup: The setup of the run, or a variant with another topology or memory settings.
        """
        setup = self.setup if setup is None else setup
        return memory.compute_stage_memory(setup, self.params, self._network_sizes(setup))

    def peak_bytes(self, setup: Setup | None = None) -> int:
        """Returns the peak memory of the rank with the most memory, in bytes."""
        return max(usage.total() for usage in self.stage_memory(setup).values())

    def mapped_weights(self) -> dict[str, Usage]:
        """Sums the memory-mapped weights of each stage."""
        return memory.get_mapped_weights_by_stage(self._network_sizes(self.setup))

    def host_bytes(self) -> int:
        """Returns the page-locked host memory of the first rank for offloading, in bytes."""
        setup, execution = self.setup, self.setup.execution
        if self.device.type == "cpu" or isinstance(execution.offload_model, bool):
            return 0
        dit = self.measure_forwards(setup.parallel)[0].size
        encoder = None if execution.t5_cpu else self._text_encoder(1)
        if execution.offload_model == "block":  # networks are streamed one after the other
            return max(dit.all_blocks_bytes, encoder.all_blocks_bytes if encoder else 0)
        return len(setup.preset.experts) * dit.weights + (encoder.weights if encoder else 0)

    def streaming_per_step(self) -> tuple[int, int, int]:
        """Computes the copies of `offload_model=block` in a step.

        Returns:
            The streamed blocks of a forward, the forwards of a step on a rank, and the bytes of all
            copies.
        """
        setup, execution = self.setup, self.setup.execution
        layers = setup.checkpoint.config["num_layers"]
        num_held = execution.count_blocks_on_device(layers, self.device.type)
        num_streamed = 0 if num_held == layers else layers - (execution.resident_blocks or 0)
        forwards = len(self.branches(setup.parallel))
        size = self.measure_forwards(setup.parallel)[0].size.block_bytes if num_streamed else 0
        return num_streamed, forwards, num_streamed * forwards * size

    def branches(self, parallel: Parallel) -> tuple[str, ...]:
        """Returns the guidance branches that a rank computes."""
        return ("cond", "uncond")[
            : 2 if self.params.uses_guidance and parallel.cfg_size == 1 else 1
        ]

    def token_plan(self, parallel: Parallel) -> TokenPlan:
        """Plans how the ranks shard the tokens."""
        ranks = parallel.sequence_size
        multiple = self.setup.attention.row_multiple(parallel.ring_size) if ranks > 1 else 1
        return TokenPlan(self.params.max_clip_tokens, ranks, multiple)

    def measure_forwards(self, parallel: Parallel) -> list[ForwardMeasurement]:
        """Measures the forwards on one rank of each group of ranks with equal memory.

        The ranks are the first one, the last one if tokens are padded, and one in the middle of a
        bidirectional ring.
        """
        tokens, last = self.token_plan(parallel), parallel.ring_size - 1
        in_ring = {0, last if tokens.padded_len > tokens.tokens else 0}
        in_ring.add(parallel.ring_size // 2 if parallel.ring_type == "bidirectional" else 0)
        parallel = replace(parallel, t5_fsdp=False)  # it has no effect on a DiT
        return [self._transformer(parallel, i * parallel.ulysses_size) for i in sorted(in_ring)]

    def _network_sizes(self, setup: Setup) -> NetworkSizes:
        execution, parallel = setup.execution, setup.parallel
        on_device = self.device.type == "cpu" or not execution.t5_cpu
        ranks = parallel.world_size if execution.vae_parallel else 1
        weights, encoding, decoding = self._autoencoder(execution.vae_tiling, ranks)
        forwards = [forward.size for forward in self.measure_forwards(parallel)]
        encoder_ranks = parallel.world_size if parallel.t5_fsdp else 1
        return NetworkSizes(
            text=self._text_encoder(encoder_ranks) if on_device else None,
            clip=self._clip_weights(),
            vae=weights,
            encoding_activations=encoding,
            decoding_activations=decoding,
            dit=max(forwards, key=lambda size: size.activations.total()),
        )

    def _clip_weights(self) -> WeightBytes:
        path, dtype = self.setup.checkpoint.image_encoder, self.dtype
        if not self.setup.preset.num_clip_vision_images:
            return WeightBytes(0)
        if path is None:
            return WeightBytes(clip.NUM_ELEMENTS * dtype.itemsize)
        with META:
            network = clip.make_clip_spec(path).make().to(dtype)
        return self._split_mapped(network, clip.make_clip_spec(path).tensors)

    def _split_mapped(self, network: nn.Module, tensors: Mapping[str, TensorInfo]) -> WeightBytes:
        """Splits the weights of a meta network with final dtypes into allocated and mapped ones."""
        mapped_total = count_mapped_bytes(
            network, open_sources(tensors) if self.device.type == "cpu" else {}
        )
        return WeightBytes(count_weight_bytes(network) - mapped_total, mapped_total)

    def _measure_text_encoder(self, ranks: int) -> NetworkSize:
        """Measures the text encoder.

        Args:
            num_ranks: Number of ranks that shard the weights.
        """
        checkpoint = self.setup.checkpoint
        path, length = checkpoint.text_encoder, checkpoint.config["text_len"]
        parallel = Parallel(ranks, 1, 1, ranks, t5_fsdp=ranks > 1)
        with self._simulate_rank(0, parallel) as team:
            with META:
                network: Any
                if path is None:
                    network = text.build_published_text_encoder()
                else:
                    network = text.read_text_encoder_spec(path).make()
            _, sharding = build.make_weight_shardings(parallel, team)
            blocks, dtypes = network.encoder.block, text.choose_text_encoder_dtypes(self.dtype)
            sources: TensorSources = {}
            if path is not None and self.device.type == "cpu" and ranks == 1:
                sources = open_sources(text.read_text_encoder_spec(path).tensors)
            with _prepare_meta_network(network, blocks, dtypes, sharding, sources) as (live, size):
                text.TextEncoder(network, None, dtype=self.dtype, text_len=length)
                ids = torch.ones(1, length, dtype=torch.int64, device=live.device)
                with live:
                    network(ids, torch.ones_like(ids))
                table = count_weight_bytes(network.get_submodule(text.EMBEDDING_NAME))
        block_bytes = max(0, size.weights - table)
        return replace(size, all_blocks_bytes=block_bytes, activations=live.peak_bytes)

    def _measure_autoencoder(self, tiling: bool, ranks: int) -> tuple[WeightBytes, Usage, Usage]:
        """Measures the weights and the activations of the VAE.

        Args:
            tiling: Whether it decodes in tiles.
            num_ranks: Number of ranks that share the rows. The first rank, with the most rows and
                the complete video, is measured.

        Returns:
            Weights, activations of encoding, activations of decoding.
        """
        params, preset, path = self.params, self.setup.preset, self.setup.checkpoint.vae
        with META:
            if path is None:
                network = vae.build_published_vae(preset.vae)
            else:
                network = vae.read_vae_spec(path).make()
        network.to(build.DTYPES[self.setup.execution.vae_precision]).eval().requires_grad_(False)
        model = vae.VideoVAE(network)
        (channels, _, *size), sides = params.latent_shape, params.video_size[::-1]
        frames = memory.count_decoded_frames(params)
        time, scale, _ = preset.vae_stride
        if tiling:
            size = [min(side, tiles.SIDE // scale) for side in size]
        size[0] = -(-size[0] // ranks)
        rows = size[0] * scale

        def decode(frames: int) -> None:
            model.decode(torch.empty(channels, frames, *size))

        def encode(frames: int) -> None:
            video = torch.empty(3, (frames - 1) * time + 1, *sides)
            source = None  # the caller's video in host memory
            if self.device.type == "cpu" and params.preset.kind == "vace":
                source = torch.empty(5, *video.shape[1:], dtype=torch.uint8)  # RGB, two masks
            elif self.device.type == "cpu" and not params.has_clips:
                source = video.clone()
            model.encode(video[:, :, :rows] if ranks > 1 else video)
            del source

        def measure_peak(work: Callable[[int], None], frames: int) -> Usage:
            """Returns the peak usage of `work`, extrapolated from 3 and 4 latent frames.

            Each further frame adds as much as the fourth one.
            """
            peaks = []
            for num_frames in (min(frames, 3), min(frames, 4)):
                live = StorageTracker("meta")
                live.exclude(network.parameters())
                with self._simulate_rank(0, Parallel()), META, live:
                    work(num_frames)
                peaks.append(live.peak_bytes)
            further = max(0, frames - 4) * (peaks[1].total() - peaks[0].total())
            return peaks[1] + Usage(activations=further)

        num_encoded_frames = memory.count_encoded_frames(params)
        encoding = measure_peak(encode, num_encoded_frames) if num_encoded_frames else Usage()
        length = 1 + (frames - 1) * time
        tile_bytes = tiles.estimate_tile_bytes(sides, length) if tiling else 0
        received_bytes = (sides[0] - rows) * sides[1] * 3 * length * 4 if ranks > 1 else 0
        decoding = measure_peak(decode, frames) + Usage(
            {"tiles": tile_bytes, "other ranks' rows": received_bytes}
        )
        tensors = {} if path is None else vae.read_vae_spec(path).tensors
        return self._split_mapped(network, tensors), encoding, decoding

    def _measure_transformer(self, parallel: Parallel, rank: int) -> ForwardMeasurement:
        """Measures a DiT with two or three blocks, and scales cached state to all blocks."""
        setup, checkpoint = replace(self.setup, parallel=parallel), self.setup.checkpoint
        compute = build.DTYPES[self.precision]
        with self._simulate_rank(rank, parallel) as team:
            target = Target(self.device, checkpoint.head_dim, compute, operators.load_operator)
            selected = select_kernels(setup.attention, target, {})
            caches = build.build_step_cache(setup, team)
            components = build.build_components(setup, selected, team, caches)
            caches.start_run(dict.fromkeys(BRANCHES, caches.memory_plan_steps))
            network, sources = self._build_first_expert(setup, components)
            sharding, _ = build.make_weight_shardings(parallel, team)
            dtypes = make_dit_dtype_rule(compute, setup.execution.convert_model_dtype)
            ranks = parallel.world_size if parallel.dit_fsdp else 1
            with _prepare_meta_network(
                network, network.blocks, dtypes, sharding, sources, network.adapter_modules, ranks
            ) as (live, size):
                sends = self._run_forwards(network, live, self.branches(parallel))
                activations, cached = live.peak_bytes - live.live_bytes, +live.live_bytes
                residual_bytes = caches.cached_bytes()
        layers = checkpoint.config["num_layers"] + checkpoint.num_control_blocks
        num_measured = len(network.self_attention_blocks())
        cached["text K/V"] = cached["text K/V"] * layers // num_measured
        cached = cached - Usage(embeddings=residual_bytes) + Usage({"step cache": residual_bytes})
        cache_label = "masks" if setup.attention.use_rainfusion else "attention cache"
        cached[cache_label] = cached.pop("self-attention", 0) * layers // num_measured
        size = replace(size, cached=+cached, activations=activations)
        return ForwardMeasurement(size, sends, build.describe_attention(setup, selected))

    def _build_first_expert(self, setup: Setup, components: Any) -> tuple[WanModel, TensorSources]:
        """Builds the first expert's DiT with its quantized layers on the meta device.

        Returns:
            The network, and the sources of its weights on a CPU (empty for other devices).
        """
        expert, files = next(iter(setup.checkpoint.experts.items()))
        compute = build.DTYPES[self.precision]
        sources: TensorSources = {}
        with META:
            network = build_dit(files.config, components)
            if setup.quantized_dit is not None and self.device.type == "npu":
                operators.insert_quantized_linears(
                    network, setup.quantized_dit.experts[expert].linear_bytes
                )
            elif files.tensors:
                transform = adapt.make_weight_transform(setup, expert, self.device, compute)
                sources = transform(network, open_sources(files.tensors))
        uses_mapped = self.device.type == "cpu" and not setup.parallel.dit_fsdp
        return network, sources if uses_mapped else {}

    def _run_forwards(
        self, network: WanModel, live: StorageTracker, branches: tuple[str, ...]
    ) -> tuple[Sends, ...]:
        """Runs each guidance branch in a dense and a sparse step; returns a layer's collectives.

        With a step cache the first step runs twice: the second time the cache holds the residuals
        of the first.
        """
        live.track_module(network, "embeddings")
        live.track_module(network.text_embedding, "text")
        live.track_module(network.head, "head")
        for block in network.self_attention_blocks():
            for name, label in _LAYERS.items():
                live.track_module(block.get_submodule(name), label)
        setup, params, config = self.setup, self.params, self.setup.checkpoint.config
        (channels, *size), grid, steps = params.latent_shape, params.grid, params.sample_steps

        def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=live.device)

        x, y = empty(channels, *size), empty(config["in_dim"] - channels, *size)
        text_size = config["text_len"], config["text_dim"]
        contexts = [empty(*text_size, dtype=self.dtype) for _ in branches]
        num_images = setup.preset.num_clip_vision_images
        model_kwargs: dict[str, Any] = {}
        if num_images:
            model_kwargs["clip_fea"] = empty(num_images, clip.NUM_TOKENS, config["image_dim"])
        audios: list[Any] = [{}] * len(branches)
        if setup.preset.kind == "animate":
            num_face_images = 4 * (size[0] - 2) + 1
            model_kwargs["pose_latents"] = empty(1, channels, size[0] - 1, *size[1:])
            model_kwargs["face_pixel_values"] = empty(1, 3, num_face_images, FACE_SIZE, FACE_SIZE)
        elif setup.preset.kind == "vace":
            model_kwargs["vace_context"] = [empty(cast(VaceConfig, config)["vace_in_dim"], *size)]
        elif setup.preset.kind == "s2v":
            num_encoded_frames = memory.count_encoded_frames(params)
            model_kwargs |= {
                "ref_latents": [empty(channels, 1, *size[1:])],
                "motion_latents": [empty(channels, MOTION_LATENTS, *size[1:])],
                "cond_states": [empty(channels, *size)],
                "drop_motion_frames": num_encoded_frames == 1,
            }
            features = AUDIO_LAYERS, cast(S2VConfig, config)["audio_dim"], 4 * size[0]
            audios = [{"audio_input": empty(1, *features)} for _ in branches]
        live.exclude(
            (x, y, *contexts, *chain.from_iterable(map(_iter_tensors, (model_kwargs, *audios))))
        )
        t = torch.tensor([500.0])
        fixes_first_frame = setup.preset.kind == "ti2v" and memory.count_encoded_frames(params) == 1
        if fixes_first_frame and live.device == "meta":  # the image's tokens have timestep 0
            t = 500.0 * (torch.arange(prod(grid)) >= prod(grid[1:])).unsqueeze(0)
        attention, sparse_from = setup.attention, 0
        if attention.use_rainfusion:
            sparse_from = attention.resolve_sparse_start_step(steps)
        step_indices, sends = sorted({0, sparse_from}), list[Sends]()
        for index in [0, *step_indices] if setup.cache.policy != "none" else step_indices:
            live.sent_operations.clear()
            for branch, text_LC, audio_input in zip(branches, contexts, audios, strict=True):
                step = StepInfo(index, steps, branch, setup.preset.experts[0], grid, prod(grid))
                channels_of_image = {"y": [y]} if len(y) else {}
                with live:
                    network(
                        [x],
                        t,
                        context=[text_LC],
                        seq_len=prod(grid),
                        **{**model_kwargs, **audio_input, **channels_of_image},
                        step=step,
                    )
            layers = len(network.self_attention_blocks())
            sends.append(
                live.sent_operations[: len(live.sent_operations) // len(branches) // layers]
            )
        return tuple(sends[-len(step_indices) :])

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
    sources: TensorSources,
    adapter_modules: Callable[[int], Sequence[nn.Module]] = lambda layer: (),
    ranks: int = 1,
) -> Iterator[tuple[StorageTracker, NetworkSize]]:
    """Prepares a network to run on meta or fake tensors, with two or three of its blocks.

    FSDP needs three blocks: the first, the last and one in the middle. Memory-mapped weights are
    counted separately; the allocated weights of a block are an average over the blocks.

    Args:
        adapter_modules: layer -> the modules that are copied together with a block.
        num_ranks: Number of ranks that shard the weights.

    Yields:
        The tracker of live tensor storages, and the sizes of this rank's weights.
    """
    for name, parameter in network.named_parameters():
        stored = sources[name].dtype if name in sources else torch.bfloat16
        parameter.data = parameter.data.to(dtype_of(name, stored))
    prefix = next(name for name, module in network.named_modules() if module is blocks)
    mapped_total, count = count_mapped_bytes(network, sources), len(blocks)
    in_blocks = count_mapped_bytes(network, sources, f"{prefix}.")
    is_unsharded = sharding is UNSHARDED
    num_kept = 2 if is_unsharded else 3
    adapters = [[*adapter_modules(layer)] for layer in range(count)]
    names = {module: name for name, module in network.named_modules()}
    for module in chain.from_iterable(adapters):
        in_blocks += count_mapped_bytes(network, sources, f"{names[module]}.")
    adapter_bytes = [sum(map(count_weight_bytes, modules)) // ranks for modules in adapters]
    removed_blocks = blocks[num_kept:]
    del blocks[num_kept:]
    for module in chain.from_iterable(adapters[num_kept:]):
        network.set_submodule(names[module], nn.Identity())
    sharding.shard(network.eval().requires_grad_(False))
    with materialize_without_data(network, sharded=not is_unsharded) as live:
        block = count_weight_bytes(blocks[-1])
        saved = count_weight_bytes(removed_blocks) if is_unsharded else len(removed_blocks) * block
        block += (sum(adapter_bytes) - in_blocks) // count
        weights = count_weight_bytes(network) + saved + sum(adapter_bytes[num_kept:]) - mapped_total
        largest = 0
        if any(adapter_bytes) and not mapped_total:
            largest = block + max(adapter_bytes) - sum(adapter_bytes) // count
        sizes = (weights, block, count * block)
        yield live, NetworkSize(*sizes, mapped=mapped_total, largest_block_bytes=largest)
