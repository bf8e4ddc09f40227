"""NPU kernels with the real mindiesd, against float64 attention and mindiesd's modules.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist import Ranks
from tests.npu_sim.oracles import exact, log_sum_exp, qkv, worst
from tests.npu_sim.ranks import KINDS, attend, composed, target
from wan.kernels.base import AttentionInput
from wan.kernels.fp8 import Fp8Attention, Fp8Quantizer, Rotations
from wan.kernels.npu import block_sparse
from wan.kernels.npu import dense as npu
from wan.kernels.npu import fp8 as npu_quant
from wan.kernels.npu.clock import FrequencyCap

Choose = Callable[[str], None]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Half a step of bfloat16 near 0.5; float32 and the float16 of laser are finer.
BOUND = {BF16: 2e-3, F16: 5e-4, F32: 2e-6}
SIZES = [(64, BF16), (128, F16)]  # of heads


def names(calls: list[Any]) -> list[str]:
    return [call.name for call in calls]


@pytest.mark.parametrize("name", ["A2", "A3", "A5"])
def test_fused(name: str, chip: Choose, calls: list[Any]) -> None:
    chip(name)
    kernel = npu.FusedKernel(target(name))
    for dtype, bound in BOUND.items():
        q, k, v = qkv(200, 333, dtype=dtype, batch=2)
        calls.clear()
        out = kernel(q, k, v)
        assert out.shape == q.shape and out.dtype == dtype
        assert worst(out, exact(q, k, v)) < bound
        (call,) = calls  # the kernel is selected explicitly: none is timed first
        assert call.name == "npu_fusion_attention" and call.facts["layout"] == "BSND"
        assert call.shapes == (tuple(q.shape), tuple(k.shape), tuple(v.shape))
        out, lse = kernel.with_lse(q * 3, k, v)
        assert kernel.can_return_lse and lse.dtype == F32 and lse.shape == (2, 2, 200)
        torch.testing.assert_close(out.double(), exact(q * 3, k, v), rtol=2**-8, atol=bound)
        assert worst(lse, log_sum_exp(q * 3, k)) < 4e-6


@pytest.mark.parametrize("name", ["dense", "laser"])
def test_selected_kernels_are_those_that_settings_promise(name: str) -> None:
    kind = KINDS[name]
    dense = composed(kind).dense_kernel
    assert dense.can_return_lse == kind.attention.dense_kernel.has_lse
    assert dense.name.startswith("npu ")


def test_laser(chip: Choose, calls: list[Any]) -> None:
    chip("A3")
    kernel = npu.LaserKernel(target("A3"))
    for size, dtype in SIZES:
        q, k, v = qkv(2048, 2100, heads=1, size=size, dtype=dtype)
        out = kernel(q, k, v)
        assert out.dtype == dtype and worst(out, exact(q, k, v)) < 6e-4
        assert calls[-1].name == "mindiesd.la" and calls[-1].shapes[1] == (1, 1, 2304, 128)
    assert len(calls) == 2 and not kernel.can_return_lse
    with pytest.raises(ValueError, match="no log-sum-exp"):
        kernel.with_lse(q, k, v)


def test_laser_refuses_where_mindiesd_takes_another_kernel(chip: Choose, calls: list[Any]) -> None:
    import mindiesd

    kernel = npu.LaserKernel(target("A2"))
    named = {"opt_mode": "manual", "op_type": "ascend_laser_attention", "layout": "BNSD"}
    for rows in ((2048, 2048), (2047, 2048), (2048, 2047)):
        inputs = qkv(*rows, heads=1)
        calls.clear()
        mindiesd.attention_forward(*inputs, **named)
        if rows == (2048, 2048):
            kernel(*inputs)
            assert names(calls) == ["mindiesd.la"] * 2
        else:
            with pytest.raises(ValueError, match=f"not {rows[0]} and {rows[1]} rows"):
                kernel(*inputs)
            assert names(calls) == ["npu_fusion_attention"]
    for size, dtype in ((192, BF16), (64, F32)):
        with pytest.raises(ValueError, match=f"rows, heads of {size} and {dtype}"):
            kernel(*qkv(2048, 2048, 1, size, dtype))


def test_what_a_chip_does_not_have_is_not_made() -> None:
    """Kernels assert that their chip has them; settings refuse it before."""
    having = {
        npu.LaserKernel: "A2 A3",
        npu_quant.NpuBlockQuantizer: "A5",
        npu_quant.NpuFp8Attention: "A5",
        block_sparse.RainKernelV2: "A2 A3",
        block_sparse.RainKernelV3: "A2 A3 A5",
    }
    for make, chips in having.items():
        for name in ("Duo", "A2", "A3", "A5"):
            if name in chips.split():
                make(target(name))
            else:
                with pytest.raises(AssertionError, match=f"{name} has no"):
                    make(target(name))


def test_block_quantise(chip: Choose, calls: list[Any]) -> None:
    """Against an explicit computation: each block's largest value becomes 448."""
    chip("A5")
    quantise = npu_quant.NpuBlockQuantizer(target("A5"))
    for rows, size in ((128, 64), (256, 64), (128, 128), (256, 128)):
        x = qkv(300, 300, heads=3, size=size, batch=2)[0]
        calls.clear()
        found = quantise(x, rows)
        for b, n, (i, first) in product(range(2), range(3), enumerate(range(0, 300, rows))):
            block = x[b, first : first + rows, n].float()
            scale = block.abs().max() / 448
            assert found.scale is not None and found.scale[b, i, n, 0] == scale
            values = found.values[b, first : first + rows, n]
            assert torch.equal(values.float(), (block / scale).to(values.dtype).float())
        assert found.rows_per_scale == rows and found.values.dtype == torch.float8_e4m3fn
        assert names(calls) == ["npu_dynamic_block_quant"] * 2
        assert found.values.transpose(1, 2).is_contiguous()  # the layout of the attention kernel


