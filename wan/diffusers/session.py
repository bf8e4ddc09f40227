"""Builds attention, token shards and step caches of a diffusers pipeline.

Legend: B batch, C channels, F H W latent frames/height/width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from diffusers import (
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from torch import Tensor

from wan import device as devices
from wan.app.notices import make_length_notices
from wan.app.resolve import make_setup
from wan.cache.tea import compute_embedding_changes
from wan.checkpoint.config import KINDS, DitConfig
from wan.checkpoint.layout import Checkpoint, DitFiles, make_reference_checkpoint
from wan.diffusers.denoise_loop import make_denoise_loop
from wan.distributed import mesh
from wan.distributed.mesh import ParallelGroups
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import Target
from wan.kernels.registry import select_kernels
from wan.pipeline import build
from wan.pipeline.denoise import RunBranches, run_both_branches
from wan.pipeline.setup import Setup
from wan.settings import noise_schedule
from wan.settings.attention_modes import Grid
from wan.settings.errors import InputError, name_settings
from wan.settings.flags import DIFFUSERS_NAMING
from wan.settings.presets import PRESETS, Preset
from wan.settings.run_options import read_run_options
from wan.tasks.base import VideoParams, make_video_params
from wan.utils.log import logger

NETWORKS = (WanTransformer3DModel, WanVACETransformer3DModel, WanAnimateTransformer3DModel)
"""The supported classes."""
TransformerModel: TypeAlias = (
    WanTransformer3DModel | WanVACETransformer3DModel | WanAnimateTransformer3DModel
)
Networks = Mapping[str, TransformerModel]
"""Expert -> its network."""
_KIND_OF_NETWORK = {WanVACETransformer3DModel: "vace", WanAnimateTransformer3DModel: "animate"}
_PRECISIONS = {dtype: name for name, dtype in build.DTYPES.items()}


class Session:
    """The state that the hooks on the networks of one pipeline share.

    Attributes:
        components: Attention, token shard and caches.
        loop: The pipeline's loop; None if another program calls the network.
        pairs_branches: Both calls of a step are computed in the second one.
        step: The current forward pass; it has `valid_len` tokens without padding.
        in_blocks: A cache is computing blocks.
    """

    def __init__(
        self,
        networks: Networks,
        pipe: Any,
        values: dict[str, Any],
        world_size: int,
        groups: ParallelGroups | None = None,
        caches_only: bool = False,
    ) -> None:
        """Checks the settings and builds attention, token shard and caches.

        Args:
            pipe: None if another program calls the network.
            values: Parsed settings.
            world_size: Ranks that share each video.
            groups: Existing groups of these ranks; None: they are made.
            caches_only: Without a step cache there is nothing to attach.
        """
        self.networks, self.pipe, self.values = networks, pipe, values
        self.caches_only = caches_only
        self.loop = None if pipe is None else make_denoise_loop(pipe)
        network = next(iter(networks.values()))
        self.setup, notices = _make_session_setup(networks, values, world_size)
        index = network.device.index
        if index is None and torch.accelerator.is_available():
            index = torch.accelerator.current_device_index()
        device = devices.select_device(self.setup.execution.device, index or 0)
        self.setup.check_device(device.capabilities)
        parallel, head_dim = self.setup.parallel, self.setup.checkpoint.head_dim
        target = Target(device, head_dim, network.dtype)
        selected = select_kernels(self.setup.attention, target, {}, compile_blocks=True)
        self.groups = groups or (
            mesh.make_parallel_groups(device, parallel.mesh_shape) if world_size > 1 else None
        )
        self.caches = build.build_step_cache(self.setup, self.groups)
        if self.caches.get_if_skips("network") is not None:
            why = "needs the velocities of both branches, which a pipeline combines itself"
            raise InputError("`step_cache=easy`", None, why, "use first_block or mag")
        self.caches.compute_changes = self._compute_embedding_changes
        self.components = build.build_components(self.setup, selected, self.groups, self.caches)
        self.pairs_branches = (
            parallel.cfg_size == 2 or self.caches.get_if_skips("uncond") is not None
        )
        self._pending_cond: tuple[Callable[[], Any], Tensor] | None = None
        self.step: StepInfo | None = None
        self.valid_len, self.in_blocks, self._is_running = 0, False, False
        self._notices = notices
        self._attention_line = build.describe_attention(self.setup, selected)

    def announce(self) -> None:
        """Logs the attention and the notices on the main rank."""
        if self.groups is None or self.groups.is_main:
            for notice in self._notices:
                logger.warning(DIFFUSERS_NAMING.render(notice))
            logger.info("%s", self._attention_line)

    def start_video(self, grid: Grid, x_BCFHW: Tensor) -> None:
        """Starts a video; all ranks refuse settings that do not fit it."""
        self.end_video()  # Animate begins several
        assert self.loop is not None
        self.loop.check()
        params = self._make_params(grid)
        if self.groups is not None:
            noise_sum = x_BCFHW[:, : params.latent_shape[0], -1].float().sum().item()
            local = (noise_sum, grid, params.sample_steps, params.uses_guidance)
            if len({*self.groups.gather(local)}) > 1:
                raise InputError(
                    "The ranks begin different videos: call the pipeline with the same arguments "
                    "on each, and with generators of the same seed."
                )
        with name_settings(DIFFUSERS_NAMING):
            notices = make_length_notices(self.setup, params)
            for notice in (*notices, *self.setup.check_params(params)):
                logger.warning(DIFFUSERS_NAMING.render(notice))
        self.caches.start_video(params)
        self._is_running = True

    def check_inputs(self, x_BCFHW: Tensor, other_inputs: Sequence[Any]) -> None:
        """Refuses texts, images and videos that differ between ranks.

        64 values of each tensor are compared. Devices may round differently, but different inputs
        differ by more than 2 % of the largest value.

        Args:
            x_BCFHW: The network's input; the channels after the latents hold an image.
            other_inputs: The network's other arguments.
        """
        if self.groups is None:
            return
        image = x_BCFHW[:, self.setup.preset.latent_channels :]
        inputs = [x.flatten() for x in (image, *other_inputs) if isinstance(x, Tensor)]
        sample_indices = [torch.linspace(0, len(x) - 1, 64).long() for x in inputs if len(x)]
        nonempty = [x for x in inputs if len(x)]
        samples = [
            x.float().cpu()[indices] for x, indices in zip(nonempty, sample_indices, strict=True)
        ]
        samples_by_rank = self.groups.gather(samples)
        if len({len(x) for x in samples_by_rank}) > 1 or any(
            (x - rank_samples[0]).abs().max() > 0.02 * torch.stack(rank_samples).abs().max()
            for rank_samples in zip(*samples_by_rank, strict=True)
            for x in rank_samples
        ):
            raise InputError(
                "The ranks have other texts, images or videos: call the pipeline with the same "
                "arguments on each."
            )

    def check_noise(self, x_BCFHW: Tensor) -> None:
        """Refuses a scheduler that has added different noise on each rank in the first step."""
        if self.groups is None:
            return
        x = x_BCFHW[:, : self.setup.preset.latent_channels, -1].float()
        means = self.groups.gather(x.mean().item())
        if max(means) - min(means) > 1e-4 * x.std().item():  # different noise differs by more
            raise InputError(
                f"{type(self.pipe.scheduler).__name__} draws noise from PyTorch's own generator: "
                "call torch.manual_seed with the same seed on each rank before the pipeline."
            )

    def check_network(self, network: Any) -> None:
        """Refuses a network that was changed after the hooks, and a call by another program."""
        if network.is_cache_enabled or getattr(network, "_parallel_config", None) is not None:
            raise InputError(
                "diffusers' own cache or parallelism was enabled on the network besides ours; call "
                "deparallelize, and choose one of them."
            )
        if self.loop is not None and not self.loop.is_running:
            raise InputError(
                "The network is called by another program than its pipeline, which has the steps; "
                "pass that pipeline to parallelize_pipe, or the network to parallelize_transformer."
            )

    def end_step(self, step: StepInfo) -> None:
        """Ends the video after its last call, if its pipeline does not."""
        if self.loop is not None and self.loop.ends_at(step.index, step.branch):
            self.end_video()

    def end_video(self) -> None:
        """Ends a video: frees cached tensors and logs the skipped steps."""
        summary = self.caches.summarize() if self._is_running else None
        if summary is not None and (self.groups is None or self.groups.is_main):
            logger.info("%s", summary)
        self._is_running, self._pending_cond = False, None
        self.caches.clear()

    def compute_paired_branch(
        self, step: StepInfo, x_BCFHW: Tensor, compute: Callable[[], Any]
    ) -> tuple[Tensor]:
        """Computes one call of a step whose two branches are computed together.

        The cond call returns a tensor of NaNs, which the uncond call fills.
        """
        if step.branch == "cond":
            assert self.loop is not None
            if not self.loop.has_guidance or self._pending_cond is not None:
                raise InputError(
                    "Guidance ends in the middle of the video, but its branches are computed "
                    "together (`cfg_size=2`, or the step cache cfg); keep it, or drop them."
                )
            shape = (x_BCFHW.shape[0], self.setup.preset.latent_channels, *x_BCFHW.shape[2:])
            self._pending_cond = compute, x_BCFHW.new_full(shape, float("nan"))
            return (self._pending_cond[1],)
        assert self._pending_cond is not None, "pipelines call cond, then uncond"
        (compute_cond, out), self._pending_cond = self._pending_cond, None
        compute_by_branch = {"cond": compute_cond, "uncond": compute}
        compute_branches: RunBranches = run_both_branches
        if self.setup.parallel.cfg_size == 2 and self.groups is not None:
            compute_branches = self.groups.compute_branches
        guidance = self.caches.get_if_skips("uncond")
        if guidance is not None:
            compute_branches = partial(guidance, step.index, compute_branches)
        # In float32, because step caches take the spectrum.
        cond_result, uncond_result = compute_branches(
            lambda name: compute_by_branch[name]()[0].float()
        )
        out.copy_(cond_result)
        return (uncond_result.to(out.dtype),)

    def _make_params(self, grid: Grid) -> VideoParams:
        """Makes the parameters of the pipeline's video, for checks and step caches."""
        loop, preset, config = self.loop, self.setup.preset, self.pipe.scheduler.config
        assert loop is not None
        timesteps, boundary = loop.timesteps, self.pipe.config.get("boundary_ratio")
        high_noise_steps = sum(t >= (boundary or 0) * config.num_train_timesteps for t in timesteps)
        frames, height, width = (
            n * patch * stride
            for n, patch, stride in zip(grid, preset.patch_size, preset.vae_stride, strict=True)
        )
        if preset.kind == "animate":
            frames -= preset.vae_stride[0]  # of the reference image
        guidance = loop.guidance_scale
        values = {
            "size": (width, height),
            "frame_num": frames - preset.vae_stride[0] + 1,
            "sample_guide_scale": (guidance, guidance),
            "base_seed": 0,
            **({} if boundary is None else {"boundary": boundary}),
        }
        requires_shift = self.setup.policy is not None and self.setup.policy.requires_shift
        if requires_shift and not loop.begins_with_noise:
            raise InputError(
                "The video begins in the middle of the schedule (strength), and curves of mag are "
                "made for all of it; use another step cache."
            )
        if requires_shift:
            shift = config.get("flow_shift") or config.get("shift") or 1.0
            values |= {"sample_steps": len(timesteps), "sample_shift": shift}
        else:
            values |= {"sample_solver": "euler", "timesteps": tuple(timesteps)}
            values |= {} if boundary is None else {"boundary_step": high_noise_steps}
        covers_image = preset.kind == "ti2v" and isinstance(self.pipe, WanImageToVideoPipeline)
        params = make_video_params(preset, values, (width, height) if covers_image else None)
        if (
            boundary is not None
            and noise_schedule.make_noise_schedule(params).high_noise_steps != high_noise_steps
        ):
            raise InputError(
                f"The scheduler gives {high_noise_steps} of {len(timesteps)} steps to the "
                "high-noise network, which is not the schedule that curves of mag are made for; "
                "use another step cache."
            )
        return params

    def _compute_embedding_changes(
        self, expert: str, step_timesteps: Sequence[float]
    ) -> Sequence[float]:
        """Implements `wan.cache.policy.ComputeChanges`."""
        embedder = self.networks[expert].condition_embedder.time_embedder
        if embedder.linear_1.weight.is_meta:
            raise InputError(
                "The step cache tea reads the time embedding before a video, but its weights "
                "are offloaded; use another cache, or enable_model_cpu_offload."
            )
        weights = {
            f"time_embedding.{index}.{name}": getattr(layer, name).detach().float().cpu()
            for index, layer in ((0, embedder.linear_1), (2, embedder.linear_2))
            for name in ("weight", "bias")
        }
        return compute_embedding_changes(weights, step_timesteps)


