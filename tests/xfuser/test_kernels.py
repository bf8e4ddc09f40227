"""Functions of the real xfuser as kernels: calls, and the trial of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from xfuser.core.distributed.attention_backend import (
    ATTENTION_FUNCTION_REGISTRY,
    AttentionBackendType,
)

from tests.refusals import check_refusals
from tests.xfuser.ranks import FLASH, MATH, build_kernel, flash_on_cpu, use_function
from wan.settings.errors import InputError
from wan.settings.kernels import DENSE_KERNELS

HEAD = 16
# Functions of the registry that are not offered, and why; as in docs/attention_backends.md.
NOT_OFFERED = {
    "SDPA": "what --attention_backend sdpa is without xfuser",
    "CUDNN": "what --attention_backend cudnn is without xfuser",
    "NPU": "of NPUs",
    "NVTE_FP8": "its scales follow from the calls before",
    "AITER_MLA": "given up by xfuser",
    "AITER_SAGE": "asks xfuser for its process groups",
    "AITER_SAGE_V2": "asks xfuser for its process groups",
}
SPARSE = ("SPARGE", "SPARSE", "VSA", "FLEX_BLOCK_ATTN")


def make_qkv(rows: int = 19, keys: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(2, n, 3, HEAD, generator=generator) for n in (rows, keys, keys)]


def compute_attention(q_BSND: Tensor, k_BSND: Tensor, v_BSND: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double().transpose(1, 2) for x in (q_BSND, k_BSND, v_BSND))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return (logits.softmax(-1) @ v).transpose(1, 2), logits.logsumexp(-1)


def test_all_of_the_registry_is_offered_or_left_out_for_a_reason() -> None:
    registry = {member.name for member in ATTENTION_FUNCTION_REGISTRY}
    offered = {
        backend.xfuser_member
        for backend in DENSE_KERNELS.values()
        if backend.xfuser_member is not None
    }
    sparse = {name for name in registry if any(word in name for word in SPARSE)}
    assert offered <= registry and not offered & sparse
    assert registry - offered - sparse == NOT_OFFERED.keys()


def test_softmax_weights_are_no_log_sum_exp() -> None:
    """SDPA_MATH runs on the CPU; its second result has the shape of all scores."""
    original = ATTENTION_FUNCTION_REGISTRY[MATH]
    with use_function(MATH, original) as calls:
        xfuser_kernel = build_kernel("sdpa_math", HEAD)
        assert len(calls) == 1 and not xfuser_kernel.can_return_lse
        assert xfuser_kernel.name == "xfuser SDPA_MATH (SDPA with Math backend)"
        out = xfuser_kernel(*make_qkv())
        assert calls[1:] == [(2, 3, 19, HEAD)]
    torch.testing.assert_close(out.double(), compute_attention(*make_qkv())[0], atol=2e-6, rtol=0)


def replace_lse(change: Callable[[Tensor], object]) -> Callable[..., Any]:
    def run_with_changed_lse(*args: Any) -> Any:
        out, lse = flash_on_cpu(*args)
        return out, change(lse)

    return run_with_changed_lse


LSE: dict[str, Callable[[Tensor], object]] = {
    "it": lambda lse: lse,
    "padded": lambda lse: F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf),
}
NO_LSE: dict[str, Callable[[Tensor], object]] = {
    "none": lambda lse: None,
    "to base 2": lambda lse: lse / 0.6931,
    "transposed": lambda lse: lse.transpose(1, 2),
    "with an axis": lambda lse: lse.unsqueeze(-1),
    "bfloat16": lambda lse: lse.bfloat16(),
    "short": lambda lse: lse[..., :-1],
    "nan": lambda lse: lse * torch.nan,
    "no logarithm": lambda lse: lse.exp(),
}


def test_log_sum_exps_that_a_trial_accepts() -> None:
    for name, change in {**LSE, **NO_LSE}.items():
        with use_function(FLASH, replace_lse(change)):
            xfuser_kernel = build_kernel("sdpa_flash", HEAD)
        assert xfuser_kernel.can_return_lse == (name in LSE), name
        if name in LSE:
            out, lse = xfuser_kernel.with_lse(*make_qkv())
            assert torch.equal(xfuser_kernel(*make_qkv()), out), name
            for actual, exact in zip((out, lse), compute_attention(*make_qkv()), strict=True):
                assert actual.dtype == torch.float32, name
                assert (actual - exact).abs().max() <= 2e-6, name


def collect_refusal(name: str) -> str:
    """Return the refusal of a kernel; empty if it is not refused."""
    try:
        build_kernel(name, HEAD)
    except InputError as error:
        return str(error)
    return ""


def raise_name_error(*_: object) -> Any:
    raise NameError("name 'flash_attn_func' is not defined.\nmore")


def return_biased(*args: Any) -> Any:
    out, lse = flash_on_cpu(*args)
    return out * 1.05, lse


NO_ATTENTION: dict[str, Callable[..., Any]] = {
    "raises": raise_name_error,
    "off": return_biased,
    "transposed": lambda *args: (flash_on_cpu(*args)[0].transpose(1, 2), None),
    "nan": lambda *args: (flash_on_cpu(*args)[0] * torch.nan, None),
    "three values": lambda *args: (flash_on_cpu(*args)[0], None, None),
}


def test_what_computes_no_attention_is_refused() -> None:
    """A trial refuses wrong functions, GPU operators on a CPU, and missing packages."""
    sentences = {}
    for name, function in NO_ATTENTION.items():
        with use_function(FLASH, function):
            sentences[name] = collect_refusal("sdpa_flash")
    missing = ("flash", "flash_3", "flash_3_fp8", "flash_4", "sage", "aiter_fp8")
    sentences |= {
        name: collect_refusal(name) for name in ("sdpa_flash", "sdpa_efficient", *missing)
    }
    function = ATTENTION_FUNCTION_REGISTRY.pop(FLASH)
    try:
        sentences["unknown to this xfuser"] = collect_refusal("sdpa_flash")
    finally:
        ATTENTION_FUNCTION_REGISTRY[FLASH] = function
    check_refusals(
        "xfuser: kernels",
        sentences,
        [r"(?<=expected 2), got 3", r"(?<=Could not run 'aten::_scaled_dot).*(?=\))"],
    )


def test_a_trial_is_made_once_and_leaves_the_randomness_alone() -> None:
    with use_function(FLASH, flash_on_cpu) as calls:
        rng_state = torch.get_rng_state()
        build_kernel("sdpa_flash", HEAD), build_kernel("sdpa_flash", HEAD)
        assert len(calls) == 1 and torch.equal(torch.get_rng_state(), rng_state)
        build_kernel("sdpa_flash", 2 * HEAD)
        assert len(calls) == 2


def test_every_function_takes_five_arguments() -> None:
    from inspect import signature

    for backend in DENSE_KERNELS.values():
        if backend.xfuser_member is not None:
            member = AttentionBackendType[backend.xfuser_member]
            signature(ATTENTION_FUNCTION_REGISTRY[member]).bind(*range(3), 0.0, False)
