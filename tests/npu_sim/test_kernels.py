"""Kernels of NPUs through the real mindiesd, against float64 attention and mindiesd's own modules.

Legend: B batch, S tokens, N heads, D head size.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.npu_sim.ranks import KINDS, attend, composed, target
from wan.kernels.base import Payload
from wan.kernels.fp8 import Fp8Attention, Fp8Quantiser, Rotations
from wan.kernels.npu import clock as npu_clock
from wan.kernels.npu import dense as npu
from wan.kernels.npu import fp8 as npu_quant

Choose = Callable[[str], None]


def qkv(
    q_rows: int, k_rows: int, heads: int = 2, size: int = 64, dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(q_rows * 7 + k_rows)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, rows, heads, size, generator=generator).to(dtype)
        for rows in (q_rows, k_rows, k_rows)
    )


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp [B,N,S] of these very values, in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def worst(x: Tensor, y: Tensor) -> float:
    return (x.double() - y.double()).abs().max().item()


def names(calls: list[Any]) -> list[str]:
    return [call.name for call in calls]


# Half a step of bfloat16 near 0.5; float32 and the float16 of laser are finer.
BOUND = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 2e-6}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", ["A2", "A3", "A5"])
def test_fused(name: str, dtype: torch.dtype, chip: Choose, calls: list[Any]) -> None:
    chip(name)
    kernel = npu.FusedKernel(target("A2"))
    q, k, v = qkv(200, 333, dtype=dtype, batch=2)
    out = kernel(q, k, v)
    assert out.shape == q.shape and out.dtype == dtype
    assert worst(out, exact(q, k, v)[0]) < BOUND[dtype]
    (call,) = calls  # chosen by hand: nothing is timed first
    assert call.name == "npu_fusion_attention" and call.facts["layout"] == "BSND"
    assert call.shapes == (tuple(q.shape), tuple(k.shape), tuple(v.shape))


@pytest.mark.parametrize("name", ["dense", "laser"])
def test_selected_kernels_are_those_that_settings_promise(name: str) -> None:
    kind = KINDS[name]
    dense = composed(kind).dense
    assert dense.can_return_lse == kind.attention.dense.has_lse
    assert dense.name.startswith("npu ")


@pytest.mark.parametrize("dtype", BOUND)
def test_log_sum_exp(dtype: torch.dtype, chip: Choose) -> None:
    kernel = npu.FusedKernel(target("A2"))
    q, k, v = qkv(200, 333, dtype=dtype, batch=2)
    out, lse = kernel.with_lse(q * 3, k, v)
    want, want_lse = exact(q * 3, k, v)
    assert kernel.can_return_lse and lse.dtype == torch.float32 and lse.shape == (2, 2, 200)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=BOUND[dtype])
    assert worst(lse, want_lse) < 4e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_laser(size: int, dtype: torch.dtype, chip: Choose, calls: list[Any]) -> None:
    chip("A3")
    kernel = npu.LaserKernel(target("A3"))
    q, k, v = qkv(2048, 2100, heads=1, size=size, dtype=dtype)
    out = kernel(q, k, v)
    assert out.dtype == dtype and worst(out, exact(q, k, v)[0]) < 6e-4
    (call,) = calls
    assert call.name == "mindiesd.la" and call.shapes[1] == (1, 1, 2304, 128)
    assert not kernel.can_return_lse
    with pytest.raises(ValueError, match="no log-sum-exp"):
        kernel.with_lse(q, k, v)


@pytest.mark.parametrize("q_rows", [2047, 2048])
@pytest.mark.parametrize("k_rows", [2047, 2048])
def test_laser_refuses_where_mindiesd_takes_another_kernel(
    q_rows: int, k_rows: int, chip: Choose, calls: list[Any]
) -> None:
    import mindiesd

    q, k, v = qkv(q_rows, k_rows, heads=1)
    mindiesd.attention_forward(
        q, k, v, opt_mode="manual", op_type="ascend_laser_attention", layout="BNSD"
    )
    kernel = npu.LaserKernel(target("A2"))
    if names(calls) == ["mindiesd.la"]:
        kernel(q, k, v)
        assert names(calls) == ["mindiesd.la"] * 2
    else:
        assert names(calls) == ["npu_fusion_attention"]
        with pytest.raises(ValueError, match=rf"not {q_rows} and {k_rows} rows.*use FusedKernel"):
            kernel(q, k, v)
        assert len(calls) == 1


@pytest.mark.parametrize(("size", "dtype"), [(192, torch.bfloat16), (64, torch.float32)])
def test_laser_refuses_heads_and_dtypes(size: int, dtype: torch.dtype, chip: Choose) -> None:
    with pytest.raises(ValueError, match=f"not 2048 and 2048 rows, heads of {size} and {dtype}"):
        npu.LaserKernel(target("A2"))(*qkv(2048, 2048, 1, size, dtype))


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (npu.LaserKernel, "A5", "A5 has no laser attention"),
        (npu.LaserKernel, "Duo", "Duo has no laser attention"),
        (npu_quant.NpuBlockQuantise, "A2", "A2 has no FP8 attention"),
        (npu_quant.NpuFp8Attention, "A3", "A3 has no FP8 attention"),
    ],
)
def test_what_a_chip_does_not_have_is_not_made(
    make: type, name: str, words: str, chip: Choose
) -> None:
    """Settings refuse it before."""
    chip(name)
    with pytest.raises(AssertionError, match=words):
        make(target(name))


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("size", [64, 128])
def test_block_quantise(rows: int, size: int, chip: Choose, calls: list[Any]) -> None:
    chip("A5")
    x = qkv(300, 300, heads=3, size=size, batch=2)[0]
    found = npu_quant.NpuBlockQuantise(target("A5"))(x, rows)
    for b in range(2):  # by hand: each block's largest number becomes 448
        for n in range(3):
            for i, first in enumerate(range(0, 300, rows)):
                block = x[b, first : first + rows, n].float()
                scale = block.abs().max() / 448
                assert found.scale[b, i, n, 0] == scale
                values = found.values[b, first : first + rows, n]
                assert torch.equal(values.float(), (block / scale).to(values.dtype).float())
    assert found.rows == rows and found.values.dtype == torch.float8_e4m3fn
    assert names(calls) == ["npu_dynamic_block_quant"] * 2
    assert found.values.transpose(1, 2).is_contiguous()  # as the attention kernel wants it


class WanSelfAttention(nn.Module):
    """What mindiesd needs to find of a layer: a name, and heads of a known size."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.q, self.num_heads, self.head_dim = nn.Linear(8, heads * size), heads, size


