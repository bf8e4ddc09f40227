"""Attention backends that the multi-rank tests share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wan.kernels.forward_context import StepInfo
from wan.kernels.fp8 import Fp8Attention, Fp8Quantizer, Rotations, make_sylvester_rotation
from wan.kernels.interfaces import AttentionBackend, AttentionInput
from wan.kernels.rainfusion import RainFusionAttention
from wan.kernels.sdpa import SdpaKernel

HEAD_DIM = 16
SPARSITY = 0.5


class Kind(NamedTuple):
    """An attention backend by name: fp8, v2, v3 or v3-fp8.

    transport: q, k and v are exchanged in FP8. start, refresh: RainFusion's.
    """

    name: str
    transport: bool = False
    start: int = 0
    refresh: int = 1

    @property
    def multiple(self) -> int:
        return 256 if self.transport else 128


KINDS = (Kind("fp8"), Kind("fp8", transport=True), Kind("v2"), Kind("v3"), Kind("v3-fp8"))


class GatheringKernel(SdpaKernel):
    """A kernel without log-sum-exp: partial results cannot be merged; the ring gathers K/V."""

    can_return_lse = False

    def with_lse(self, *_: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("this kernel knows no log-sum-exp")


def make_methods(
    kind: Kind, dtype: torch.dtype, head_dim: int = HEAD_DIM, sparsity: float = SPARSITY
) -> tuple[AttentionBackend, ...]:
    """Make new backends with empty caches; an empty tuple for the dense kind."""
    if kind.name == "dense":
        return ()
    if kind.name == "fp8":
        quantizer = Fp8Quantizer(Rotations(head_dim))
        return (Fp8Attention(quantizer, dtype, quantize_before_exchange=kind.transport),)
    sparse_quantizer = (
        Fp8Quantizer(Rotations(head_dim, make_sylvester_rotation))
        if kind.name == "v3-fp8"
        else None
    )
    version, refresh = kind.name[:2], kind.refresh
    return (
        RainFusionAttention(version, sparsity, kind.start, refresh, quantizer=sparse_quantizer),
    )


def make_small_methods(kind: str, sparsity: float = 0.6) -> tuple[AttentionBackend, ...]:
    """Make backends for heads of 8 channels. kind: a name of `Kind`, or "fp8 exchange"."""
    method_kind = Kind(kind.split()[0], transport=kind.endswith("exchange"))
    return make_methods(method_kind, torch.float32, 8, sparsity)


def attend_whole_sequence(
    kind: Kind, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int, int]
) -> Tensor:
    """Run the backend on all rows and heads at once, without ranks, chunks or padding."""
    (method,) = make_methods(kind._replace(transport=False), q.dtype)
    step = StepInfo(3, 8, "cond", "dit", grid, q.shape[1], layer=0)
    return method.prepare_kv(AttentionInput(q), AttentionInput(k), AttentionInput(v), step)(
        AttentionInput(q), 0
    )