class WanSelfAttention(nn.Module):
    """The attributes that mindiesd needs of a layer: class name, heads and head size."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.q, self.num_heads, self.head_dim = nn.Linear(8, heads * size), heads, size


def vendor_fp8(heads: int, size: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Make mindiesd's FP8 attention by its online quantization (W16A16F8)."""
    import mindiesd

    holder = nn.ModuleDict({"self_attn": WanSelfAttention(heads, size)}).to(dtype)
    config = mindiesd.OnlineQuantConfig(
        fallback_layers={"*.q": "W16A16"},
        fa_layers=("WanSelfAttention",),
        fa_quant_type="FP8_DYNAMIC",
    )
    return mindiesd.quantize(holder, online_config=config, dtype=dtype)["self_attn"].fa_quant


def our_fp8(size: int, dtype: torch.dtype) -> Fp8Attention:
    quantiser = Fp8Quantizer(Rotations(size), npu_quant.NpuBlockQuantizer(target("A5")), "npu")
    return Fp8Attention(quantiser, dtype, npu_quant.NpuFp8Attention(target("A5")))


def test_fp8_is_that_of_mindiesd(chip: Choose, calls: list[Any]) -> None:
    chip("A5")
    for size, dtype in SIZES:
        q, k, v = qkv(400, 400, size=size, dtype=dtype)
        vendor = vendor_fp8(2, size, dtype)
        calls.clear()
        want = vendor(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        theirs = [*calls]
        calls.clear()
        out = attend(our_fp8(size, dtype), q, k, v, None)
        assert out.dtype == dtype and torch.equal(out, want)
        assert calls[-1] == theirs[-1] and sorted(names(calls)) == sorted(names(theirs))
        assert calls[-1].name == "mindiesd.fused_infer_attention_score_v2"
        assert 1e-4 < worst(out, exact(q, k, v)) < 5e-2


def test_fp8_by_blocks_heads_and_samples(chip: Choose, calls: list[Any]) -> None:
    """Blocks, heads and samples alone have the same bits; K/V are quantized once."""
    chip("A5")
    method = our_fp8(64, BF16)
    q, k, v = qkv(300, 300, heads=3, batch=2)
    whole = attend(method, q, k, v, None)
    calls.clear()
    by_blocks = method.prepare_kv(AttentionInput(q), AttentionInput(k), AttentionInput(v), None)
    parts = [by_blocks(AttentionInput(q[:, a:b]), a) for a, b in ((0, 128), (128, 256), (256, 300))]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert names(calls).count("npu_dynamic_block_quant") == 2 * (2 + 3)  # samples x (k, v, blocks)
    part = (slice(1, 2), slice(None), slice(1, 3))
    assert torch.equal(attend(method, q[part], k[part], v[part], None), whole[part])


def test_fp8_takes_any_strides(chip: Choose) -> None:
    """Strides as after an exchange: values and scales with tokens first."""
    chip("A5")
    quantise = npu_quant.NpuBlockQuantizer(target("A5"))
    kernel = npu_quant.NpuFp8Attention(target("A5"))
    q, k, v = (quantise(x, rows) for x, rows in zip(qkv(200, 400), (128, 256, 256), strict=True))
    whole = kernel(q, k, v, BF16)
    first, second, third = (x.map(Tensor.contiguous) for x in (q, k, v))
    assert torch.equal(kernel(first, second, third, BF16), whole)
    want = exact(*(x.dequantize(torch.float64) for x in (q, k, v)))
    assert worst(whole, want) < BOUND[BF16]


def clocks(log: Path) -> list[int]:
    """Read the frequencies that a process and its watcher have set."""
    facts = [json.loads(line)["facts"] for line in Path(f"{log}.0").read_text().splitlines()]
    return [fact["freq"] for fact in facts if "freq" in fact]


def test_clock_is_restored_on_every_path(chip: Choose, calls: list[Any]) -> None:
    cap = FrequencyCap(1400, 1650)
    kernel = npu.FusedKernel(target("A2"))
    for _ in range(2):
        with cap:
            kernel(*qkv(8, 8))
    with pytest.raises(KeyError), cap:
        raise KeyError
    wrong = FrequencyCap(-1, 1650)  # mindiesd itself refuses, before anything ran
    with pytest.raises(Exception, match="freq must be in range"), wrong:
        raise AssertionError
    clock = [call.facts.get("freq", call.name) for call in calls]
    once = [1400, "npu_fusion_attention", 1650]
    assert clock == [1650] + once * 2 + [1400, 1650] + [1650, 1650]


def ended_by(number: signal.Signals) -> int:
    import torch_npu

    assert torch_npu.npu.is_available()
    with FrequencyCap(1400, 1650):
        os.kill(os.getpid(), number)
        print("went on")
    return 0


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
def test_clock_is_restored_in_the_middle_of_a_block(number: signal.Signals, tmp_path: Path) -> None:
    """After SIGKILL the watcher process restores the clock; torchrun sends SIGTERM."""
    with Ranks([{"NPU_SIM_LOG": str(tmp_path / "log")}], ended_by, number) as process:
        assert (
            process.wait_for_exit() == [-number] and "went on" not in process.format_outputs()
        )  # and the watcher ends too
    assert clocks(tmp_path / "log") == [1650, 1400, 1650]


def test_clock_is_restored_once_by_an_orderly_end(tmp_path: Path) -> None:
    work = (
        "import torch_npu; from wan.kernels.npu.clock import FrequencyCap\n"
        "with FrequencyCap(1400, 1650): pass"
    )
    env = os.environ | {"NPU_SIM_LOG": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, "-c", work], env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr  # its outputs are closed: no process is left
    assert clocks(tmp_path / "log") == [1650, 1400, 1650]
