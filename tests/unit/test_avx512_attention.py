"""Attention in bfloat16 on CPUs with AVX512-BF16, against float64 and PyTorch's kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from wan.device import Device
from wan.kernels import avx512_attention
from wan.kernels.avx512_attention import Avx512Kernel
from wan.kernels.interfaces import Target
from wan.kernels.registry import select_kernels
from wan.kernels.sdpa import SdpaKernel
from wan.settings.attention import Attention
from wan.settings.devices import get_capabilities
from wan.utils.cpp_library import CppLibrary
from wan.utils.torch_private import has_avx512_bf16

CPU = Device(torch.device("cpu"), get_capabilities("cpu"))
needs_instructions = pytest.mark.skipif(
    not has_avx512_bf16(), reason="needs a CPU with AVX512-BF16"
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def qkv(rows: int, keys: int, heads: int = 2, dim: int = 64) -> list[Tensor]:
    return [draw(1, n, heads, dim, seed=i) for i, n in enumerate((rows, keys, keys))]


def attend_in_float64(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """By definition; q, k, v and the result [B,S,N,D], the log-sum-exp [B,N,S]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return (logits.softmax(-1) @ v).transpose(1, 2), logits.logsumexp(-1)


@needs_instructions
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_values(dim: int) -> None:
    """Blocks of 48 queries, 64 and 512 keys, complete or not; errors no larger than PyTorch's."""
    for rows, keys in ((1, 1), (7, 63), (48, 64), (49, 65), (50, 512), (97, 1090)):
        q, k, v = (2 * x for x in qkv(rows, keys, dim=dim))
        out, lse = Avx512Kernel().with_lse(q, k, v)
        expected, expected_lse = attend_in_float64(q, k, v)
        error, usual = ((x - expected).norm() for x in (out, SdpaKernel()(q, k, v)))
        assert error <= 1.1 * usual + 1e-6, (rows, keys, error, usual)
        assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-6)


@needs_instructions
def test_strides_and_samples() -> None:
    """Two samples; tensors that are views of [B,N,S,D], of a packed tensor, and of [B,S,D,N]."""
    q = draw(2, 3, 70, 64).transpose(1, 2)
    k, v = draw(2, 90, 3, 2 * 64, seed=1).chunk(2, dim=3)
    for value in (v, draw(2, 90, 64, 3, seed=2).transpose(2, 3)):
        actual, lse = Avx512Kernel().with_lse(q, k, value)
        expected, expected_lse = attend_in_float64(q, k, value)
        assert_close(actual.double(), expected, atol=2e-2, rtol=1e-2)
        assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-6)
        assert torch.equal(actual, Avx512Kernel()(*(x.contiguous() for x in (q, k, value))))


@needs_instructions
@pytest.mark.parametrize(("keys", "dim"), [(700, 64), (9000, 256)])
def test_bits_do_not_depend_on_the_call(keys: int, dim: int) -> None:
    """Chunks of heads, blocks of queries and the number of threads change no bit."""
    q, k, v = qkv(130, keys, heads=3, dim=dim)
    kernel = Avx512Kernel()
    whole, lse = kernel.with_lse(q, k, v)
    heads = [kernel(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(3)]
    blocks = [kernel.with_lse(part, k, v) for part in q.split((61, 69), dim=1)]
    assert torch.equal(torch.cat(heads, dim=2), whole)
    assert torch.equal(torch.cat([out for out, _ in blocks], dim=1), whole)
    assert torch.equal(torch.cat([part for _, part in blocks], dim=2), lse)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernel(q, k, v), whole)
    finally:
        torch.set_num_threads(threads)


@needs_instructions
def test_extreme_scores() -> None:
    """A key with a huge score gets all the weight; values that are not finite give NaN."""
    q, k, v = qkv(60, 600)
    k[0, 550, 0] = 1000 * q[0, 5, 0]
    out, lse = Avx512Kernel().with_lse(q, k, v)
    assert torch.equal(out[0, 5, 0], v[0, 550, 0])
    assert_close(lse.double(), attend_in_float64(q, k, v)[1], atol=1e-3, rtol=1e-5)
    for value in (torch.nan, torch.inf, -torch.inf):
        k[0, 3, 0, 7] = value
        out, expected = Avx512Kernel()(q, k, v), attend_in_float64(q, k, v)[0]
        assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any()


@needs_instructions
def test_inside_a_compiled_function() -> None:
    q, k, v = qkv(20, 70)
    function = torch.compile(Avx512Kernel().__call__, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(q, k, v), Avx512Kernel()(q, k, v))


@pytest.fixture
def any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with the instructions, and no library loaded by other tests."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(avx512_attention, "has_avx512_bf16", lambda: True)
    monkeypatch.setattr(avx512_attention, "has_amx", lambda: False)
    source = Path(avx512_attention.__file__).with_suffix(".cpp")
    library = CppLibrary(source, lambda _: None, "Attention is PyTorch's")
    monkeypatch.setattr(avx512_attention, "LIBRARY", library)


@pytest.mark.usefixtures("any_cpu")
def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both kernels: `sdpa` computes everything by PyTorch, also cross-attention."""

    def select(
        head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
    ) -> type:
        settings = Attention(attention_backend=backend)
        selected = select_kernels(settings, Target(CPU, head_dim, dtype), {})
        assert type(selected.dense_kernel) is type(selected.cross_attention_kernel)
        return type(selected.dense_kernel)

    assert select() is select(64) is Avx512Kernel
    assert select(96) is select(320) is select(dtype=torch.float32) is SdpaKernel
    assert select(backend="sdpa") is SdpaKernel
    for name, has_instructions in (("has_amx", True), ("has_avx512_bf16", False)):
        with monkeypatch.context() as patch:
            patch.setattr(avx512_attention, name, lambda has=has_instructions: has)
            assert select() is SdpaKernel


@pytest.mark.usefixtures("any_cpu")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's kernel instead."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    selected = select_kernels(Attention(), Target(CPU, 64, torch.bfloat16), {})
    assert type(selected.dense_kernel) is type(selected.cross_attention_kernel) is SdpaKernel
