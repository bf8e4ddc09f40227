"""The small operations of a block, compiled by torch.compile on CPUs and CUDA GPUs.

A compiled function (`wan.modules.fused_ops`) reads and writes its tensors once instead of once per
operation, which on a GPU is most of its time. On a CPU the threads synchronize once per function
instead of once per slice. The other operations of a block are not compiled.

Both results of a function may differ by rounding. So the choice for a video depends on its
settings alone: not on the videos before it, nor on compiled code that has been kept.

Legend: L this device's tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from wan.settings.kernels import SMALL_OPS
from wan.utils.compiler_cache import prepare_compiler_cache
from wan.utils.log import logger, summarize_error
from wan.utils.torch_private import set_up_compiler

STEPS_BY_OP = {
    name: row.factories["cpu"].split() for name, row in SMALL_OPS.items() if "cpu" in row.factories
}
"""Value of fused_ops -> names of the functions that are compiled."""
MIN_ELEMENTS = 1 << 22
"""L * C, of which the two durations below were measured, on two cores in bfloat16."""
_COMPILE_SECONDS, _SAVED_SECONDS = 11, 0.045  # once; in each block
MIN_WORK = 1 << 30
"""Elements * blocks * forward passes that save as much time as compiling takes: 11 / 0.045 * 2^22,
rounded."""


class CompiledOps:
    """Implements `wan.modules.fused_ops.OpRunner`.

    Args:
        names: Keys of STEPS_BY_OP.
        min_elements: Tensors of fewer elements are computed eagerly.
        min_work: Functions of videos with less work (`start_video`) are computed eagerly.

    Attributes:
        compiled: The compiled functions by name.

    Each function has a graph for the first number of tokens and one for any other, per dtype. If
    the compiler fails, the error is logged once as a warning, and everything runs eagerly.
    """

    def __init__(
        self, names: Collection[str], min_elements: int = MIN_ELEMENTS, min_work: int = 0
    ) -> None:
        self._steps = {step for name in names for step in STEPS_BY_OP[name]}
        self._min_elements, self._min_work, self._repays = min_elements, min_work, not min_work
        self.compiled: dict[str, Callable[..., Tensor]] = {}

    def start_video(self, work: int) -> None:
        """Decides whether functions are compiled for a video.

        Args:
            work: Elements of the residual stream on a rank * blocks * forward passes.
        """
        self._repays = work >= self._min_work

    def __call__(self, op: Callable[..., Tensor], x: Tensor, /, *args: object) -> Tensor:
        name = op.__name__
        is_eager = name not in self._steps or x.numel() < self._min_elements or not self._repays
        if is_eager or torch.is_grad_enabled():
            return op(x, *args)
        if name in self.compiled:
            return self.compiled[name](x, *args)
        return self._compile_and_call(name, op, x, *args)

    def _compile_and_call(
        self, name: str, op: Callable[..., Tensor], x: Tensor, *args: object
    ) -> Tensor:
        """Compiles a function and calls it for the first time."""
        options: dict[str, Any] = {"cpp.dynamic_threads": True}  # loading changes their number
        try:
            if not self.compiled:
                set_up_compiler()
                logger.info(
                    "Compiling the small operations of a block (--fused_ops)%s ...",
                    _describe_gain(x.numel()) if x.device.type == "cpu" else "",
                )
            self.compiled[name] = torch.compile(op, options=options)
            return self.compiled[name](x, *args)
        except Exception as error:  # of the compiler or of its cache; nothing has been computed yet
            self._steps = set()
            logger.warning(
                "The small operations are not compiled, which costs speed only: %s "
                "(--fused_ops none does not try).",
                summarize_error(error),
            )
            return op(x, *args)


def _describe_gain(num_elements: int) -> str:
    """Describes what compiling costs and gains on a CPU, and where the result is kept."""
    saved_ms = 1000 * _SAVED_SECONDS * num_elements / MIN_ELEMENTS
    return (
        f": about {_COMPILE_SECONDS} s, and less with the code that is kept in "
        f"{prepare_compiler_cache()}; each block is then about {saved_ms:.0f} ms faster"
    )
