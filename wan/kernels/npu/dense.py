"""Dense attention of Ascend NPUs, through mindiesd and torch-npu.

The vendor's operators are imported when a kernel is made, after `wan.device` has imported the
packages in the order they need. The environment variable MINDIE_SD_FA_TYPE makes mindiesd take
another kernel than the one asked for here; `wan.env` refuses it.
"""

from __future__ import annotations

from pkgutil import resolve_name

import torch
from torch import Tensor

from wan.kernels.base import Load, Target
from wan.settings.kernels import DENSE
from wan.settings.numerics import LASER_HEAD, LASER_ROWS

_ALL = 2**31 - 1  # "every token before and after", which the operators also want without a mask


class FusedKernel:
    """npu_fusion_attention; implements `wan.kernels.base.Kernel`.

    Chosen by hand: mindiesd's default would first time every kernel on the live tensors (43
    launches on A2) and may then choose otherwise in the next run.
    """

    name = "npu fused_attn_score"
    can_return_lse = True

    def __init__(self, target: Target) -> None:
        self._forward, self._load = target.load("mindiesd:attention_forward"), target.load

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        # BSND is how the tensors lie in memory; BNSD would copy each of them into its order. Rows
        # of several samples do not lie so, and the operator's reference allows no strides.
        q, k, v = (x.contiguous() for x in (q_BSND, k_BSND, v_BSND))
        return self._forward(
            q, k, v, fused=True, opt_mode="manual", op_type="fused_attn_score", layout="BSND"
        )

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        return fusion_with_lse(q_BSND, k_BSND, v_BSND, self._load)


def fusion_with_lse(
    q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, load: Load = resolve_name
) -> tuple[Tensor, Tensor]:
    """`Kernel.with_lse` by npu_fusion_attention itself: mindiesd keeps the result only."""
    heads, size = q_BSND.shape[2:]
    out_BSND, max_BNS8, sum_BNS8, *_ = load("torch_npu:npu_fusion_attention")(
        *(x.contiguous() for x in (q_BSND, k_BSND, v_BSND)),
        heads,
        "BSND",
        scale=size**-0.5,
        pre_tockens=_ALL,
        next_tockens=_ALL,
    )
    # Each row's maximum and sum of exponentials are float32 and stand there eight times.
    return out_BSND, max_BNS8[..., 0] + sum_BNS8[..., 0].log()


class LaserKernel:
    """mindiesd's ascend_laser_attention; implements `wan.kernels.base.Kernel`.

    Computes in float16 and pads rows to 256 and heads to 128 by itself. Where mindiesd would
    silently take another kernel, this one raises ValueError: on A5 when it is made, for
    short sequences, wide heads and float32 when it is called.
    """

    name = "npu ascend_laser_attention"
    can_return_lse = False

    def __init__(self, target: Target) -> None:
        can = target.device.can
        assert can.has(DENSE["laser"]), f"{can.name} has no laser attention"
        self._forward = target.load("mindiesd:attention_forward")

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        q_rows, k_rows, head = q_BSND.shape[1], k_BSND.shape[1], q_BSND.shape[3]
        if min(q_rows, k_rows) < LASER_ROWS or head > LASER_HEAD or q_BSND.dtype == torch.float32:
            raise ValueError(
                f"Laser attention takes at least {LASER_ROWS} rows of queries and of keys, heads "
                f"of at most {LASER_HEAD} and 16-bit tensors, not {q_rows} and {k_rows} rows, "
                f"heads of {head} and {q_BSND.dtype}; use FusedKernel."
            )
        return self._forward(
            q_BSND,
            k_BSND,
            v_BSND,
            fused=True,
            opt_mode="manual",
            op_type="ascend_laser_attention",
            layout="BNSD",
        )

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        raise ValueError("Laser attention returns no log-sum-exp; gather keys and values instead.")
