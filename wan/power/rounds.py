"""The measured runs of a comparison: one pipeline whose attention layer is switched per run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan import trace
from wan.distributed.exchange import SINGLE_RANK, Group, all_to_all_4D
from wan.distributed.mesh import ParallelGroups
from wan.evidence.meter import Measured, Meter, MeterError, combine, in_turn, source_of
from wan.evidence.nvml import Lock
from wan.evidence.order import TRACE
from wan.evidence.recording import Recording, plan_of
from wan.log import logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import PackedAttentionCall, PackedSelfAttention, SelfAttention
from wan.output_files import remove_output
from wan.pipeline import build, video
from wan.pipeline.denoise import DenoisingLoop
from wan.pipeline.pipeline import Inputs
from wan.power.compare import Result, Variant, rests, schedule
from wan.run import Run
from wan.settings import noise_schedule
from wan.settings.attention_modes import MODES, count_heads_per_rank
from wan.settings.request import VideoParams

QUICK = 4
"""Steps of each expert in a quick comparison; the first one is not measured."""


class SideBySide:
    """Self-attention that calls one of several layers, selected by name, the same on all ranks."""

    def __init__(self, layers: Mapping[str, SelfAttention], chosen: Callable[[], str]) -> None:
        self.layers, self.chosen = dict(layers), chosen

    def __call__(self, *qkv_BsND: Tensor, **context: Any) -> Tensor:
        return self.layers[self.chosen()](*qkv_BsND, **context)

    def begin(self, *x_heads_step: Any) -> PackedAttentionCall | None:
        """Starts a packed call of the selected layer; None if it does not support that."""
        layer = self.layers[self.chosen()]
        return layer.start(*x_heads_step) if isinstance(layer, PackedSelfAttention) else None


def layer_of(
    variant: Variant, built: FAPowerCapAttention, group: Group = None
) -> FAPowerCapAttention:
    """Makes the attention layer of a variant, with the kernel, ring and backends of `base_layer`.

    Args:
        group: Ranks of the all-to-all; None for the group of `base_layer`.
    """
    return FAPowerCapAttention(
        comm_type=variant.comm_type,
        ulysses_pg=built.ulysses_pg if group is None else group,
        layer=built.layer,
        kernel=built.kernel,
        ring=built.ring,
        methods=built.backends,
        clock=built.clock,
        chunks=variant.chunks,
        exchange=built.exchange,
        contiguous=built.contiguous,
    )


class Rests:
    """A control with the idle gaps of a chunked mode and the exchanges of the baseline.

    It exchanges all heads at once, attends to the head chunks one by one with the device idle
    between them, and exchanges the whole result. If it is as fast as the chunked mode, the gain
    comes from the idle gaps.

    Args:
        base_layer: Provides the kernel, ring and group.
        max_chunks: Maximum head chunks of a call.
        idle: Keeps the device idle for the length of a gap.
    """

    def __init__(self, built: FAPowerCapAttention, chunks: int, rest: Callable[[], None]) -> None:
        self.group, self.world, self.chunks = built.ulysses_pg, built.world_size, chunks
        self.rest = rest
        self._alone = layer_of(Variant("a head chunk", 0), built, SINGLE_RANK)

    def __call__(self, *qkv_BsND: Tensor, **context: Any) -> Tensor:
        """Computes attention; arguments and result as for `FAPowerCapAttention`."""
        heads = count_heads_per_rank(qkv_BsND[0].shape[2], self.world)
        qkv_BShD = [all_to_all_4D(x, 2, 1, self.group, heads) for x in qkv_BsND]
        parts: list[Tensor] = []
        first = 0
        for size in count_heads_per_rank(qkv_BShD[0].shape[2], min(self.chunks, *heads)):
            if parts:
                self.rest()
            chunk = (x[:, :, first : first + size].contiguous() for x in qkv_BShD)
            parts.append(self._alone(*chunk, **context))
            first += size
        return all_to_all_4D(torch.cat(parts, dim=2), 1, 2, self.group, heads)


class StepTimes(trace.Recorder):
    """Measures whole steps only, so that a timed run is not synchronized inside a step."""

    def __init__(self, clock: trace.Clock, count: int) -> None:
        super().__init__(range(count), clock, lambda _: None)
        self._ends: list[tuple[trace.Later, trace.Later]] = []
        clock.start()

    @contextmanager
    def step(self, index: int, expert: str) -> Iterator[None]:
        begin = self.clock.now()
        yield
        self._ends.append((begin, self.clock.now()))

    def seconds(self) -> list[float]:
        """Returns the duration of each step; the device must be synchronized."""
        return [(end() - begin()) / 1e9 for begin, end in self._ends]


class Rounds:
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
        team: ParallelGroups,
        variants: Sequence[Variant],
        out: Path,
        quick: bool = False,
    ) -> None:
        self._run, self._team, self._out = run, team, out
        self._experts = [*dict.fromkeys(noise_schedule.make_noise_schedule(run.request).experts)]
        if run.setup.policy is not None:  # a step cache needs the steps of one video in sequence
            self._experts = self._experts[:1]
        self._phases = 1 if run.setup.policy is None else None
        self._timed = self._with_steps(QUICK) if quick else run.request
        self.results = [Result(variant) for variant in variants]
        self._latents: dict[Variant, Tensor] = {}
        if team.is_main:  # traces of an earlier comparison, perhaps with more ranks
            for file in (out / "traces").glob("*/rank*.json"):
                remove_output(file, TRACE)
        self._chosen, self._rest = variants[0].name, 0.0
        self._lock: Lock | None = None
        self._pipeline = build.build_pipeline(
            run.setup, team.device, team, wrap_attention=self._beside
        )
        texts = self._pipeline.encode_prompt(run.request)
        self._pipeline.text_encoder.release()
        self._inputs = Inputs(run.image, run.last_image, *texts)

    def _with_steps(self, count: int) -> VideoParams:
        """Returns video parameters with at most `max_steps` steps of each expert."""
        request = self._run.request
        experts = noise_schedule.make_noise_schedule(request).experts
        names = [*dict.fromkeys(experts)]
        each = min(count, *(experts.count(name) for name in names))
        total = each * len(names)
        return replace(
            request,
            timesteps=None if request.timesteps is None else request.timesteps[:total],
            sample_steps=total,
            boundary_step=each if len(names) == 2 else request.boundary_step,
        )

    def _beside(self, built: SelfAttention) -> SelfAttention:
        assert isinstance(built, FAPowerCapAttention), "there are exchanges"
        layers: dict[str, SelfAttention] = {}
        idle = self._team.device.idle
        for variant in (result.variant for result in self.results):
            layers[variant.name] = layer_of(variant, built)
            if variant.rests:
                layers[variant.name] = Rests(built, MODES[1].chunks, lambda: idle(self._rest))
        return SideBySide(layers, lambda: self._chosen)

    def prepare(self) -> float:
        """Warms up and traces every variant with a step of each expert.

        Returns:
            Estimated seconds of a timed run of one variant.
        """
        short, device = self._with_steps(1), self._team.device
        recordings = {
            result.variant: self._recording(result.variant, short)
            for result in self.results
            if not result.variant.locked  # same layer as the baseline
        }
        warm, traced = (
            {variant: self._prepared(short) for variant in recordings} for _ in range(2)
        )
        steps: dict[str, float] = {}
        for expert in self._experts:
            self._pipeline.experts.get(expert)
            for variant, recording in recordings.items():
                self._chosen = variant.name
                self._take(warm[variant])
                warm[variant].offload()
                begun = time.perf_counter()
                with trace.recording(recording.recorder):
                    self._take(traced[variant])
                device.synchronize()
                steps.setdefault(expert, time.perf_counter() - begun)
                traced[variant].offload()
                if variant.comm_type == 1 and not self._rest:
                    own = statistics.median(rests(recording.events) or [0.0])
                    self._rest = max(self._team.gather(own))  # the same on all ranks
                    logger.info("Rests of %s: %.3f ms (measured).", variant.name, 1e3 * own)
        about = {"device": device.name(), "kernel": self._pipeline.kernel}
        for variant, recording in recordings.items():
            recording.write(self._traces(variant), about | {"variant": variant.name})
        self._lock_clock(short)
        dist.barrier()  # until all ranks have written their traces
        for result in self.results if self._team.is_main else ():
            if not result.variant.locked:
                result.schedule = schedule(self._traces(result.variant), result.variant)
        experts = noise_schedule.make_noise_schedule(self._timed).experts
        if self._phases is None:
            return steps[self._experts[0]] / short.sample_steps * len(experts)
        return sum(steps[expert] for expert in experts)

    def _recording(self, variant: Variant, short: VideoParams) -> Recording:
        device, steps = self._team.device, tuple(range(short.sample_steps))
        parallel = self._run.setup.parallel
        parallel = replace(parallel, comm_type=variant.comm_type, chunks=variant.chunks)
        setup = replace(self._run.setup, parallel=parallel)
        merges, rank = self._pipeline.returns_lse, self._team.rank
        plan = plan_of(setup, short, steps, merges, device.type, rank)
        return Recording(plan, device, team=self._team)

    def _traces(self, variant: Variant) -> Path:
        return self._out / "traces" / variant.slug

    def _lock_clock(self, short: VideoParams) -> None:
        """Prepares the control at the baseline's mean clock; drops it if a rank cannot lock."""
        device, why = self._team.device, ""
        self._chosen = self.results[0].variant.name
        video = self._prepared(short)
        self._pipeline.experts.get(self._experts[0])
        with Meter(source_of(device)) as meter:
            self._take(video)
            device.synchronize()
        try:
            self._lock = Lock(device, meter.stop().mean_mhz)
            with self._lock:
                pass
        except MeterError as reason:
            why = str(reason)
        reasons = [reason for reason in self._team.gather(why) if reason]
        if reasons:
            logger.info("No run with a locked clock: %s.", reasons[0])
            self.results = [result for result in self.results if not result.variant.locked]

    def _prepared(self, request: VideoParams) -> DenoisingLoop:
        """Prepares a denoising loop and moves its tensors to host memory."""
        video = self._pipeline.prepare_denoising(request, self._inputs)
        video.offload()
        return video

    def _take(self, video: DenoisingLoop) -> Tensor:
        """Runs the steps of the next expert, or all steps with a step cache."""
        return self._pipeline.denoise(video, self._phases)

    def measure(self, order: Sequence[Result]) -> None:
        """Runs and measures one round.

        Args:
            order: Results to extend, in the order in which their variants run.
        """
        spans: dict[Variant, list[_Metered]] = {result.variant: [] for result in order}
        videos = {variant: self._prepared(self._timed) for variant in spans}
        for expert in self._experts:
            self._pipeline.experts.get(expert)
            for variant in spans:
                spans[variant].append(self._span(variant, videos[variant], expert))
        for result in order:
            own = spans[result.variant]
            self._latents.setdefault(result.variant, videos[result.variant].latents.cpu())
            result.seconds.append(sum(span.seconds for span in own))
            result.steps.append([step for span in own for step in span.steps])
            result.power.append(in_turn([span.power for span in own]))
            peaks = [span.peak for span in own if span.peak is not None]
            result.peak_memory = max([*peaks, result.peak_memory or 0]) if peaks else None

    def _span(self, variant: Variant, video: DenoisingLoop, expert: str) -> _Metered:
        """Runs and measures the steps of one expert with one variant."""
        device, self._chosen = self._team.device, variant.name
        device.reset_peak_memory()
        video.to(device.torch_device)
        times = StepTimes(device.clock(), self._timed.sample_steps)
        lock = self._lock if variant.locked else None
        dist.barrier()
        with lock or nullcontext(), trace.recording(times), Meter(source_of(device)) as meter:
            begun = time.perf_counter()
            self._take(video)
            device.synchronize()
            seconds = time.perf_counter() - begun
        video.offload()
        steps = times.seconds()
        if self._timed is not self._run.request:  # extrapolates to all steps
            count = noise_schedule.make_noise_schedule(self._run.request).experts.count(expert)
            seconds = statistics.median(steps[1:] or steps) * count
        ranks = self._team.gather((seconds, meter.stop(), device.peak_memory()))
        peaks = [rank[2] for rank in ranks if rank[2] is not None]
        return _Metered(
            max(rank[0] for rank in ranks),
            steps,
            combine([rank[1] for rank in ranks]),
            max(peaks, default=None),
        )

    def close(self) -> None:
        """Compares latents and videos with the baseline's, writes the videos, closes the groups.

        Videos with the baseline's latents are not decoded. A quick comparison decodes no video.
        """
        self._pipeline.experts.release()
        first, *others = self.results
        base = self._latents[first.variant]
        first.largest = 0
        for result in others:
            own = self._latents[result.variant]
            equal = torch.equal(own, base)
            result.apart = 0.0 if equal else _relative(own, base)
            result.largest = 0 if equal else None
        if self._timed is self._run.request:
            levels = self._decoded(first)
            for result in others:
                if result.apart and (other := self._decoded(result)) is not None:
                    assert levels is not None
                    result.largest, result.psnr = _difference(other, levels)
        self._team.close()

    def _decoded(self, result: Result) -> Tensor | None:
        """Decodes and writes a video on rank 0, and returns its values from 0 to 255."""
        frames = self._pipeline.decode(self._latents[result.variant])
        if frames is None:
            return None
        path = self._out / f"{result.variant.slug}.mp4"
        video.save_video(frames, replace(self._run.output, save_file=path))
        if not bool(frames.isfinite().all()):
            logger.warning("The video of %s holds NaN or infinity.", result.variant.name)
        return ((frames + 1) * 127.5).round_()


@dataclass(frozen=True)
class _Metered:
    """Measurement of one expert's steps in a run; peak_memory is that of the fullest device."""

    seconds: float
    steps: list[float]
    power: Measured
    peak: int | None


def _relative(x: Tensor, base: Tensor) -> float:
    """Returns the largest difference, relative to the largest value of the baseline."""
    return float((x - base).abs().max() / base.abs().max())


def _difference(levels: Tensor, base: Tensor) -> tuple[int | None, float]:
    """Returns the largest difference of two videos and their PSNR in dB."""
    difference = levels.sub(base).abs_()
    if not bool(difference.isfinite().all()):
        return None, float("nan")
    mean = float(difference.square_().mean())
    return int(difference.max()), 10 * math.log10(255**2 / mean) if mean else float("inf")
