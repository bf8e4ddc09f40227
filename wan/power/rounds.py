"""The measured runs of a comparison: one pipeline, in which a run uses one variant's layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wan import trace
from wan.distributed.exchange import ALONE, all_to_all_4D
from wan.distributed.mesh import Team
from wan.kernels.base import StepInfo
from wan.log import logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import SelfAttention
from wan.modules.schedule import MODES, heads_per_chunk
from wan.pipeline import build, video
from wan.pipeline.pipeline import Inputs
from wan.power.compare import Variant
from wan.power.meter import Measured, Meter, MeterError, combine, source_of
from wan.power.nvml import Lock
from wan.power.recording import Recording, plan_of
from wan.run import Run
from wan.settings import timesteps
from wan.settings.request import Request
from wan.trace import Event


@dataclass
class Found:
    """What was measured of a variant; lists have an element for each round.

    Attributes:
        variant: Which.
        seconds: Of denoising.
        steps: Seconds of each step.
        power: All ranks' meters together.
        peak_memory: Bytes of the fullest device; None where that cannot be told.
        folder: Its trace.
        largest: Difference of a value of the video (0 to 255) from the baseline's.
        psnr: Of the video to the baseline's, dB.
    """

    variant: Variant
    seconds: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    power: list[Measured] = field(default_factory=list)
    peak_memory: int | None = None
    folder: Path | None = None
    largest: int = 0
    psnr: float = float("inf")


class SideBySide:
    """Self-attention of a block by the layer that `chosen` names; all ranks choose the same."""

    def __init__(self, layers: Mapping[str, SelfAttention], chosen: Callable[[], str]) -> None:
        self.layers, self.chosen = dict(layers), chosen

    def __call__(self, *qkv_BsND: Tensor, **told: Any) -> Tensor:
        return self.layers[self.chosen()](*qkv_BsND, **told)


def layer_of(variant: Variant, built: FAPowerCapAttention) -> FAPowerCapAttention:
    """The layer of a variant, with the kernel, ring and methods of one that exists."""
    return FAPowerCapAttention(
        comm_type=variant.comm_type,
        ulysses_pg=built.ulysses_pg,
        layer=built.layer,
        kernel=built.kernel,
        ring=built.ring,
        methods=built.methods,
        clock=built.clock,
        chunks=variant.chunks,
    )


class Rests:
    """A control that has the rests of a chunked mode and the exchanges of the baseline.

    The exchanges of all heads come first; then the chunks are attended to, with the device idle
    between them; the results go back together. What is as fast as the chunked mode was sped up by
    the rests themselves.

    Args:
        built: The layer whose kernel, ring and group are used.
        chunks: Most chunks of a call.
        rest: Keeps the device idle for a while.
    """

    def __init__(self, built: FAPowerCapAttention, chunks: int, rest: Callable[[], None]) -> None:
        self.group, self.world, self.chunks = built.ulysses_pg, built.world_size, chunks
        self.rest = rest
        self._whole = FAPowerCapAttention(
            comm_type=0,
            ulysses_pg=ALONE,
            layer=built.layer,
            kernel=built.kernel,
            ring=built.ring,
            methods=built.methods,
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        /,
        *,
        valid_len: int | None = None,
        step: StepInfo | None = None,
    ) -> Tensor:
        """As `FAPowerCapAttention`."""
        qkv_BShD = [all_to_all_4D(x, 2, 1, self.group) for x in (query, key, value)]
        parts: list[Tensor] = []
        first = 0
        for size in heads_per_chunk(query.shape[2], self.world, self.chunks):
            if parts:
                self.rest()
            chunk = (x[:, :, first : first + size].contiguous() for x in qkv_BShD)
            parts.append(self._whole(*chunk, valid_len=valid_len, step=step))
            first += size
        return all_to_all_4D(torch.cat(parts, dim=2), 1, 2, self.group)


class StepTimes(trace.Recorder):
    """Only the lengths of whole steps."""

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
        """To be called when the device has ended."""
        return [(end() - begin()) / 1e9 for begin, end in self._ends]


class Rounds:
    """Makes the runs; every rank calls every method, in the same order.

    Args:
        run: What is made; its attention is the baseline's.
        team: The ranks.
        variants: What is compared, the baseline first.
        out: Folder of the results.
    """

    def __init__(self, run: Run, team: Team, variants: Sequence[Variant], out: Path) -> None:
        self._run, self._team, self._out = run, team, out
        self.variants = list(variants)
        self.found = {variant.name: Found(variant) for variant in variants}
        self._latents: dict[str, Tensor] = {}
        if team.is_main:  # of an earlier comparison, perhaps with more ranks
            for file in (out / "traces").glob("*/rank*.json"):
                file.unlink()
        self._chosen, self._rest = self.variants[0].name, 0.0
        self._lock: Lock | None = None
        self._pipeline = build.pipeline(run.setup, team.device, team, attention=self._beside)
        self._texts = self._pipeline.texts(run.request)
        self._pipeline.text.release()

    def _beside(self, built: SelfAttention) -> SelfAttention:
        assert isinstance(built, FAPowerCapAttention), "there are exchanges"
        layers: dict[str, SelfAttention] = {}
        idle = self._team.device.idle
        for variant in self.variants:
            layers[variant.name] = layer_of(variant, built)
            if variant.rests:
                layers[variant.name] = Rests(built, MODES[1].chunks, lambda: idle(self._rest))
        return SideBySide(layers, lambda: self._chosen)

    def prepare(self) -> None:
        """Both experts' first steps with every layer, and a trace of each: no time counts yet."""
        short = _short(self._run.request)
        for variant in self.variants:
            if variant.locked:  # its layer is the baseline's
                continue
            self._chosen = variant.name
            self._denoise(short)
            events = self._traced(variant, short, self._out / "traces" / variant.slug)
            if variant.comm_type == 1 and not self._rest:
                own = statistics.median(rests(events) or [0.0])
                self._rest = max(self._team.gather(own))  # the same on all ranks
                logger.info("Rests of %s: %.3f ms (measured).", variant.name, 1e3 * own)
        self._lock = self._lockable(short)

    def _lockable(self, short: Request) -> Lock | None:
        """The clock of the baseline's mean, where every rank may lock it; else there is no such
        variant."""
        locked = [variant for variant in self.variants if variant.locked]
        if not locked:
            return None
        self._chosen = self.variants[0].name
        with Meter(source_of(self._team.device)) as meter:
            self._denoise(short)
            self._team.device.synchronize()
        lock, why = None, ""
        try:
            lock = Lock(self._team.device, meter.stop().mean_mhz)
            with lock:
                pass
        except MeterError as reason:
            why = str(reason)
        reasons = [reason for reason in self._team.gather(why) if reason]
        if not reasons:
            return lock
        logger.info("No run with a locked clock: %s.", reasons[0])
        self.variants = [variant for variant in self.variants if not variant.locked]
        del self.found[locked[0].name]
        return None

    def _traced(self, variant: Variant, request: Request, folder: Path | None) -> list[Event]:
        """What a run's layers do, step by step; written to a folder."""
        parallel = replace(
            self._run.setup.parallel, comm_type=variant.comm_type, chunks=variant.chunks
        )
        setup, steps = replace(self._run.setup, parallel=parallel), range(request.sample_steps)
        plan = plan_of(setup, request, tuple(steps), self._pipeline.merges, self._team.rank)
        recording = Recording(plan, self._team.device, team=self._team)
        with trace.recording(recording.recorder):
            self._denoise(request)
        if folder is not None:
            about = {"device": self._team.device.name(), "kernel": self._pipeline.kernel}
            recording.write(folder, about | {"variant": variant.name})
            self.found[variant.name].folder = folder
        return recording.events

    def measure(self, variant: Variant) -> float:
        """One run of the whole request, metered; seconds of denoising."""
        found, device = self.found[variant.name], self._team.device
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
        self._latents.setdefault(variant.name, latents.cpu())
        ranks = self._team.gather((seconds, meter.stop(), device.peak_memory()))
        found.seconds.append(max(rank[0] for rank in ranks))
        found.steps.append(steps.seconds())
        found.power.append(combine([rank[1] for rank in ranks]))
        peaks = [rank[2] for rank in ranks if rank[2] is not None]
        found.peak_memory = max([*peaks, found.peak_memory or 0]) if peaks else None
        return found.seconds[-1]

    def _denoise(self, request: Request) -> Tensor:
        run = self._run
        return self._pipeline.latents(request, Inputs(run.image, run.last_image, *self._texts))

    def close(self) -> None:
        """The main rank keeps a video of each variant and compares them; then ranks part."""
        self._pipeline.experts.release()
        baseline: Tensor | None = None
        for name, found in self.found.items():
            frames = self._pipeline.decode(self._latents[name])
            if frames is None:
                continue
            path = self._out / f"{found.variant.slug}.mp4"
            video.save_video(frames, path, self._run.output.fps)
            levels = ((frames + 1) * 127.5).round_()
            baseline = levels if baseline is None else baseline
            if not bool(levels.isfinite().all()):
                logger.warning("The video of %s holds NaN or infinity.", name)
                continue
            difference = levels.sub(baseline).abs_()
            found.largest = int(difference.max())
            mean = float(difference.square_().mean())
            found.psnr = 10 * float(np.log10(255**2 / mean)) if mean else float("inf")
        self._team.close()


def rests(events: Sequence[Event]) -> list[float]:
    """Seconds without attention between consecutive head chunks of the same layer."""
    found, last = [], None
    for event in events:
        if event.kind != "attention":
            continue
        here = tuple(event.facts.get(name) for name in ("step", "branch", "layer"))
        chunk = event.facts.get("chunk")
        if last is not None and last[0] == here and last[1] != chunk:
            found.append((event.begin - last[2]) / 1e9)
        last = here, chunk, event.end
    return found


def _short(request: Request) -> Request:
    """Two steps, one of each expert where there are two."""
    two = len(set(timesteps.schedule(request).experts)) == 2
    listed = None if request.timesteps is None else request.timesteps[:2]
    return replace(
        request,
        timesteps=listed,
        sample_steps=min(2, request.sample_steps),
        boundary_step=1 if two else request.boundary_step,
    )
