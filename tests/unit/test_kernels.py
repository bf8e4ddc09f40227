"""The dense kernel's log-sum-exp, the padding that CUDA's operators need, what is selected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wan.device import Device
from wan.kernels.sdpa import SdpaKernel, padded_heads
from wan.kernels.select import DENSE, Exported, select
from wan.settings.attention import ALGORITHMS, Attention
from wan.settings.devices import DEVICES, of_type


def qkv(head: int, rows: int = 19, keys: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(head)
    return [torch.randn(2, n, 3, head, generator=generator) for n in (rows, keys, keys)]


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp in float64, from the definition; everything [B,N,S,D]."""
    q, k, v = (x.double() for x in (q, k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("head", [6, 8, 64, 128])
def test_with_lse(head: int) -> None:
    tensors = qkv(head)
    out, lse = SdpaKernel().with_lse(*tensors)
    expected, expected_lse = plain(*(x.transpose(1, 2) for x in tensors))
    assert lse.dtype == torch.float32 and lse.shape == (2, 3, 19)
    assert (out.transpose(1, 2) - expected).abs().max() <= 2e-6
    assert (lse - expected_lse).abs().max() <= 2e-6


@pytest.mark.parametrize("head", [6, 8, 20])
def test_padded_heads(head: int) -> None:
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        seen.append(q.shape[-1])
        return F.scaled_dot_product_attention(q, k, v, scale=scale), q

    tensors = [x.transpose(1, 2) for x in qkv(head)]
    out, _ = padded_heads(attend, *tensors)
    assert seen[0] % 8 == 0 and out.shape == tensors[0].shape
    assert (out - plain(*tensors)[0]).abs().max() <= 2e-6


CPU, CUDA = (Device(torch.device(name), of_type(name)) for name in ("cpu", "cuda"))
RAIN = Attention(use_rainfusion=True, rainfusion_type="v3", sparse_start_step=0)
LATER = Attention(use_rainfusion=True)  # after a quarter of the steps
EXPORTED = {("dit", 0): (torch.eye(64), torch.eye(64))}
SDPA, TILES = "PyTorch SDPA on cpu", "PyTorch SDPA, masked in tiles"
FP8 = "fp8 (per-block E4M3; PyTorch SDPA, dequantised)"


@pytest.mark.parametrize(
    ("attention", "device", "exported", "said"),
    [
        (Attention(), CPU, {}, SDPA),
        (Attention(), CUDA, {}, "PyTorch SDPA on cuda"),
        (Attention(fa_quant="fp8"), CPU, {}, FP8),
        (Attention(fa_quant="fp8"), CPU, EXPORTED, f"{FP8}, else {SDPA}"),
        (RAIN, CPU, {}, f"rainfusion v3 ({TILES})"),
        (LATER, CPU, {}, f"rainfusion v2 ({TILES}), else {SDPA}"),
        (RAIN, CUDA, {}, "rainfusion v3 (PyTorch FlexAttention)"),
        (replace(RAIN, fa_quant="fp8"), CPU, {}, f"rainfusion v3 (per-block E4M3; {TILES})"),
    ],
)
def test_a_selection_names_what_can_run(
    attention: Attention, device: Device, exported: Exported, said: str
) -> None:
    """In the order of asking; nothing behind what applies to every call."""
    assert select(attention, device, 64, torch.float32, exported).describe() == said


def test_the_kernels_are_those_that_settings_promise() -> None:
    promised = {(a.name, DEVICES[name].type) for a in ALGORITHMS.values() for name in a.devices}
    assert promised == DENSE.keys()
    for name, where in promised:
        if where != "npu":  # those are made in tests/npu_sim
            kernel = DENSE[name, where](Device(torch.device(where), of_type(where)))
            assert kernel.can_return_lse == ALGORITHMS[name].has_lse


def test_a_kernel_that_does_not_exist_on_the_device() -> None:
    for algorithm, device in (("laser", CPU), ("nonsense", CUDA)):
        with pytest.raises(ValueError, match=f"no dense kernel '{algorithm}' on a {device.type}"):
            select(Attention(attention_algo=algorithm), device, 64, torch.float32, {})
