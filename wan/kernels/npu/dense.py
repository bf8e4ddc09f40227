"""Dense attention on Ascend NPUs, through mindiesd and torch-npu.

Each constructor imports its operator, after `wan.device` has imported torch_npu and mindiesd in the
required order. The environment variable MINDIE_SD_FA_TYPE would override the kernels selected here;
`wan.utils.env` refuses it.
"""

from __future__ import annotations

from pkgutil import resolve_name

import torch
from torch import Tensor

from wan.kernels.interfaces import Load, Target
from wan.settings.kernels import DENSE_KERNELS
from wan.settings.numerics import LASER_HEAD, LASER_ROWS

_ALL_TOKENS = 2**31 - 1  # an unlimited window; the operator needs the argument also without a mask


class FusedKernel:
    """Implements `wan.kernels.interfaces.Kernel` by npu_fusion_attention.

    opt_mode="manual": mindiesd's default first times all kernels on the first call's tensors (43
    launches on A2) and may select different kernels in different runs.
    """

    name = "npu fused_attn_score"
    can_return_lse = True

    def __init__(self, target: Target) -> None:
        self._attention_forward, self._load = target.load("mindiesd:attention_forward"), target.load

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        # The tensors have BSND memory order; layout="BNSD" would make mindiesd copy them. Slices of
        # a batch are not contiguous, and the operator's reference allows no strides.
        q, k, v = (x.contiguous() for x in (q_BSND, k_BSND, v_BSND))
        return self._attention_forward(
            q, k, v, fused=True, opt_mode="manual", op_type="fused_attn_score", layout="BSND"
        )

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        return attend_fused_with_lse(q_BSND, k_BSND, v_BSND, self._load)


def attend_fused_with_lse(
    q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, load: Load = resolve_name
) -> tuple[Tensor, Tensor]:
    """Computes `Kernel.with_lse` by npu_fusion_attention; mindiesd's wrapper returns no LSE."""
    num_heads, head_dim = q_BSND.shape[2:]
    out_BSND, max_BNS8, sum_BNS8, *_ = load("torch_npu:npu_fusion_attention")(
        *(x.contiguous() for x in (q_BSND, k_BSND, v_BSND)),
        num_heads,
        "BSND",
        scale=head_dim**-0.5,
        pre_tockens=_ALL_TOKENS,
        next_tockens=_ALL_TOKENS,
    )
    # A row's maximum and its sum of exponentials are float32, each repeated eight times.
    return out_BSND, max_BNS8[..., 0] + sum_BNS8[..., 0].log()


class LaserKernel:
    """Implements `wan.kernels.interfaces.Kernel` by mindiesd's ascend_laser_attention; A2 and A3.

    The operator computes in float16 and pads rows to 256 and heads to 128 channels. For short
    sequences, wide heads and float32 a call raises ValueError, because mindiesd would silently run
    another kernel.
    """

    name = "npu ascend_laser_attention"
    can_return_lse = False

    def __init__(self, target: Target) -> None:
        capabilities = target.device.capabilities
        assert capabilities.has_kernel(DENSE_KERNELS["laser"]), (
            f"{capabilities.name} has no laser attention"
        )
        self._attention_forward = target.load("mindiesd:attention_forward")

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        q_rows, k_rows, head_dim = q_BSND.shape[1], k_BSND.shape[1], q_BSND.shape[3]
        if (
            min(q_rows, k_rows) < LASER_ROWS
            or head_dim > LASER_HEAD
            or q_BSND.dtype == torch.float32
        ):
            raise ValueError(
                f"Laser attention takes at least {LASER_ROWS} rows of queries and of keys, heads "
                f"of at most {LASER_HEAD} and 16-bit tensors, not {q_rows} and {k_rows} rows, "
                f"heads of {head_dim} and {q_BSND.dtype}; use FusedKernel."
            )
        return self._attention_forward(
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
