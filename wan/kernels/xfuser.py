"""Attention kernels of xfuser's registry as `wan.kernels.interfaces.Kernel`.

xfuser (xDiT) has functions that call FlashAttention 2, 3, 4, SageAttention, AITER and others. Its
parallel layers are not used. The registry does not declare the inputs a function supports, so each
is tried once on the run's device, with its dtype and head size: whether it runs, is attention, and
returns the log-sum-exp as its second value, which ring attention needs for merging.

Legend: B batch, S tokens, N heads, D head size. xfuser's functions take and return [B,N,S,D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from wan.kernels.interfaces import Target
from wan.settings.errors import InputError
from wan.settings.kernels import DenseKernelRow
from wan.utils.log import summarize_error
from wan.utils.torch_private import use_private_compiler_cache

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""function(q, k, v, dropout, is_causal): the result and, if supported, the log-sum-exp."""

# Heads, queries and keys of a trial: lengths that are not multiples of a block, as in runs.
_HEADS, _ROWS, _KEYS = 2, 203, 137
# Largest relative error of a result and absolute error of a log-sum-exp, in full and in low
# precision. A log-sum-exp to base 2 is off by 44 %, that is by 2.
_RESULT_TOLERANCE, _LSE_TOLERANCE = (0.02, 0.3), (0.02, 0.1)
_REMEDY = "use `attention_backend=auto`"


class XfuserKernel:
    """Implements `wan.kernels.interfaces.Kernel` by a function of xfuser's registry.

    can_return_lse: the function's second value is the log-sum-exp, by a trial.
    """

    def __init__(self, name: str, function: AttentionFunction, can_return_lse: bool) -> None:
        self.name, self.can_return_lse = name, can_return_lse
        self._function = function

    def __call__(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> Tensor:
        return _call_function(self._function, q_BSND, k_BSND, v_BSND)[0]

    def with_lse(self, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = _call_function(self._function, q_BSND, k_BSND, v_BSND)
        assert lse is not None, "the trial returned a log-sum-exp"
        return out, lse[..., : q_BSND.shape[1]]  # the memory-efficient operator pads it to 32


def build_xfuser_kernel(target: Target) -> XfuserKernel:
    """Makes the kernel of the target's row and tries it on the device.

    Raises:
        InputError: A package is missing, or the function does not compute attention here.
    """
    device, head_dim, dtype = target.device.torch_device, target.head_dim, target.dtype
    row = target.dense_row
    assert row is not None, "the target has a row"
    for module in ("xfuser", *row.modules):
        if not _can_import(module):
            missing = "-r requirements-cuda.txt" if module == "xfuser" else " ".join(row.install)
            why = f"needs the Python module {module}, which is not installed or does not load"
            raise InputError(row.setting, None, why, f"run pip install {missing}, or {_REMEDY}")
    use_private_compiler_cache()  # some functions are compiled by Triton
    member, function = _find_function(row)
    trial = _try_function(function, device, head_dim, dtype, row.low_precision)
    if isinstance(trial, str):
        precision = str(dtype).removeprefix("torch.")
        why = (
            f"does not compute {precision} with heads of {head_dim} channels on this {device.type} "
            f"device ({trial})"
        )
        packages = " and ".join(("xfuser", *row.install))
        raise InputError(row.setting, None, why, f"see whether {packages} fit it, or {_REMEDY}")
    return XfuserKernel(f"xfuser {member.name} ({member.value})", function, trial)


def _can_import(module: str) -> bool:
    """Whether a module can be imported; this imports its parent packages."""
    try:
        return find_spec(module) is not None
    except (ImportError, OSError):
        return False


def _find_function(row: DenseKernelRow) -> tuple[Any, AttentionFunction]:
    """Returns a function of xfuser's registry, and its key."""
    try:
        from xfuser.core.distributed import attention_backend as registry
    except Exception as error:  # any error of an incompatible package
        why = (
            "needs xfuser, which does not load here: it needs a PyTorch for CUDA or ROCm and the "
            f"packages of requirements-cuda.txt ({summarize_error(error)})"
        )
        raise InputError(row.setting, None, why, _REMEDY) from error
    member = getattr(registry.AttentionBackendType, str(row.xfuser_member), None)
    if member not in registry.ATTENTION_FUNCTION_REGISTRY:
        remedy = f"run pip install -r requirements-cuda.txt, or {_REMEDY}"
        raise InputError(
            row.setting, None, f"is {row.xfuser_member}, which this xfuser does not have", remedy
        )
    return member, registry.ATTENTION_FUNCTION_REGISTRY[member]


@cache
def _try_function(
    function: AttentionFunction,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    low_precision: bool,
) -> bool | str:
    """Tries a function: whether it returns the log-sum-exp; a text if it is not attention."""
    generator = torch.Generator().manual_seed(0)  # the global random state is not changed
    q, k, v = (
        torch.randn(1, rows, _HEADS, head_dim, generator=generator).to(device, dtype)
        for rows in (_ROWS, _KEYS, _KEYS)
    )
    try:
        with torch.no_grad():
            out, lse = _call_function(function, q, k, v)
    except Exception as error:  # any error of an incompatible kernel
        return summarize_error(error)
    logits = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)) * head_dim**-0.5
    expected = (logits.softmax(-1) @ v.float().transpose(1, 2)).transpose(1, 2)
    if out.shape != expected.shape:
        return f"the result has shape {list(out.shape)} instead of {list(expected.shape)}"
    relative_error = float((out.float() - expected).norm() / expected.norm())
    if not relative_error <= _RESULT_TOLERANCE[low_precision]:
        return f"the result is off by {relative_error:.1%}"
    return _is_lse(lse, logits.logsumexp(-1), _LSE_TOLERANCE[low_precision])


def _is_lse(candidate: object, expected_BNS: Tensor, tolerance: float) -> bool:
    """Whether a value is the log-sum-exp in float32; it may have further rows."""
    if (
        not isinstance(candidate, Tensor)
        or candidate.dtype != torch.float32
        or candidate.dim() != 3
    ):
        return False
    lse = candidate[..., : expected_BNS.shape[-1]]
    return lse.shape == expected_BNS.shape and bool(((lse - expected_BNS).abs() <= tolerance).all())


def _call_function(
    function: AttentionFunction, q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
    out, lse = function(q, k, v, 0.0, False)
    return out.transpose(1, 2).to(q_BSND.dtype), lse