def vendor_fp8(heads: int, size: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """mindiesd's own FP8 attention, made by its online quantisation (W16A16F8)."""
    import mindiesd

    holder = nn.ModuleDict({"self_attn": WanSelfAttention(heads, size)}).to(dtype)
    config = mindiesd.OnlineQuantConfig(
        fallback_layers={"*.q": "W16A16"},
        fa_layers=("WanSelfAttention",),
        fa_quant_type="FP8_DYNAMIC",
    )
    return mindiesd.quantize(holder, online_config=config, dtype=dtype)["self_attn"].fa_quant


def our_fp8(size: int, dtype: torch.dtype) -> Fp8Attention:
    quantiser = Fp8Quantiser(Rotations(size), npu_quant.NpuBlockQuantise(target("A5")), "npu")
    return Fp8Attention(quantiser, dtype, npu_quant.NpuFp8Attention(target("A5")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_fp8_is_that_of_mindiesd(
    size: int, dtype: torch.dtype, chip: Choose, calls: list[Any]
) -> None:
    chip("A5")
    q, k, v = qkv(400, 400, size=size, dtype=dtype)
    want = vendor_fp8(2, size, dtype)(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    theirs = names(calls)
    out = attend(our_fp8(size, dtype), q, k, v, None)
    assert out.dtype == dtype and torch.equal(out, want)
    fia = [call for call in calls if call.name == "mindiesd.fused_infer_attention_score_v2"]
    assert len(fia) == 2 and fia[0].shapes == fia[1].shapes
    assert sorted(names(calls)) == sorted(theirs * 2)
    assert 1e-4 < worst(out, exact(q, k, v)[0]) < 5e-2


def test_fp8_by_blocks_heads_and_samples(chip: Choose, calls: list[Any]) -> None:
    """Each part has the bits it has in the whole; keys and values are quantised once."""
    chip("A5")
    method = our_fp8(64, torch.bfloat16)
    q, k, v = qkv(300, 300, heads=3, batch=2)
    whole = attend(method, q, k, v, None)
    calls.clear()
    by_blocks = method.prepare(Payload(q), Payload(k), Payload(v), None)
    parts = [by_blocks(Payload(q[:, a:b]), a) for a, b in ((0, 128), (128, 256), (256, 300))]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert names(calls).count("npu_dynamic_block_quant") == 2 * (2 + 3)  # samples x (k, v, blocks)
    part = (slice(1, 2), slice(None), slice(1, 3))
    assert torch.equal(attend(method, q[part], k[part], v[part], None), whole[part])


def test_fp8_takes_any_strides(chip: Choose) -> None:
    """As they come out of an exchange: values and scales with tokens first."""
    chip("A5")
    quantise = npu_quant.NpuBlockQuantise(target("A5"))
    kernel = npu_quant.NpuFp8Attention(target("A5"))
    packed = [quantise(x, rows) for x, rows in zip(qkv(200, 400), (128, 256, 256), strict=True)]
    whole = kernel(*packed, torch.bfloat16)
    strided = [x.map(torch.Tensor.contiguous) for x in packed]
    assert torch.equal(kernel(*strided, torch.bfloat16), whole)
    want = exact(*(x.dequantised(torch.float64) for x in packed))[0]
    assert worst(whole, want) < BOUND[torch.bfloat16]


def test_clock_is_restored_on_every_path(chip: Choose, calls: list[Any]) -> None:
    cap = npu_clock.FrequencyCap(1400, 1650)
    kernel = npu.FusedKernel(target("A2"))
    for _ in range(2):
        with cap:
            kernel(*qkv(8, 8))
    with pytest.raises(KeyError), cap:
        raise KeyError
    wrong = npu_clock.FrequencyCap(-1, 1650)  # mindiesd itself refuses, before anything ran
    with pytest.raises(Exception, match="freq must be in range"), wrong:
        raise AssertionError
    clock = [call.facts.get("freq", call.name) for call in calls]
    once = [1400, "npu_fusion_attention", 1650]
    assert clock == [1650] + once * 2 + [1400, 1650] + [1650, 1650]


def test_clock_is_restored_after_a_kill(tmp_path: Path) -> None:
    """By the process that outlives the rank, within seconds; not after an orderly end."""
    work = (
        "import torch_npu, os, sys; from wan.kernels.npu.clock import FrequencyCap\n"
        "with FrequencyCap(1400, 1650): sys.argv[1:] and os.kill(os.getpid(), 9)"
    )
    log = tmp_path / "log.0"

    def clocks(*argv: str) -> list[int]:
        log.unlink(missing_ok=True)
        env = os.environ | {"NPU_SIM_LOG": str(tmp_path / "log")}
        subprocess.run([sys.executable, "-c", work, *argv], env=env, timeout=120)
        until = time.monotonic() + (60 if argv else 1)
        while (len(log.read_text().splitlines()) < 3 or not argv) and time.monotonic() < until:
            time.sleep(0.1)
        facts = [json.loads(line)["facts"] for line in log.read_text().splitlines()]
        return [fact["freq"] for fact in facts if "freq" in fact]

    assert clocks("kill") == [1650, 1400, 1650]
    assert clocks() == [1650, 1400, 1650]


def test_clock_is_restored_when_torchrun_ends_a_rank(tmp_path: Path) -> None:
    """By SIGTERM, in the middle of a block."""
    work = (
        "import torch_npu, os, signal; from wan.kernels.npu.clock import FrequencyCap\n"
        "with FrequencyCap(1400, 1650): os.kill(os.getpid(), signal.SIGTERM); print('on')"
    )
    env = os.environ | {"NPU_SIM_LOG": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, "-c", work], env=env, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGTERM and not done.stdout, done.stderr
    lines = (tmp_path / "log.0").read_text().splitlines()
    assert [json.loads(line)["facts"]["freq"] for line in lines] == [1650, 1400, 1650]
