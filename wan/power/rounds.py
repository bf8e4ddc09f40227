"""The measured runs of a comparison: one pipeline, in which a run uses one variant's layer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan import trace
from wan.distributed.exchange import ALONE, Group, all_to_all_4D
from wan.distributed.mesh import Team
from wan.evidence.meter import Meter, MeterError, combine, source_of
from wan.evidence.nvml import Lock
from wan.evidence.recording import Recording, plan_of
from wan.log import logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import SelfAttention, Sending, SendsWritten
from wan.pipeline import build, video
from wan.pipeline.pipeline import Inputs
from wan.power.compare import Result, Variant, rests, schedule
from wan.run import Run
from wan.settings import timesteps
from wan.settings.request import Request
from wan.settings.schedule import MODES, heads_per_rank


class SideBySide:
    """Self-attention of a block by the layer that `chosen` names; all ranks choose the same."""

    def __init__(self, layers: Mapping[str, SelfAttention], chosen: Callable[[], str]) -> None:
        self.layers, self.chosen = dict(layers), chosen

    def __call__(self, *qkv_BsND: Tensor, **context: Any) -> Tensor:
        return self.layers[self.chosen()](*qkv_BsND, **context)

    def begin(self, *x_heads_step: Any) -> Sending | None:
        """As the chosen layer's, if it has one."""
        layer = self.layers[self.chosen()]
        return layer.begin(*x_heads_step) if isinstance(layer, SendsWritten) else None


def layer_of(
    variant: Variant, built: FAPowerCapAttention, group: Group = None
) -> FAPowerCapAttention:
    """Returns the layer of a variant, with the kernel, ring and methods of one that exists.

    Args:
        variant: What the layer belongs to.
        built: The layer that exists.
        group: The ranks that exchange heads; None: those of the layer that exists.
    """
    return FAPowerCapAttention(
        comm_type=variant.comm_type,
        ulysses_pg=built.ulysses_pg if group is None else group,
        layer=built.layer,
        kernel=built.kernel,
        ring=built.ring,
        methods=built.methods,
        clock=built.clock,
        chunks=variant.chunks,
        exchange=built.exchange,
        contiguous=built.contiguous,
    )


class Rests:
    """A control that has the rests of a chunked mode and the exchanges of the baseline.

    It exchanges all heads first. Then it attends to one head chunk after the other, and the device
    is idle between them. The results go back together. If this is as fast as the chunked mode, the
    rests themselves help.

    Args:
        built: The layer whose kernel, ring and group are used.
        chunks: Most chunks of a call.
        rest: Keeps the device idle for a while.
    """

    def __init__(self, built: FAPowerCapAttention, chunks: int, rest: Callable[[], None]) -> None:
        self.group, self.world, self.chunks = built.ulysses_pg, built.world_size, chunks
        self.rest = rest
        self._alone = layer_of(Variant("a head chunk", 0), built, ALONE)

    def __call__(self, *qkv_BsND: Tensor, **context: Any) -> Tensor:
        """Takes and returns what `FAPowerCapAttention` does."""
        heads = heads_per_rank(qkv_BsND[0].shape[2], self.world)
        qkv_BShD = [all_to_all_4D(x, 2, 1, self.group, heads) for x in qkv_BsND]
        parts: list[Tensor] = []
        first = 0
        for size in heads_per_rank(qkv_BShD[0].shape[2], min(self.chunks, *heads)):
            if parts:
                self.rest()
            chunk = (x[:, :, first : first + size].contiguous() for x in qkv_BShD)
            parts.append(self._alone(*chunk, **context))
            first += size
        return all_to_all_4D(torch.cat(parts, dim=2), 1, 2, self.group, heads)


class StepTimes(trace.Recorder):
    """Measures whole steps only, so that nothing waits for the device inside a timed run."""

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
        """Returns the length of each step; the device's work must have ended."""
        return [(end() - begin()) / 1e9 for begin, end in self._ends]


