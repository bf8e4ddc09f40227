"""What one video costs: the meter of this rank's device, and on the main rank all ranks'."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

from wan import host
from wan.device import Device
from wan.distributed.mesh import Team
from wan.power.measured import Measured, combine
from wan.power.meter import Absent, Meter, MeterError, PowerSource
from wan.power.npu_smi import NpuSmi
from wan.power.nvml import Nvml
from wan.power.rapl import Rapl


def source_of(device: Device) -> PowerSource:
    """The meter of a device; `Absent`, with the reason, where it has none."""
    try:
        if device.type == "cuda":
            return Nvml(device.uuid())
        if device.type == "npu":
            index = host.renumbered("ASCEND_RT_VISIBLE_DEVICES", device.torch_device.index)
            if index is None:
                raise MeterError("ASCEND_RT_VISIBLE_DEVICES does not hold this NPU's number")
            return NpuSmi(index)
        return Rapl()
    except MeterError as reason:
        return Absent(str(reason))


class VideoMeter:
    """From the text to the decoded video, as a context around both.

    The main rank's device is metered to the end of decoding, the others' to that of denoising.
    """

    def __init__(self, device: Device, covers: str) -> None:
        """covers: what is metered, for the user."""
        self._meter, self._covers = Meter(source_of(device)), covers
        self._others: list[Measured] = []

    def __enter__(self) -> VideoMeter:
        self._meter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._meter.__exit__(kind, error, trace)

    def gather(self, team: Team) -> None:
        """Bring all ranks' results to the main rank; every rank calls it, after denoising."""
        own = None if team.is_main else self._meter.stop()
        self._covers += ", other ranks to the end of denoising"
        self._others = [found for found in team.gather(own) if found is not None]

    def stop(self) -> Measured:
        """All devices together; on the main rank."""
        return replace(combine([self._meter.stop(), *self._others]), covers=self._covers)
