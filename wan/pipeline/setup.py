"""What a pipeline is built for: a checkpoint, and how its networks are loaded and run.

No torch: everything here is known, and refused where it contradicts, before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from wan.cache.curves import Curve
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.quantised import QuantisedDit, check_device
from wan.pipeline import caching
from wan.settings import attention, devices, parallel, step_cache
from wan.settings.attention import Attention
from wan.settings.devices import Capabilities
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.settings.presets import Preset
from wan.settings.request import Request
from wan.settings.step_cache import StepCache


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
        cache: What is taken from earlier steps.
        curve: Of the step cache `mag`; None: the published one.
    """

    preset: Preset
    checkpoint: Checkpoint
    execution: Execution
    parallel: Parallel
    attention: Attention
    quantised: QuantisedDit | None = None
    chip: str | None = None
    cache: StepCache = field(default_factory=StepCache)
    curve: Curve | None = None

    def __post_init__(self) -> None:
        attention.check(self.attention, self.execution)
        attention.check_layout(self.attention, self.parallel, self.checkpoint.head_dim)
        step_cache.check(self.cache, self.parallel, self.execution)
        if self.execution.device != "auto":
            self._check_on(devices.candidates(self.execution.device, self.chip))

    def check_device(self, device: Capabilities) -> None:
        """InputError for what only the device that was found can refuse."""
        self._check_on((device,))

    def check_request(self, request: Request) -> tuple[str, ...]:
        """Notices; InputError for what does not go with this video's steps and size."""
        steps, tokens = request.sample_steps, prod(request.grid)
        attention.check_request(self.attention, self.parallel, steps, tokens)
        found = caching.notices(self.cache, self.curve, request)
        heads = self.checkpoint.heads
        guidance = request.sample_guide_scale
        return (*found, *parallel.check_guidance(self.parallel, guidance, heads))

    def _check_on(self, rows: tuple[Capabilities, ...]) -> None:
        weights = () if self.quantised is None else self.quantised.algorithms
        head_dim = self.checkpoint.head_dim
        devices.check(rows, self.attention, self.execution, head_dim, weights)
        if self.quantised is not None:
            check_device(self.quantised, rows[0].type)
