"""The measured runs of a comparison: one pipeline whose attention layer is switched per run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan.app.run import Run
from wan.distributed.mesh import ParallelGroups
from wan.distributed.ulysses import SINGLE_RANK, Group, all_to_all_4D
from wan.media import video_writer
from wan.metering.exchange_order import TRACE_KIND
from wan.metering.meter import (
    Meter,
    PowerMeasurement,
    combine_devices,
    combine_spans,
    open_power_source,
)
from wan.metering.nvml import ClockLock
from wan.metering.power_source import MeterError
from wan.metering.recording import TraceRecording, make_exchange_plan
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import AttentionCall, LayerKeys, SelfAttention, TensorCall
from wan.pipeline import build
from wan.pipeline.denoise import DenoisingLoop
from wan.power.variants import Variant, VariantResult, measure_chunk_gaps, summarize_traces
from wan.settings import noise_schedule
from wan.settings.attention_modes import MODES, count_heads_per_rank
from wan.tasks.base import VideoParams
from wan.utils import trace
from wan.utils.files import remove_output
from wan.utils.log import logger

QUICK_STEPS = 4
"""Steps of each expert in a quick comparison; the first one is not measured."""


class SwitchableAttention:
    """Self-attention that calls one of several layers, selected by name, the same on all ranks."""

    def __init__(
        self, layers: Mapping[str, SelfAttention], get_selected_name: Callable[[], str]
    ) -> None:
        self.layers, self.get_selected_name = dict(layers), get_selected_name

    def start(self, *x_heads: Any, **context: Any) -> AttentionCall:
        return self.layers[self.get_selected_name()].start(*x_heads, **context)


def make_variant_layer(
    variant: Variant, base_layer: FAPowerCapAttention, group: Group = None
) -> FAPowerCapAttention:
    """Makes the attention layer of a variant, with the kernel, ring and backends of `base_layer`.

    Args:
        group: Ranks of the all-to-all; None for the group of `base_layer`.
    """
    return FAPowerCapAttention(
        comm_type=variant.comm_type,
        ulysses_pg=base_layer.ulysses_pg if group is None else group,
        layer=base_layer.layer,
        kernel=base_layer.kernel,
        ring=base_layer.ring,
        methods=base_layer.backends,
        clock=base_layer.clock,
        chunks=variant.chunks,
        exchange=base_layer.exchange,
        contiguous=base_layer.contiguous,
    )


class IdleGapAttention:
    """A control with the idle gaps of a chunked mode and the exchanges of the baseline.

    It exchanges all heads at once, attends to the head chunks one by one with the device idle
    between them, and exchanges the whole result. If it is as fast as the chunked mode, the gain
    comes from the idle gaps.

    Args:
        base_layer: Provides the kernel, ring and group.
        max_chunks: Maximum head chunks of a call.
        idle: Keeps the device idle for the length of a gap.
    """

    def __init__(
        self, base_layer: FAPowerCapAttention, max_chunks: int, idle: Callable[[], None]
    ) -> None:
        self.group, self.world_size = base_layer.ulysses_pg, base_layer.ulysses_size
        self.max_chunks = max_chunks
        self.idle = idle
        self._chunk_attention = make_variant_layer(
            Variant("a head chunk", 0), base_layer, SINGLE_RANK
        )

    def start(self, *_: Any, further_keys: LayerKeys | None = None, **context: Any) -> TensorCall:
        """Starts a call; arguments as for `SelfAttention`, without further keys."""
        assert further_keys is None, "drop_unsupported_control has removed this control"
        return TensorCall(partial(self, **context))

    def __call__(self, *qkv_BsND: Tensor, **context: Any) -> Tensor:
        heads = count_heads_per_rank(qkv_BsND[0].shape[2], self.world_size)
        qkv_BShD = [all_to_all_4D(x, 2, 1, self.group, heads) for x in qkv_BsND]
        chunk_outputs: list[Tensor] = []
        offset = 0
        for size in count_heads_per_rank(qkv_BShD[0].shape[2], min(self.max_chunks, *heads)):
            if chunk_outputs:
                self.idle()
            chunk = (x[:, :, offset : offset + size].contiguous() for x in qkv_BShD)
            chunk_outputs.append(self._chunk_attention(*chunk, **context))
            offset += size
        return all_to_all_4D(torch.cat(chunk_outputs, dim=2), 1, 2, self.group, heads)


class StepTimer(trace.Recorder):
    """Measures whole steps only, so that a timed run is not synchronized inside a step."""

    def __init__(self, clock: trace.Clock, num_steps: int) -> None:
        super().__init__(range(num_steps), clock, lambda _: None)
        self._step_times: list[tuple[trace.DeferredTime, trace.DeferredTime]] = []
        clock.start()

    @contextmanager
    def record_step(self, index: int, expert: str) -> Iterator[None]:
        begin = self.clock.now()
        yield
        self._step_times.append((begin, self.clock.now()))

    def read_seconds(self) -> list[float]:
        """Returns the duration of each step; the device must be synchronized."""
        return [(end() - begin()) / 1e9 for begin, end in self._step_times]


class ComparisonRounds:
    """Runs the rounds of a comparison; every rank calls every method, in the same order.

    All variants run the steps of one expert before those of the next, so that only one expert has
    to be in memory, and is loaded once per round.

    Args:
        run: The run of the baseline.
        variants: Compared variants, the baseline first.
        quick: Runs only QUICK_STEPS steps of each expert.
    """

    def __init__(
        self,
        run: Run,
        groups: ParallelGroups,
        variants: Sequence[Variant],
        out_folder: Path,
        quick: bool = False,
    ) -> None:
        self._run, self._groups, self._out_folder = run, groups, out_folder
        self._experts = [*dict.fromkeys(noise_schedule.make_noise_schedule(run.params).experts)]
        if run.setup.policy is not None:  # a step cache needs the steps of one video in sequence
            self._experts = self._experts[:1]
        self._experts_per_call = 1 if run.setup.policy is None else None
        self._timed_params = self._shorten_params(QUICK_STEPS) if quick else run.params
        self.results = [VariantResult(variant) for variant in variants]
        self._latents: dict[Variant, Tensor] = {}
        if groups.is_main:  # traces of an earlier comparison, perhaps with more ranks
            for file in (out_folder / "traces").glob("*/rank*.json"):
                remove_output(file, TRACE_KIND)
        self._selected_name, self._gap_seconds = variants[0].name, 0.0
        self._clock_lock: ClockLock | None = None
        self._pipeline = build.build_pipeline(
            run.setup, groups.device, groups, wrap_attention=self._build_attention
        )
        prompt_embeds = self._pipeline.encode_prompt(run.params)
        self._pipeline.text_encoder.release()
        self._inputs = replace(
            run.inputs, prompt_embeds=prompt_embeds[0], negative_prompt_embeds=prompt_embeds[1]
        )

    def _shorten_params(self, max_steps: int) -> VideoParams:
        """Returns video parameters with at most `max_steps` steps of each expert."""
        params = self._run.params
        experts = noise_schedule.make_noise_schedule(params).experts
        names = [*dict.fromkeys(experts)]
        steps_per_expert = min(max_steps, *(experts.count(name) for name in names))
        total_steps = steps_per_expert * len(names)
        return replace(
            params,
            timesteps=None if params.timesteps is None else params.timesteps[:total_steps],
            sample_steps=total_steps,
            boundary_step=steps_per_expert if len(names) == 2 else params.boundary_step,
        )

    def _build_attention(self, base_layer: SelfAttention) -> SelfAttention:
        assert isinstance(base_layer, FAPowerCapAttention), "there are exchanges"
        layers: dict[str, SelfAttention] = {}
        idle = self._groups.device.idle
        for variant in (result.variant for result in self.results):
            layers[variant.name] = make_variant_layer(variant, base_layer)
            if variant.adds_idle_gaps:
                layers[variant.name] = IdleGapAttention(
                    base_layer, MODES[1].chunks, lambda: idle(self._gap_seconds)
                )
        return SwitchableAttention(layers, lambda: self._selected_name)

    def warm_up(self) -> float:
        """Warms up and traces every variant with a step of each expert.

        Returns:
            Estimated seconds of a timed run of one variant.
        """
        short_params, device = self._shorten_params(1), self._groups.device
        recordings = {
            result.variant: self._make_recording(result.variant, short_params)
            for result in self.results
            if not result.variant.locks_clock  # same layer as the baseline
        }
        warm_loops, traced_loops = (
            {variant: self._prepare_loop(short_params) for variant in recordings} for _ in range(2)
        )
        step_seconds: dict[str, float] = {}
        for expert in self._experts:
            self._pipeline.experts.get(expert)
            for variant, recording in recordings.items():
                self._selected_name = variant.name
                self._denoise_expert(warm_loops[variant])
                warm_loops[variant].offload()
                begin = time.perf_counter()
                with trace.use_recorder(recording.recorder):
                    self._denoise_expert(traced_loops[variant])
                device.synchronize()
                step_seconds.setdefault(expert, time.perf_counter() - begin)
                traced_loops[variant].offload()
                if variant.comm_type == 1 and not self._gap_seconds:
                    local_gap = statistics.median(measure_chunk_gaps(recording.events) or [0.0])
                    self._gap_seconds = max(self._groups.gather(local_gap))  # the same on all ranks
                    logger.info("Rests of %s: %.3f ms (measured).", variant.name, 1e3 * local_gap)
        metadata = {"device": device.name(), "kernel": self._pipeline.kernel_name}
        for variant, recording in recordings.items():
            recording.write_trace_file(
                self._get_trace_folder(variant), metadata | {"variant": variant.name}
            )
        self._prepare_clock_lock(short_params)
        dist.barrier()  # until all ranks have written their traces
        for result in self.results if self._groups.is_main else ():
            if not result.variant.locks_clock:
                result.order_summary = summarize_traces(
                    self._get_trace_folder(result.variant), result.variant
                )
        experts = noise_schedule.make_noise_schedule(self._timed_params).experts
        if self._experts_per_call is None:
            return step_seconds[self._experts[0]] / short_params.num_forwards * len(experts)
        return sum(step_seconds[expert] for expert in experts)

    def _make_recording(self, variant: Variant, params: VideoParams) -> TraceRecording:
        device, steps = self._groups.device, tuple(range(params.num_forwards))
        parallel = self._run.setup.parallel
        parallel = replace(parallel, comm_type=variant.comm_type, chunks=variant.chunks)
        setup = replace(self._run.setup, parallel=parallel)
        returns_lse, rank = self._pipeline.can_return_lse, self._groups.rank
        plan = make_exchange_plan(setup, params, steps, returns_lse, device.type, rank)
        return TraceRecording(plan, device, groups=self._groups)

    def _get_trace_folder(self, variant: Variant) -> Path:
        return self._out_folder / "traces" / variant.slug

    def _prepare_clock_lock(self, short_params: VideoParams) -> None:
        """Prepares the control at the baseline's mean clock; drops it if a rank cannot lock."""
        device, lock_error = self._groups.device, ""
        self._selected_name = self.results[0].variant.name
        loop = self._prepare_loop(short_params)
        self._pipeline.experts.get(self._experts[0])
        with Meter(open_power_source(device)) as meter:
            self._denoise_expert(loop)
            device.synchronize()
        try:
            self._clock_lock = ClockLock(device, meter.stop().mean_mhz)
            with self._clock_lock:
                pass
        except MeterError as error:
            lock_error = str(error)
        lock_errors = [error for error in self._groups.gather(lock_error) if error]
        if lock_errors:
            logger.info("No run with a locked clock: %s.", lock_errors[0])
            self.results = [result for result in self.results if not result.variant.locks_clock]

    def _prepare_loop(self, params: VideoParams) -> DenoisingLoop:
        """Prepares a denoising loop and moves its tensors to host memory."""
        loop = self._pipeline.prepare_denoising(params, self._inputs)
        loop.offload()
        return loop

    def _denoise_expert(self, loop: DenoisingLoop) -> Tensor:
        """Runs the steps of the next expert, or all steps with a step cache."""
        return self._pipeline.denoise(loop, self._experts_per_call)

    def measure_round(self, order: Sequence[VariantResult]) -> None:
        """Runs and measures one round.

        Args:
            order: Results to extend, in the order in which their variants run.
        """
        spans: dict[Variant, list[_ExpertMeasurement]] = {result.variant: [] for result in order}
        loops = {variant: self._prepare_loop(self._timed_params) for variant in spans}
        for expert in self._experts:
            self._pipeline.experts.get(expert)
            for variant in spans:
                spans[variant].append(self._measure_expert(variant, loops[variant], expert))
        for result in order:
            variant_spans = spans[result.variant]
            self._latents.setdefault(result.variant, loops[result.variant].latents.cpu())
            result.seconds.append(sum(span.seconds for span in variant_spans))
            result.steps.append([step for span in variant_spans for step in span.step_seconds])
            result.power.append(combine_spans([span.power for span in variant_spans]))
            peaks = [span.peak_memory for span in variant_spans if span.peak_memory is not None]
            result.peak_memory = max([*peaks, result.peak_memory or 0]) if peaks else None

    def _measure_expert(
        self, variant: Variant, loop: DenoisingLoop, expert: str
    ) -> _ExpertMeasurement:
        """Runs and measures the steps of one expert with one variant."""
        device, self._selected_name = self._groups.device, variant.name
        device.reset_peak_memory()
        loop.to(device.torch_device)
        timer = StepTimer(device.make_clock(), self._timed_params.num_forwards)
        clock_lock = self._clock_lock if variant.locks_clock else None
        dist.barrier()
        with (
            clock_lock or nullcontext(),
            trace.use_recorder(timer),
            Meter(open_power_source(device)) as meter,
        ):
            begin = time.perf_counter()
            self._denoise_expert(loop)
            device.synchronize()
            seconds = time.perf_counter() - begin
        loop.offload()
        step_seconds = timer.read_seconds()
        if self._timed_params is not self._run.params:  # extrapolates to all steps
            num_steps = noise_schedule.make_noise_schedule(self._run.params).experts.count(expert)
            seconds = statistics.median(step_seconds[1:] or step_seconds) * num_steps
        ranks = self._groups.gather((seconds, meter.stop(), device.peak_memory()))
        peaks = [rank[2] for rank in ranks if rank[2] is not None]
        return _ExpertMeasurement(
            max(rank[0] for rank in ranks),
            step_seconds,
            combine_devices([rank[1] for rank in ranks]),
            max(peaks, default=None),
        )

    def compare_videos(self) -> None:
        """Compares latents and videos with the baseline's, writes the videos, closes the groups.

        Videos with the baseline's latents are not decoded. A quick comparison decodes no video.
        """
        self._pipeline.experts.release()
        baseline, *other_results = self.results
        baseline_latents = self._latents[baseline.variant]
        baseline.max_pixel_difference = 0
        for result in other_results:
            latents = self._latents[result.variant]
            is_equal = torch.equal(latents, baseline_latents)
            result.latents_difference = (
                0.0 if is_equal else _compute_relative_difference(latents, baseline_latents)
            )
            result.max_pixel_difference = 0 if is_equal else None
        if self._timed_params is self._run.params:
            baseline_frames = self._decode_video(baseline)
            for result in other_results:
                if result.latents_difference and (frames := self._decode_video(result)) is not None:
                    assert baseline_frames is not None
                    result.max_pixel_difference, result.psnr = _compare_frames(
                        frames, baseline_frames
                    )
        self._groups.close()

    def _decode_video(self, result: VariantResult) -> Tensor | None:
        """Decodes and writes a video on rank 0, and returns its values from 0 to 255."""
        frames = self._pipeline.decode(self._latents[result.variant])
        if frames is None:
            return None
        path = self._out_folder / f"{result.variant.slug}.mp4"
        video_writer.write_video(frames, replace(self._run.output, save_file=path))
        if not bool(frames.isfinite().all()):
            logger.warning("The video of %s holds NaN or infinity.", result.variant.name)
        return ((frames + 1) * 127.5).round_()


@dataclass(frozen=True)
class _ExpertMeasurement:
    """Measurement of one expert's steps in a run; peak_memory is that of the fullest device."""

    seconds: float
    step_seconds: list[float]
    power: PowerMeasurement
    peak_memory: int | None


def _compute_relative_difference(latents: Tensor, baseline: Tensor) -> float:
    """Returns the largest difference, relative to the largest value of the baseline."""
    return float((latents - baseline).abs().max() / baseline.abs().max())


def _compare_frames(frames: Tensor, baseline: Tensor) -> tuple[int | None, float]:
    """Returns the largest difference of two videos and their PSNR in dB."""
    difference = frames.sub(baseline).abs_()
    if not bool(difference.isfinite().all()):
        return None, float("nan")
    mean = float(difference.square_().mean())
    return int(difference.max()), 10 * math.log10(255**2 / mean) if mean else float("inf")
