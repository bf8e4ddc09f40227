"""The layers of several modes beside each other, of which a run uses one, and a control.

Legend: B batch, s this rank's tokens, S all tokens, N all heads, h heads of a rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wan.distributed.exchange import ALONE, all_to_all_4D
from wan.kernels.base import StepInfo
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import Attention
from wan.modules.schedule import MODES, heads_per_chunk


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared.

    Attributes:
        name: For tables and files.
        comm_type: A key of `schedule.MODES`.
        chunks: Most head chunks of a call; None: the mode's own.
        rests: A control: the baseline's exchanges first, then the mode's chunks with idle time
            between them.
        locked: A control: the clock is locked meanwhile.
    """

    name: str
    comm_type: int
    chunks: int | None = None
    rests: bool = False
    locked: bool = False

    @property
    def is_control(self) -> bool:
        return self.rests or self.locked


class SideBySide:
    """Self-attention of a block by the layer that `chosen` names; all ranks choose the same."""

    def __init__(self, layers: Mapping[str, Attention], chosen: Callable[[], str]) -> None:
        self.layers, self.chosen = dict(layers), chosen

    def __call__(self, *qkv_BsND: Tensor, **told: Any) -> Tensor:
        return self.layers[self.chosen()](*qkv_BsND, **told)


@dataclass(frozen=True)
class _Args:
    comm_type: int


def layer_of(variant: Variant, built: FAPowerCapAttention) -> FAPowerCapAttention:
    """The layer of a variant, with the kernel, ring and methods of one that exists."""
    return FAPowerCapAttention(
        _Args(variant.comm_type),
        built.ulysses_pg,
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
            _Args(0),
            ALONE,
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


def variants(modes: tuple[int, ...], chunks: tuple[int, ...]) -> list[Variant]:
    """What is compared: the baseline always, the modes, InsertComm in other pieces, controls."""
    found = [Variant(MODES[mode].name, mode) for mode in sorted({0, *modes})]
    found += [Variant(f"InsertComm, {n} chunks", 1, n) for n in chunks]
    if 1 in modes:  # whose rests it has
        found.append(Variant("control: rests without exchanges", 0, rests=True))
    return [*found, Variant("control: baseline, locked clock", 0, locked=True)]
