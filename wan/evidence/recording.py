"""What --trace and --log_level debug ask of a run: which steps are recorded, and what for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import wan
from wan.checkpoint.config import control_layers
from wan.evidence import order
from wan.evidence.order import Plan, Trace
from wan.log import logger
from wan.pipeline.setup import Setup
from wan.settings import timesteps
from wan.settings.request import Request
from wan.trace import Event, Recorder

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import Team


def nth_steps(experts: tuple[str, ...], place: int) -> tuple[int, ...]:
    """Of each expert's steps the one at this place, or the last before it."""
    found = []
    for _, group in groupby(enumerate(experts), key=lambda item: item[1]):
        steps = [step for step, _ in group]
        found.append(steps[min(place, len(steps) - 1)])
    return tuple(found)


def plan_of(
    setup: Setup,
    request: Request,
    steps: tuple[int, ...],
    merges: bool,
    device_type: str,
    rank: int = 0,
) -> Plan:
    """What the order in a rank's layers follows from.

    Args:
        setup: Of the run.
        request: The video.
        steps: Those that are traced.
        merges: The dense kernel returns the log-sum-exp.
        device_type: Of the device that computes.
        rank: Of all ranks.
    """
    parallel, attention = setup.parallel, setup.attention
    experts, sparse = timesteps.schedule(request).experts, attention.use_rainfusion
    several = parallel.sequence_size > 1
    return Plan(
        rank=rank,
        comm_type=parallel.comm_type,
        overlap=parallel.fa_alltoall_overlap,
        chunks=parallel.chunks,
        heads=setup.checkpoint.heads,
        layers=setup.checkpoint.config["num_layers"],
        tokens=request.clip_tokens(0),  # of the clip that is traced, where there are several
        multiple=attention.row_multiple(parallel.ring_size) if several else 1,
        sizes=parallel.sizes,
        ring_type=parallel.ring_type,
        merges=merges,
        fp8=attention.fp8,
        fp8_exchange=attention.quant_alltoall,
        sparse_from=attention.start_step(request.sample_steps) if sparse else None,
        steps={step: experts[step] for step in steps},
        fused=setup.exchange_on(device_type) == "fused",
        control=control_layers(setup.checkpoint.config),
    )


class Recording:
    """The recorder of a run, and what becomes of what it records.

    Args:
        plan: Of this rank; its steps are kept for a trace.
        device: Of this rank.
        printed: Steps whose order is printed.
        team: The ranks, where they need a common time; all of them record the same steps then.
        kernels: Where a profiler, which runs in each recorded step then, puts what it sees.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        printed: tuple[int, ...] = (),
        team: Team | None = None,
        kernels: Path | None = None,
    ) -> None:
        self.plan, self._device, self._printed = plan, device, printed
        self._team, self._kernels = team, kernels
        self.events: list[Event] = []
        self._began: tuple[int, float] | None = None
        self.recorder = Recorder(
            {*plan.steps, *printed},
            device.clock(),
            self._done,
            self._around,
            None if kernels is None else device.range,
        )

    def trace(self, **about: str) -> Trace:
        """What was recorded; about: what else a reader wants to know."""
        _, seconds = self._began or (0, 0.0)
        known = {"clock": self.recorder.clock.name, "run": f"{seconds:.6f}", "wan": wan.__version__}
        return Trace(self.plan, self.events, known | about)

    def write(self, folder: Path, about: Mapping[str, str]) -> None:
        """The file of this rank. What cannot be written is said; the video goes on."""
        zero, _ = self._began or (0, 0.0)
        try:
            order.write(self.trace(**about), folder, zero)
        except OSError as error:
            reason = error.strerror or error
            logger.error("The trace could not be saved to %s (%s).", folder, reason)

    @contextmanager
    def _around(self, step: int) -> Iterator[None]:
        """Before the first recorded step the ranks settle on a common time."""
        if self._began is None:
            here = time.perf_counter_ns(), time.time()
            self._began = here if self._team is None else self._team.common_time()
        if self._kernels is None:
            yield
            return
        with self._device.profiled(self._kernels / f"rank{self.plan.rank}.step{step}.kernels.json"):
            yield

    def _done(self, events: list[Event]) -> None:
        """A recorded step has ended."""
        step = events[0].facts["step"]
        if step in self.plan.steps:
            self.events += events
        if step in self._printed and logger.isEnabledFor(logging.DEBUG):
            for (_, branch), forward in order.by_forward(events).items():
                for layer, inside in order.by_layer(forward).items():
                    place = f"step {step} {branch} layer {layer}"
                    logger.debug("%s %s: %s", place, self.plan.mode.name, order.line(inside))
