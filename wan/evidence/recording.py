"""Records steps of a run for --trace and --log_level debug."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import wan
from wan.checkpoint.config import get_vace_layers
from wan.evidence import order
from wan.evidence.order import Plan, Trace
from wan.log import logger
from wan.pipeline.setup import Setup
from wan.settings import noise_schedule
from wan.settings.request import VideoParams
from wan.trace import Event, Recorder

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import ParallelGroups


def nth_steps(experts: tuple[str, ...], place: int) -> tuple[int, ...]:
    """Selects the step at `position` among each expert's steps, or the expert's last one."""
    found = []
    for _, group in groupby(enumerate(experts), key=lambda item: item[1]):
        steps = [step for step, _ in group]
        found.append(steps[min(place, len(steps) - 1)])
    return tuple(found)


def plan_of(
    setup: Setup,
    request: VideoParams,
    steps: tuple[int, ...],
    merges: bool,
    device_type: str,
    rank: int = 0,
) -> Plan:
    """Makes the plan of the order in a rank's layers.

    Args:
        steps: Traced steps.
        returns_lse: The dense kernel returns the log-sum-exp.
        rank: Global rank.
    """
    parallel, attention = setup.parallel, setup.attention
    experts, sparse = noise_schedule.make_noise_schedule(request).experts, attention.use_rainfusion
    several = parallel.sequence_size > 1
    return Plan(
        rank=rank,
        comm_type=parallel.comm_type,
        overlap=parallel.fa_alltoall_overlap,
        chunks=parallel.chunks,
        heads=setup.checkpoint.num_heads,
        layers=setup.checkpoint.config["num_layers"],
        tokens=request.count_clip_tokens(0),  # of the traced clip
        multiple=attention.row_multiple(parallel.ring_size) if several else 1,
        sizes=parallel.mesh_shape,
        ring_type=parallel.ring_type,
        merges=merges,
        fp8=attention.fp8,
        fp8_exchange=attention.quant_alltoall,
        sparse_from=attention.resolve_sparse_start_step(request.sample_steps) if sparse else None,
        steps={step: experts[step] for step in steps},
        fused=setup.exchange_on(device_type) == "fused",
        control=get_vace_layers(setup.checkpoint.config),
    )


class Recording:
    """Records a rank's events, logs their order and writes its trace file.

    Args:
        plan: This rank's plan; the events of its steps are stored for the trace.
        logged_steps: Steps whose order is logged.
        groups: If given, ranks synchronize their clocks; every rank must record the same steps.
        profile_folder: Folder for a kernel profile of each recorded step; None without profiling.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        printed: tuple[int, ...] = (),
        team: ParallelGroups | None = None,
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
        """Returns the trace of all stored events, with more metadata."""
        _, seconds = self._began or (0, 0.0)
        known = {"clock": self.recorder.clock.name, "run": f"{seconds:.6f}", "wan": wan.__version__}
        return Trace(self.plan, self.events, known | about)

    def write(self, folder: Path, about: Mapping[str, str]) -> None:
        """Writes this rank's trace file; a failure is logged and does not end the run."""
        zero, _ = self._began or (0, 0.0)
        try:
            order.write(self.trace(**about), folder, zero)
        except OSError as error:
            reason = error.strerror or error
            logger.error("The trace could not be saved to %s (%s).", folder, reason)

    @contextmanager
    def _around(self, step: int) -> Iterator[None]:
        """Profiles a recorded step; before the first one, ranks synchronize their clocks."""
        if self._began is None:
            here = time.perf_counter_ns(), time.time()
            self._began = here if self._team is None else self._team.get_common_time()
        if self._kernels is None:
            yield
            return
        with self._device.profiled(self._kernels / f"rank{self.plan.rank}.step{step}.kernels.json"):
            yield

    def _done(self, events: list[Event]) -> None:
        """Stores and logs the events of a recorded step."""
        step = events[0].facts["step"]
        if step in self.plan.steps:
            self.events += events
        if step in self._printed and logger.isEnabledFor(logging.DEBUG):
            for (_, branch), forward in order.by_forward(events).items():
                for layer, inside in order.by_layer(forward).items():
                    place = f"step {step} {branch} layer {layer}"
                    logger.debug("%s %s: %s", place, self.plan.mode.name, order.line(inside))
