"""Records steps of a run for --trace and --log_level debug."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from wan.checkpoint.config import get_control_layers
from wan.metering import exchange_order
from wan.metering.exchange_order import ExchangePlan, Trace
from wan.pipeline.setup import Setup
from wan.settings import noise_schedule
from wan.tasks.base import VideoParams
from wan.utils.log import logger
from wan.utils.trace import Event, Recorder
from wan.utils.version import __version__

if TYPE_CHECKING:
    from wan.device import Device
    from wan.distributed.mesh import ParallelGroups


def select_nth_steps(
    experts: tuple[str, ...], position: int, first_step: int = 0
) -> tuple[int, ...]:
    """Selects the step at `position` among each expert's steps, or the expert's last one."""
    nth_of_each = []
    for _, group in groupby(enumerate(experts, first_step), key=lambda item: item[1]):
        steps = [step for step, _ in group]
        nth_of_each.append(steps[min(position, len(steps) - 1)])
    return tuple(nth_of_each)


def make_exchange_plan(
    setup: Setup,
    params: VideoParams,
    steps: tuple[int, ...],
    returns_lse: bool,
    device_type: str,
    rank: int = 0,
) -> ExchangePlan:
    """Makes the plan of the order in a rank's layers.

    Args:
        steps: Traced steps.
        returns_lse: The dense kernel returns the log-sum-exp.
        rank: Global rank.
    """
    parallel, attention = setup.parallel, setup.attention
    schedule, sparse = noise_schedule.make_noise_schedule(params), attention.use_rainfusion
    is_sharded = parallel.sequence_size > 1
    return ExchangePlan(
        rank=rank,
        comm_type=parallel.comm_type,
        overlap=parallel.fa_alltoall_overlap,
        chunks=parallel.chunks,
        heads=setup.checkpoint.num_heads,
        layers=setup.checkpoint.config["num_layers"],
        tokens=params.count_clip_tokens(0),  # of the traced clip
        multiple=attention.row_multiple(parallel.ring_size) if is_sharded else 1,
        sizes=parallel.mesh_shape,
        ring_type=parallel.ring_type,
        merges=returns_lse,
        fp8=attention.fp8,
        fp8_exchange=attention.quant_alltoall,
        sparse_from=attention.resolve_sparse_start_step(params.num_forwards) if sparse else None,
        # The steps of a causal video go on after its first block.
        steps={
            step: schedule.experts[(step - schedule.first_step) % len(schedule.experts)]
            for step in steps
        },
        fused=setup.exchange_on(device_type) == "fused",
        control=get_control_layers(setup.checkpoint.config),
    )


class TraceRecording:
    """Records a rank's events, logs their order and writes its trace file.

    Args:
        plan: This rank's plan; the events of its steps are stored for the trace.
        logged_steps: Steps whose order is logged.
        groups: If given, ranks synchronize their clocks; every rank must record the same steps.
        profile_folder: Folder for a kernel profile of each recorded step; None without profiling.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        device: Device,
        logged_steps: tuple[int, ...] = (),
        groups: ParallelGroups | None = None,
        profile_folder: Path | None = None,
    ) -> None:
        self.plan, self._device, self._logged_steps = plan, device, logged_steps
        self._groups, self._profile_folder = groups, profile_folder
        self.events: list[Event] = []
        self._start_times: tuple[int, float] | None = None
        self.recorder = Recorder(
            {*plan.steps, *logged_steps},
            device.make_clock(),
            self._on_step_end,
            self._step_context,
            None if profile_folder is None else device.record_range,
        )

    def make_trace(self, **metadata: str) -> Trace:
        """Returns the trace of all stored events, with more metadata."""
        _, seconds = self._start_times or (0, 0.0)
        run_metadata = {
            "clock": self.recorder.clock.name,
            "run": f"{seconds:.6f}",
            "wan": __version__,
        }
        return Trace(self.plan, self.events, run_metadata | metadata)

    def write_trace_file(self, folder: Path, metadata: Mapping[str, str]) -> None:
        """Writes this rank's trace file; a failure is logged and does not end the run."""
        origin_ns, _ = self._start_times or (0, 0.0)
        try:
            exchange_order.write_trace(self.make_trace(**metadata), folder, origin_ns)
        except OSError as error:
            reason = error.strerror or error
            logger.error("The trace could not be saved to %s (%s).", folder, reason)

    @contextmanager
    def _step_context(self, step: int) -> Iterator[None]:
        """Profiles a recorded step; before the first one, ranks synchronize their clocks."""
        if self._start_times is None:
            times = time.perf_counter_ns(), time.time()
            self._start_times = times if self._groups is None else self._groups.get_common_time()
        if self._profile_folder is None:
            yield
            return
        with self._device.profile(
            self._profile_folder / f"rank{self.plan.rank}.step{step}.kernels.json"
        ):
            yield

    def _on_step_end(self, events: list[Event]) -> None:
        """Stores and logs the events of a recorded step."""
        step = events[0].attributes["step"]
        if step in self.plan.steps:
            self.events += events
        if step in self._logged_steps and logger.isEnabledFor(logging.DEBUG):
            for (_, branch), forward_events in exchange_order.group_by_forward(events).items():
                for layer, layer_events in exchange_order.group_by_layer(forward_events).items():
                    position = f"step {step} {branch} layer {layer}"
                    layer_order = exchange_order.format_layer_order(layer_events)
                    logger.debug("%s %s: %s", position, self.plan.mode.name, layer_order)
