"""The denoising loop of a causal network: block after block of a video's latent frames.

A block is denoised in the steps of the noise schedule, by a separate solver. One more forward
pass at timestep 0 keeps the keys and values of the clean block, to which later blocks attend. The
initial noise of the whole video is drawn first, then that of the stochastic steps, block by block.

Where the prompt changes, the kept frames after the sink pass the network once more, with the new
prompt, in order. So each attends to those before it, as if they had been generated with it.

Blocks that an earlier run has finished take no steps. Their noise is drawn and discarded, and their
clean passes are run in order: the keys of a layer depend on frames that have left the window.
Only passes are left out whose keys a new prompt replaces before a block is denoised.

Legend: Z latent channels, f h w latent frames/height/width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from wan.cache.policy import Cache
from wan.checkpoint.lora.folder import VideoLoras
from wan.kernels.forward_context import StepInfo
from wan.modules.kv_cache import KVCache
from wan.pipeline.denoise import (
    NEVER_CANCELLED,
    CancellationPoint,
    Denoiser,
    DenoisingLoop,
    ExpertSource,
    RunBranches,
    StepPrediction,
)
from wan.pipeline.preview import Preview
from wan.pipeline.scheduler import make_solver
from wan.settings.noise_schedule import (
    NoiseSchedule,
    count_noise_samples,
    make_noise_schedule,
)
from wan.tasks.base import DenoiseInputs, StepCallback, VideoParams
from wan.tasks.causal import CausalInputs
from wan.utils.log import make_step_bar


class BlockLoop(DenoisingLoop):
    """The loop of a causal video; a step is one of a block.

    Attributes:
        latents: The latents of the current block; at the end those of the video, [Z,f,h,w].
        kv_cache: Keys and values of the finished frames.
    """

    _inputs: CausalInputs

    def __init__(
        self,
        params: VideoParams,
        inputs: CausalInputs,
        callback_on_step_end: StepCallback | None = None,
        preview: Preview | None = None,
        loras: VideoLoras | None = None,
    ) -> None:
        super().__init__(params, inputs, callback_on_step_end, preview, loras)
        self._block_params = params.task.make_forward_params(params)
        self._noise, self._blocks = inputs.initial_latents, list[Tensor]()
        self._block_schedule = schedule = make_noise_schedule(self.params)
        self._block_size = self._block_params.latent_shape[1]
        self._num_blocks = num_blocks = params.task.count_clips(params)
        contexts, finished = inputs.contexts, inputs.finished_latents
        self._prompt_changes = [
            block for block in range(1, num_blocks) if contexts[block] is not contexts[block - 1]
        ]
        self._num_finished = 0 if finished is None else finished.shape[1] // self._block_size
        if inputs.sample_noise is not None:
            for _ in range(self._num_finished * (count_noise_samples(params) - 1)):
                inputs.sample_noise()
        self._noise_schedule = NoiseSchedule(
            (*schedule.sigmas[:-1] * num_blocks, 0.0),
            schedule.timesteps * num_blocks,
            schedule.experts * num_blocks,
        )
        self._num_forwards = len(self._noise_schedule.experts)
        self._timesteps = self._timesteps.repeat(num_blocks)
        self.kv_cache = KVCache(params.task.count_kept_latents(params), params.sink_size or 0)

    def advance(
        self,
        experts: ExpertSource,
        run_branches: RunBranches | None = None,
        step_cache: Cache | None = None,
        num_experts: int | None = None,
        cancellation_point: CancellationPoint = NEVER_CANCELLED,
        bar: Any = None,
    ) -> Tensor:
        """Generates all blocks; see `DenoisingLoop.advance`."""
        blocks = [*self.iterate_blocks(experts, cancellation_point, bar)]
        self.latents = torch.cat(blocks, dim=1)
        return self.latents

    def iterate_blocks(
        self,
        experts: ExpertSource,
        cancellation_point: CancellationPoint = NEVER_CANCELLED,
        bar: Any = None,
    ) -> Iterator[Tensor]:
        """Yields the latents of each block, [Z,n,h,w], as soon as it is denoised.

        The clean pass of a block is run when the next one is requested. All ranks iterate at the
        same time, and get the same blocks. The arguments are those of `advance`.
        """
        num_steps, steps = len(self._noise_schedule.experts), len(self._block_schedule.experts)
        name, num_finished = self._block_schedule.experts[0], self._num_finished
        get_model = partial(experts.get, name)
        with make_step_bar(num_steps) if bar is None else nullcontext(bar) as bar:
            if num_finished < self._num_blocks:
                get_model()
            bar.total = num_steps
            bar.initial = bar.n = num_finished * steps
            bar.unpause()  # its rate excludes loading
            bar.set_postfix_str(name)
            for block in range(self._num_blocks):
                with torch.no_grad():
                    self._begin_block(block, get_model)
                    if block < num_finished:
                        cancellation_point.check(block * steps, num_steps)
                        self._take_finished_block(block)
                    else:
                        self._denoise_block(block, get_model(), cancellation_point, bar)
                self._blocks.append(self.latents)
                yield self.latents
                first = max(block + 1, num_finished)  # of the blocks that may attend to its keys
                in_sink = block * self._block_size < self.kv_cache.sink
                if first < (self._num_blocks if in_sink else self._find_prompt_change(block)):
                    with torch.no_grad():
                        self._keep_clean(get_model(), self._blocks[-1], block * self._block_size)
            cancellation_point.check(num_steps, num_steps)
        self.kv_cache.clear()

    def _find_prompt_change(self, block: int) -> int:
        """Returns the first block after this one with another prompt; else the number of blocks."""
        return next((x for x in self._prompt_changes if x > block), self._num_blocks)

    def _take_finished_block(self, block: int) -> None:
        finished = self._inputs.finished_latents
        assert finished is not None
        start, stop = (index * self._block_size for index in (block, block + 1))
        self.latents = finished[:, start:stop].to(self.latents.device).contiguous()
        self._num_steps_done += len(self._block_schedule.experts)

    def _denoise_block(
        self, block: int, model: Denoiser, cancellation_point: CancellationPoint, bar: Any
    ) -> None:
        num_steps, steps = len(self._noise_schedule.experts), len(self._block_schedule.experts)
        for index in range(block * steps, (block + 1) * steps):
            cancellation_point.check(index, num_steps)
            self._step(index, model, None, Cache(), cancellation_point)
            bar.update()
        self._check_finite(self._block_schedule.experts[0])
        if self._inputs.callback_on_block_end is not None:
            with cancellation_point.local_section():
                self._inputs.callback_on_block_end(block, self.latents)

    def _begin_block(self, block: int, get_model: Callable[[], Denoiser]) -> None:
        """Sets noise, prompt, solver and place of a block."""
        start, device = block * self._block_size, self.latents.device
        self.latents = self._noise[:, start : start + self._block_size].to(device)
        context = self._inputs.contexts[block]
        inputs = replace(self._inputs, context=context)
        if block:
            plain = DenoiseInputs(self.latents, context, context)
            inputs = replace(
                inputs,
                make_model_timesteps=plain.make_model_timesteps,
                restore_fixed_frames=plain.restore_fixed_frames,
                num_fixed_frames=0,
            )
        kwargs = {"kv_cache": self.kv_cache, "start_frame": start}
        self._inputs = replace(inputs, model_kwargs={"cond": kwargs})
        self._solver, _ = make_solver(self.params, self._block_schedule, inputs.sample_noise)
        if block in self._prompt_changes and self._num_finished < self._find_prompt_change(block):
            self._renew_cache(get_model(), start)

    def _renew_cache(self, model: Denoiser, num_frames: int) -> None:
        """Computes the kept keys of the frames after the sink again, with the current prompt."""
        cache, size, latents = self.kv_cache, self._block_size, torch.cat(self._blocks, dim=1)
        start = cache.restart(num_frames)
        while start < num_frames:
            stop = min((start // size + 1) * size, num_frames)
            self._keep_clean(model, latents[:, start:stop], start)
            start = stop

    def _keep_clean(self, model: Denoiser, latents: Tensor, start: int) -> None:
        """Runs the network on clean frames, and keeps their keys and values."""
        index, expert = max(self._num_steps_done - 1, 0), self._block_schedule.experts[-1]
        step = StepInfo(index, self._num_forwards, "cond", expert, (0, 0, 0), 0)
        step = self._set_grid(step, latents)
        kwargs = {"kv_cache": self.kv_cache, "start_frame": start}
        inputs = replace(self._inputs, model_kwargs={"cond": kwargs})
        StepPrediction(model, latents, torch.zeros(1), inputs, step).predict_velocity("cond")

    def _make_prediction(
        self, index: int, model: Denoiser, run_branches: RunBranches | None, step_cache: Cache
    ) -> StepPrediction:
        prediction = super()._make_prediction(index, model, run_branches, step_cache)
        return replace(prediction, step=self._set_grid(prediction.step, self.latents))

    def _set_grid(self, step: StepInfo, latents: Tensor) -> StepInfo:
        """Returns a step with the tokens of these frames, instead of the video's."""
        grid = latents.shape[1], *self._block_params.grid[1:]
        return replace(step, grid=grid, valid_len=prod(grid))
