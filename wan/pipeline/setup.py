"""What a pipeline is built for: a checkpoint, and how its networks are loaded and run.

No torch: everything here is known, and refused where it contradicts, before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.quantised import QuantisedDit, check_device
from wan.settings import attention, devices, parallel
from wan.settings.attention import Attention
from wan.settings.devices import Capabilities
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.settings.presets import Preset
from wan.settings.request import Request


@dataclass(frozen=True)
class Setup:
    """A checked combination of checkpoint and settings.

    Attributes:
        preset: The task.
        checkpoint: Its folder is None where only the task's published sizes are known (--plan).
        execution: Device, dtypes, memory.
        parallel: The ranks and their mode.
        attention: Kernels of self-attention.
        quantised: Where quantised DiT weights come from; None: from the checkpoint.
        chip: The NPU model that --chip names.
    """

    preset: Preset
    checkpoint: Checkpoint
    execution: Execution
    parallel: Parallel
    attention: Attention
    quantised: QuantisedDit | None = None
    chip: str | None = None

    def __post_init__(self) -> None:
        attention.check(self.attention, self.execution)
        attention.check_layout(self.attention, self.parallel, self.checkpoint.head_dim)
        if self.execution.device != "auto":
            self._check_on(devices.candidates(self.execution.device, self.chip))

    def check_device(self, device: Capabilities) -> None:
        """InputError for what only the device that was found can refuse."""
        self._check_on((device,))

    def check_request(self, request: Request) -> tuple[str, ...]:
        """Notices; InputError for what does not go with this video's steps and size."""
        steps, tokens = request.sample_steps, prod(request.grid)
        attention.check_request(self.attention, self.parallel, steps, tokens)
        heads = self.checkpoint.heads
        return parallel.check_guidance(self.parallel, request.sample_guide_scale, heads)

    def _check_on(self, rows: tuple[Capabilities, ...]) -> None:
        weights = () if self.quantised is None else self.quantised.algorithms
        head_dim = self.checkpoint.head_dim
        devices.check(rows, self.attention, self.execution, head_dim, weights)
        if self.quantised is not None:
            check_device(self.quantised, rows[0].type)
