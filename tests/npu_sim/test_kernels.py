"""NPU kernels with the real mindiesd, against float64 attention and mindiesd's modules.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist import Ranks
from tests.npu_sim.oracles import compute_attention, log_sum_exp, make_qkv, max_error
from tests.npu_sim.ranks import (
    KINDS,
    make_step_info,
    make_target,
    run_backend,
    select_kernels_for,
)
from wan.kernels.fp8 import Fp8Attention, Fp8Quantizer, Rotations
from wan.kernels.interfaces import AttentionInput
from wan.kernels.npu import dense as npu
from wan.kernels.npu import fp8 as npu_quant
from wan.kernels.npu.clock import FrequencyCap
from wan.kernels.registry import select_kernels

Choose = Callable[[str], None]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Half a step of bfloat16 near 0.5; float32 and the float16 of laser are finer.
BOUND = {BF16: 2e-3, F16: 5e-4, F32: 2e-6}
SIZES = [(64, BF16), (128, F16)]  # of heads


def list_call_names(calls: list[Any]) -> list[str]:
    return [call.name for call in calls]


@pytest.mark.parametrize("name", ["A2", "A3", "A5"])
def test_fused(name: str, chip: Choose, calls: list[Any]) -> None:
    chip(name)
    kernel = npu.FusedKernel(make_target(name))
    for dtype, bound in BOUND.items():
        q, k, v = make_qkv(200, 333, dtype=dtype, batch=2)
        calls.clear()
        out = kernel(q, k, v)
        assert out.shape == q.shape and out.dtype == dtype
        assert max_error(out, compute_attention(q, k, v)) < bound
        (call,) = calls  # the kernel is selected explicitly: none is timed first
        assert call.name == "npu_fusion_attention" and call.facts["layout"] == "BSND"
        assert call.shapes == (tuple(q.shape), tuple(k.shape), tuple(v.shape))
        strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        assert torch.equal(kernel(*strided), out)
        out, lse = kernel.with_lse(q * 3, k, v)
        assert kernel.can_return_lse and lse.dtype == F32 and lse.shape == (2, 2, 200)
        torch.testing.assert_close(
            out.double(), compute_attention(q * 3, k, v), rtol=2**-8, atol=bound
        )
        assert max_error(lse, log_sum_exp(q * 3, k)) < 4e-6


@pytest.mark.parametrize("name", ["dense", "laser"])
def test_selected_kernels_are_those_that_settings_promise(name: str) -> None:
    kind = KINDS[name]
    dense = select_kernels_for(kind).dense_kernel
    assert dense.can_return_lse == kind.attention.dense_kernel.has_lse
    assert dense.name.startswith("npu ")


def test_laser(chip: Choose, calls: list[Any]) -> None:
    chip("A3")
    kernel = npu.LaserKernel(make_target("A3"))
    for size, dtype in SIZES:
        q, k, v = make_qkv(2048, 2100, heads=1, size=size, dtype=dtype)
        out = kernel(q, k, v)
        assert out.dtype == dtype and max_error(out, compute_attention(q, k, v)) < 6e-4
        assert calls[-1].name == "mindiesd.la" and calls[-1].shapes[1] == (1, 1, 2304, 128)
    assert len(calls) == 2 and not kernel.can_return_lse
    with pytest.raises(ValueError, match="no log-sum-exp"):
        kernel.with_lse(q, k, v)


def test_laser_refuses_where_mindiesd_takes_another_kernel(chip: Choose, calls: list[Any]) -> None:
    import mindiesd

    kernel = npu.LaserKernel(make_target("A2"))
    attention_kwargs = {"opt_mode": "manual", "op_type": "ascend_laser_attention", "layout": "BNSD"}
    for rows in ((2048, 2048), (2047, 2048), (2048, 2047)):
        inputs = make_qkv(*rows, heads=1)
        calls.clear()
        mindiesd.attention_forward(*inputs, **attention_kwargs)
        if rows == (2048, 2048):
            kernel(*inputs)
            assert list_call_names(calls) == ["mindiesd.la"] * 2
        else:
            with pytest.raises(ValueError, match=f"not {rows[0]} and {rows[1]} rows"):
                kernel(*inputs)
            assert list_call_names(calls) == ["npu_fusion_attention"]
    for size, dtype in ((192, BF16), (64, F32)):
        with pytest.raises(ValueError, match=f"rows, heads of {size} and {dtype}"):
            kernel(*make_qkv(2048, 2048, 1, size, dtype))


def test_block_quantizer(chip: Choose, calls: list[Any]) -> None:
    """Against an explicit computation: each block's largest value becomes 448."""
    chip("A5")
    quantize = npu_quant.NpuBlockQuantizer(make_target("A5"))
    for rows, size in ((128, 64), (256, 64), (128, 128), (256, 128)):
        x = make_qkv(300, 300, heads=3, size=size, batch=2)[0]
        calls.clear()
        quantized = quantize(x, rows)
        for b, n, (i, first) in product(range(2), range(3), enumerate(range(0, 300, rows))):
            block = x[b, first : first + rows, n].float()
            scale = block.abs().max() / 448
            assert quantized.scale is not None and quantized.scale[b, i, n, 0] == scale
            values = quantized.values[b, first : first + rows, n]
            assert torch.equal(values.float(), (block / scale).to(values.dtype).float())
        assert quantized.rows_per_scale == rows and quantized.values.dtype == torch.float8_e4m3fn
        assert list_call_names(calls) == ["npu_dynamic_block_quant"] * 2
        assert quantized.values.transpose(
            1, 2
        ).is_contiguous()  # the layout of the attention kernel


