"""Winograd's convolutions of the VAE against float64, and whole networks against direct ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.modules.vae import winograd
from wan.modules.vae.network import Autoencoder

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512"
)


def make_random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def make_conv(channels: int, outer: int, time: int) -> nn.Conv3d:
    torch.manual_seed(0)
    return nn.Conv3d(channels, outer, (time, 3, 3)).requires_grad_(False)


def convolve_directly(conv: nn.Conv3d, x_CFHW: Tensor, upsampled: bool) -> Tensor:
    """x: with its border, of which a pixel remains where it is upsampled."""
    if upsampled:
        inside = x_CFHW[..., 1:-1, 1:-1].repeat_interleave(2, 2).repeat_interleave(2, 3)
        x_CFHW = F.pad(inside, (1, 1, 1, 1))
    return F.conv3d(x_CFHW[None], conv.weight.to(x_CFHW), conv.bias.to(x_CFHW))[0]  # type: ignore[union-attr]


def measure_error(y: Tensor, expected: Tensor) -> float:
    assert y.shape == expected.shape
    return float((y - expected).square().mean().sqrt())


@pytest.mark.parametrize(
    ("channels", "outer", "time", "size", "upsampled"),
    [
        (5, 8, 3, (1, 2, 2), False),
        (7, 3, 3, (3, 5, 33), False),  # odd rows and columns, a padded number of channels
        (100, 24, 3, (2, 6, 70), False),  # tiles of one row, and of two
        (130, 16, 1, (2, 4, 100), False),  # more channels than a sum has products
        (9, 8, 1, (1, 1, 1), True),
        (70, 19, 1, (2, 7, 37), True),
    ],
)
def test_errors_are_those_of_direct_convolutions(
    channels: int, outer: int, time: int, size: tuple[int, int, int], upsampled: bool
) -> None:
    """size: frames, rows and columns of the inputs without their border."""
    conv = make_conv(channels, outer, time)
    frames, rows, columns = size
    x = F.pad(make_random(channels, frames + time - 1, rows, columns), (1, 1, 1, 1))
    x = make_random(*x.shape) if not upsampled else x  # a border from other ranks
    y = winograd.convolve(conv, [frame.contiguous() for frame in x.unbind(1)], upsampled)
    exact = convolve_directly(conv, x.double(), upsampled)
    assert measure_error(y, exact) <= 2 * measure_error(
        convolve_directly(conv, x, upsampled), exact
    )


def test_frames_before_the_first_are_zeros_that_nobody_reads() -> None:
    conv, frame = make_conv(6, 8, 3), make_random(6, 5, 9)
    zeros = torch.zeros_like(frame)
    for missing in (1, 2):
        frames = [frame] * (3 - missing)
        y = winograd.convolve(conv, [*[None] * missing, *frames])
        assert torch.equal(y, winograd.convolve(conv, [*[zeros] * missing, *frames]))


def test_weights_in_another_layout() -> None:
    conv, x = make_conv(6, 8, 3), [*make_random(3, 6, 5, 9)]
    expected = winograd.convolve(conv, x)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(winograd.convolve(conv, x), expected)


@pytest.mark.parametrize("upsampled", [False, True])
def test_a_result_depends_on_no_other_tile(upsampled: bool) -> None:
    """Bit for bit: even rows alone, and each frame alone, on any number of threads."""
    conv = make_conv(100, 16, 1 if upsampled else 3)
    frames = [frame.contiguous() for frame in make_random(4, 100, 10, 50).unbind(0)]
    video = winograd.convolve(conv, frames, upsampled)
    factor = 2 if upsampled else 1
    for start, end in ((0, 2), (2, 8)):
        parts = [frame[:, start : end + 2].contiguous() for frame in frames]
        part = winograd.convolve(conv, parts, upsampled)
        assert torch.equal(part, video[:, :, factor * start : factor * end])
    frame = winograd.convolve(conv, frames[1 : 1 + (1 if upsampled else 3)], upsampled)
    assert torch.equal(frame, video[:, 1:2])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(winograd.convolve(conv, frames, upsampled), video)
    finally:
        torch.set_num_threads(threads)


def test_norm_and_silu() -> None:
    x, gamma = 3 * make_random(20, 3, 37), make_random(20, 1, 1)
    x[:, 1, 2] = 0
    x[0, 0, 0], gamma[0] = 1e4, 50.0  # SiLU near its ends
    padded = torch.full((20, 5, 39), 7.0)
    winograd.normalize(gamma, x, padded)
    expected = F.silu(F.normalize(x.double(), dim=0) * 20**0.5 * gamma.double())
    inside = padded[:, 1:-1, 1:-1]
    torch.testing.assert_close(inside.double(), expected, rtol=1e-6, atol=1e-6)
    assert not padded[:, 1:-1, [0, -1]].any()
    x[3, 2, 5] = torch.nan
    winograd.normalize(gamma, x, padded)
    assert padded[:, 3, 6].isnan().all() and padded.isnan().sum() == 20


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_the_autoencoder_is_as_exact(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding and encoding; windows of latent frames from the start are equal bit by bit."""
    torch.manual_seed(0)
    vae = Autoencoder(version, 8, 8).eval().requires_grad_(False)
    size = (5, 17 * vae.version.scale, 2 * vae.version.scale)
    z, video = make_random(1, vae.version.z_dim, 2, 5, 3), make_random(1, 3, *size).tanh()

    def run(vae: Autoencoder, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frames = torch.cat(list(vae.decode(z.to(dtype))), dim=2)
        return frames, vae.encode(video.to(dtype))

    direct = run(vae, torch.float32)
    monkeypatch.setattr(winograd, "is_faster", lambda *_: True)
    results = run(vae, torch.float32)
    assert torch.equal(torch.cat(list(vae.decode(z[:, :, :1])), dim=2), results[0][:, :, :1])
    monkeypatch.undo()
    for result, other, exact in zip(results, direct, run(vae.double(), torch.float64), strict=True):
        assert 0 < measure_error(result, exact) <= 2 * measure_error(other, exact)


def test_only_large_frames_in_float32_repay_compiling() -> None:
    weight = torch.zeros(1)
    assert winograd.is_faster(weight, 96, 24 * 40)  # 320 x 192 pixels of VAE 2.1
    assert not winograd.is_faster(weight, 96, 16 * 16)
    assert not winograd.is_faster(weight.bfloat16(), 96, 24 * 40)
    assert not winograd.is_faster(weight.to("meta"), 96, 24 * 40)