class Rounds:
    """Makes the runs; every rank calls every method, in the same order.

    Args:
        run: The video that is made; its attention is the baseline's.
        team: The ranks.
        variants: What is compared, the baseline first.
        out: Folder of the results.
    """

    def __init__(self, run: Run, team: Team, variants: Sequence[Variant], out: Path) -> None:
        self._run, self._team, self._out = run, team, out
        self.results = [Result(variant) for variant in variants]
        self._latents: dict[Variant, Tensor] = {}
        if team.is_main:  # of an earlier comparison, perhaps with more ranks
            for file in (out / "traces").glob("*/rank*.json"):
                file.unlink()
        self._chosen, self._rest = variants[0].name, 0.0
        self._lock: Lock | None = None
        self._pipeline = build.pipeline(run.setup, team.device, team, attention=self._beside)
        self._texts = self._pipeline.texts(run.request)
        self._pipeline.text.release()

    def _beside(self, built: SelfAttention) -> SelfAttention:
        assert isinstance(built, FAPowerCapAttention), "there are exchanges"
        layers: dict[str, SelfAttention] = {}
        idle = self._team.device.idle
        for variant in (result.variant for result in self.results):
            layers[variant.name] = layer_of(variant, built)
            if variant.rests:
                layers[variant.name] = Rests(built, MODES[1].chunks, lambda: idle(self._rest))
        return SideBySide(layers, lambda: self._chosen)

    def prepare(self) -> None:
        """Warms up every layer with a step of each expert, and traces it; no time counts yet."""
        request, parallel = self._run.request, self._run.setup.parallel
        two = len(set(timesteps.schedule(request).experts)) == 2
        short = replace(
            request,
            timesteps=None if request.timesteps is None else request.timesteps[:2],
            sample_steps=min(2, request.sample_steps),
            boundary_step=1 if two else request.boundary_step,
        )
        device, rank, steps = self._team.device, self._team.rank, tuple(range(short.sample_steps))
        for result in self.results:
            variant = result.variant
            if variant.locked:  # its layer is the baseline's
                continue
            self._chosen = variant.name
            self._denoise(short)
            parallel = replace(parallel, comm_type=variant.comm_type, chunks=variant.chunks)
            setup = replace(self._run.setup, parallel=parallel)
            plan = plan_of(setup, short, steps, self._pipeline.merges, device.type, rank)
            recording = Recording(plan, device, team=self._team)
            with trace.recording(recording.recorder):
                self._denoise(short)
            about = {"device": device.name(), "kernel": self._pipeline.kernel}
            recording.write(self._traces(variant), about | {"variant": variant.name})
            if variant.comm_type == 1 and not self._rest:
                own = statistics.median(rests(recording.events) or [0.0])
                self._rest = max(self._team.gather(own))  # the same on all ranks
                logger.info("Rests of %s: %.3f ms (measured).", variant.name, 1e3 * own)
        self._lock_clock(short)
        dist.barrier()  # all ranks have written their traces
        for result in self.results if self._team.is_main else ():
            if not result.variant.locked:
                result.schedule = schedule(self._traces(result.variant), result.variant)

    def _traces(self, variant: Variant) -> Path:
        return self._out / "traces" / variant.slug

    def _lock_clock(self, short: Request) -> None:
        """Prepares the control at the baseline's mean clock; drops it where a rank may not lock."""
        device, why = self._team.device, ""
        self._chosen = self.results[0].variant.name
        with Meter(source_of(device)) as meter:
            self._denoise(short)
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

    def measure(self, result: Result) -> float:
        """Makes one run of the whole request, metered; returns the seconds of denoising."""
        variant, device = result.variant, self._team.device
        self._chosen = variant.name
        device.reset_peak_memory()
        steps = StepTimes(device.clock(), self._run.request.sample_steps)
        lock = self._lock if variant.locked else None
        dist.barrier()
        with lock or nullcontext(), trace.recording(steps), Meter(source_of(device)) as meter:
            begun = time.perf_counter()
            latents = self._denoise(self._run.request)
            device.synchronize()
            seconds = time.perf_counter() - begun
        self._latents.setdefault(variant, latents.cpu())
        ranks = self._team.gather((seconds, meter.stop(), device.peak_memory()))
        result.seconds.append(max(rank[0] for rank in ranks))
        result.steps.append(steps.seconds())
        result.power.append(combine([rank[1] for rank in ranks]))
        peaks = [rank[2] for rank in ranks if rank[2] is not None]
        result.peak_memory = max([*peaks, result.peak_memory or 0]) if peaks else None
        return result.seconds[-1]

    def _denoise(self, request: Request) -> Tensor:
        run = self._run
        return self._pipeline.latents(request, Inputs(run.image, run.last_image, *self._texts))

    def close(self) -> None:
        """Writes a video of each variant and compares it with the baseline's, on the main rank."""
        self._pipeline.experts.release()
        baseline: Tensor | None = None
        for result in self.results:
            variant = result.variant
            frames = self._pipeline.decode(self._latents[variant])
            if frames is None:
                continue
            path = self._out / f"{variant.slug}.mp4"
            video.save_video(frames, replace(self._run.output, save_file=path))
            levels = ((frames + 1) * 127.5).round_()
            baseline = levels if baseline is None else baseline
            if not bool(levels.isfinite().all()):
                logger.warning("The video of %s holds NaN or infinity.", variant.name)
                continue
            difference = levels.sub(baseline).abs_()
            result.largest = int(difference.max())
            mean = float(difference.square_().mean())
            result.psnr = 10 * math.log10(255**2 / mean) if mean else float("inf")
        self._team.close()