class WanSelfAttention(nn.Module):
    """The attributes that mindiesd needs of a layer: class name, heads and head size."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.q, self.num_heads, self.head_dim = nn.Linear(8, heads * size), heads, size


def make_mindiesd_fp8(heads: int, size: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Make mindiesd's FP8 attention by its online quantization (W16A16F8)."""
    import mindiesd

    holder = nn.ModuleDict({"self_attn": WanSelfAttention(heads, size)}).to(dtype)
    config = mindiesd.OnlineQuantConfig(
        fallback_layers={"*.q": "W16A16"},
        fa_layers=("WanSelfAttention",),
        fa_quant_type="FP8_DYNAMIC",
    )
    return mindiesd.quantize(holder, online_config=config, dtype=dtype)["self_attn"].fa_quant


def make_wan_fp8(size: int, dtype: torch.dtype) -> Fp8Attention:
    quantizer = Fp8Quantizer(Rotations(size), npu_quant.NpuBlockQuantizer(make_target("A5")), "npu")
    return Fp8Attention(quantizer, dtype, npu_quant.NpuFp8Attention(make_target("A5")))


def test_fp8_is_that_of_mindiesd(chip: Choose, calls: list[Any]) -> None:
    chip("A5")
    for size, dtype in SIZES:
        q, k, v = make_qkv(400, 400, size=size, dtype=dtype)
        vendor = make_mindiesd_fp8(2, size, dtype)
        calls.clear()
        expected = vendor(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        vendor_calls = [*calls]
        calls.clear()
        out = run_backend(make_wan_fp8(size, dtype), q, k, v, None)
        assert out.dtype == dtype and torch.equal(out, expected)
        assert calls[-1] == vendor_calls[-1] and sorted(list_call_names(calls)) == sorted(
            list_call_names(vendor_calls)
        )
        assert calls[-1].name == "mindiesd.fused_infer_attention_score_v2"
        assert 1e-4 < max_error(out, compute_attention(q, k, v)) < 5e-2


def test_fp8_by_blocks_heads_and_samples(chip: Choose, calls: list[Any]) -> None:
    """Blocks, heads and samples alone have the same bits; K/V are quantized once."""
    chip("A5")
    method = make_wan_fp8(64, BF16)
    q, k, v = make_qkv(300, 300, heads=3, batch=2)
    full_output = run_backend(method, q, k, v, None)
    calls.clear()
    by_blocks = method.prepare_kv(AttentionInput(q), AttentionInput(k), AttentionInput(v), None)
    parts = [by_blocks(AttentionInput(q[:, a:b]), a) for a, b in ((0, 128), (128, 256), (256, 300))]
    assert torch.equal(torch.cat(parts, 1), full_output)
    assert list_call_names(calls).count("npu_dynamic_block_quant") == 2 * (
        2 + 3
    )  # samples x (k, v, blocks)
    part = (slice(1, 2), slice(None), slice(1, 3))
    assert torch.equal(run_backend(method, q[part], k[part], v[part], None), full_output[part])


@pytest.mark.parametrize("name", ["fp8-transport", "v3"])
def test_keys_get_the_layout_of_the_operator_once(name: str, chip: Choose) -> None:
    """Keys and values as after an exchange, with tokens first; and not for each query block."""
    chip("A5")
    seen: list[tuple[Tensor, Tensor]] = []

    def load(name: str) -> Any:
        operator = resolve_name(name)
        if not name.endswith(("fused_infer_attention_score_v2", "rain_fusion_attention_v3")):
            return operator

        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            seen.append((k, v))  # kept, so that no later copy has the same address
            return operator(q, k, v, **options)

        return attend

    kind, step = KINDS[name], make_step_info(KINDS[name], (2, 16, 16))
    (method, *_) = select_kernels(kind.attention, make_target("A5", load=load), {}).backends
    sent = method.quantize(*make_qkv(512, 512), 512, replace(step, layer=0))
    q, k, v = (x.map(Tensor.contiguous) for x in sent)
    attend = method.prepare_kv(q, k, v, replace(step, layer=0))
    for first in (0, 256):
        attend(q.slice_rows(first, first + 256), first)
    (first_k, first_v), (second_k, second_v) = seen
    assert first_k.data_ptr() == second_k.data_ptr() and first_v.data_ptr() == second_v.data_ptr()


def test_clock_is_restored_on_every_path(chip: Choose, calls: list[Any]) -> None:
    cap = FrequencyCap(1400, 1650)
    kernel = npu.FusedKernel(make_target("A2"))
    for _ in range(2):
        with cap:
            kernel(*make_qkv(8, 8))
    with pytest.raises(KeyError), cap:
        raise KeyError
    wrong = FrequencyCap(-1, 1650)  # mindiesd itself refuses, before anything ran
    with pytest.raises(Exception, match="freq must be in range"), wrong:
        raise AssertionError
    clock = [call.facts.get("freq", call.name) for call in calls]
    once = [1400, "npu_fusion_attention", 1650]
    assert clock == [1650] + once * 2 + [1400, 1650] + [1650, 1650]


def end_in_a_block(number: int) -> int:
    """End by a signal in the middle of a block, or orderly after it."""
    import torch_npu

    torch_npu.npu.set_device(3)
    with FrequencyCap(1400, 1650):
        if number:
            os.kill(os.getpid(), number)
            print("went on")
    atexit._run_exitfuncs()
    return 0


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, 0], ids=str)
def test_clock_is_restored_once_however_a_process_ends(number: int, tmp_path: Path) -> None:
    """After SIGKILL the watcher process restores it, of the same device."""
    with Ranks([{"NPU_SIM_LOG": str(tmp_path / "log")}], end_in_a_block, number) as process:
        # The outputs are closed only when the watcher has ended, too.
        assert process.wait_for_exit() == [-number] and "went on" not in process.format_outputs()
    calls = [json.loads(line) for line in (tmp_path / "log.0").read_text().splitlines()]
    clock = [call["facts"] for call in calls if call["name"] == "mindiesd.frequency_regulator"]
    assert clock == [{"freq": freq, "device": 3} for freq in (1650, 1400, 1650)]