def _make_session_setup(
    networks: Networks, values: dict[str, Any], world: int
) -> tuple[Setup, tuple[str, ...]]:
    """Makes the setup of loaded networks, with notices."""
    first = next(iter(networks.values()))
    dtypes = {network.dtype for network in networks.values()}
    if dtypes - _PRECISIONS.keys() or len(dtypes) > 1:
        dtype_names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise InputError(
            f"The networks compute in {dtype_names}; load all of them with torch_dtype "
            "torch.bfloat16, or torch.float32."
        )
    if first.device.type not in ("cpu", "meta"):
        values = {"device": first.device.type, **values}
    preset, checkpoint = _describe_networks(networks)
    options = read_run_options(values | {"precision": _PRECISIONS[first.dtype]})
    return make_setup(options, preset, checkpoint, world)


def _describe_networks(networks: Networks) -> tuple[Preset, Checkpoint]:
    """Finds the task of networks, and describes them as a checkpoint without files."""
    network = next(iter(networks.values()))
    config = network.config
    kind = _KIND_OF_NETWORK.get(type(network), KINDS.get(config.in_channels))
    heads = config.num_attention_heads
    if kind is None:
        raise InputError(
            f"A Wan network of {config.in_channels} input channels is not supported; t2v (16), i2v "
            "(36) and ti2v (48) are."
        )
    num_images = 0 if not config.image_dim else 2 if config.pos_embed_seq_len else 1

    def similarity(preset: Preset) -> tuple[bool, ...]:
        experts = {*networks} <= {*preset.experts}  # one of two may be missing
        return (
            preset.kind == kind,
            experts,
            preset.num_clip_vision_images == num_images,
            preset.num_heads == heads,
        )

    preset = max(PRESETS.values(), key=similarity)
    base = make_reference_checkpoint(preset)
    overrides = {
        "dim": heads * config.attention_head_dim,
        "num_heads": heads,
        "num_layers": config.num_layers,
    }
    if kind == "vace":
        overrides["vace_layers"] = tuple(config.vace_layers)
    files = DitFiles(Path(preset.folder), cast(DitConfig, {**base.config, **overrides}), {})
    return preset, replace(base, experts=dict.fromkeys(networks, files))
