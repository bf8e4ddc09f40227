"""The dense kernel's log-sum-exp, CUDA's operators and which is chosen, what is selected."""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wan import log
from wan.device import Device
from wan.kernels.base import Payload, StepInfo, Target
from wan.kernels.compiled_ops import STEPS
from wan.kernels.sdpa import (
    CUDNN,
    EFFICIENT,
    FLASH,
    CudaKernel,
    CudaOperator,
    SdpaKernel,
    check_cudnn,
    cuda_operator,
    padded_heads,
)
from wan.kernels.select import Exported, dense, select
from wan.modules.small_ops import BlockOps
from wan.pipeline.build import DTYPES
from wan.planner import operators
from wan.settings.attention import Attention
from wan.settings.devices import of_type
from wan.settings.errors import InputError
from wan.settings.kernels import DENSE, FP8, RAINFUSION, SMALL_OPS, dense_names


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


@pytest.mark.parametrize("head", [8, 24, 128])
def test_heads_that_need_no_padding_are_not_copied(head: int) -> None:
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        seen.extend((q, k, v))
        return q, q[..., 0]

    tensors = [x.transpose(1, 2) for x in qkv(head)]
    out, _ = padded_heads(attend, *tensors)
    pointers = [x.data_ptr() for x in tensors]
    assert [x.data_ptr() for x in seen] == pointers and out.data_ptr() == pointers[0]


B, H, F32 = torch.bfloat16, torch.float16, torch.float32
CHOICES = [  # capability, dtype, head, cuDNN -> the operator
    ((9, 0), B, 128, 91900, CUDNN),
    ((9, 0), H, 128, 91600, CUDNN),
    ((10, 0), B, 64, 91900, CUDNN),
    ((12, 0), B, 128, 91900, CUDNN),
    ((9, 0), B, 256, 91900, FLASH),
    ((9, 0), B, 512, 91900, EFFICIENT),
    ((9, 0), B, 128, 91501, FLASH),  # a cuDNN with an error
    ((9, 0), B, 128, None, FLASH),  # without cuDNN, or asked to leave it out
    ((9, 0), F32, 128, 91900, EFFICIENT),
    ((8, 9), B, 128, 91900, FLASH),
    ((8, 0), H, 128, 91900, FLASH),
    ((7, 5), H, 128, 91900, EFFICIENT),
    ((8, 0), F32, 128, 91900, EFFICIENT),
]


@pytest.mark.parametrize(("capability", "dtype", "head", "cudnn", "expected"), CHOICES)
def test_the_operator_that_computes_on_a_gpu(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head: int,
    cudnn: int | None,
    expected: CudaOperator,
) -> None:
    assert cuda_operator(capability, dtype, head, cudnn) is expected


@pytest.mark.parametrize(
    ("capability", "head", "cudnn", "words"),
    [
        ((9, 0), 128, None, "needs cuDNN, which this PyTorch does not have"),
        ((9, 0), 128, 91501, r"needs cuDNN 9.16 or later \(91600\); here it is 91501"),
        ((7, 5), 128, 91900, "needs compute capability 8.0; this GPU has 7.5"),
        ((9, 0), 256, 91900, "heads of at most 128 channels, not 256"),
    ],
)
def test_where_cudnn_is_refused(
    capability: tuple[int, int], head: int, cudnn: int | None, words: str
) -> None:
    check_cudnn((8, 0), 128, 91600)
    said = f"^attention_backend=cudnn .*{words}; use attention_backend=auto"
    with pytest.raises(InputError, match=said):
        check_cudnn(capability, head, cudnn)


@pytest.mark.parametrize("operator", [CUDNN, FLASH, EFFICIENT], ids=lambda operator: operator.name)
@pytest.mark.parametrize("head", [20, 64])
def test_operators_of_gpus_return_what_a_kernel_returns(operator: CudaOperator, head: int) -> None:
    """Their schemas and shapes, on tensors without data: no GPU is here."""
    q, k, v = (x.to("meta", torch.bfloat16) for x in qkv(head))
    kernel = CudaKernel(operator)
    out, lse = kernel.with_lse(q, k, v)
    assert out.shape == q.shape == kernel(q, k, v).shape and out.dtype == torch.bfloat16
    assert lse.shape == (2, 3, 19) and lse.dtype == torch.float32


def test_both_paths_of_a_kernel_use_one_operator() -> None:
    used: list[str] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        used.append("own")
        return F.scaled_dot_product_attention(q, k, v, scale=scale), q[..., 0]

    kernel = CudaKernel(CudaOperator("own", attend))
    assert torch.equal(kernel(*qkv(8)), kernel.with_lse(*qkv(8))[0])
    assert kernel.name == "own" and used == ["own", "own"]


@pytest.mark.parametrize("where", ["cpu", "cuda", "npu"])
def test_the_record_names_cudnn_on_gpus(where: str) -> None:
    found = log.versions(where, ("hypothesis", "no-such-package"))
    assert ("cudnn" in found) == (where == "cuda") and found["hypothesis"][0].isdigit()
    assert found["no-such-package"] == "not installed as a package"


CPU = Device(torch.device("cpu"), of_type("cpu"))
CUDA = Device(torch.device("meta"), of_type("cuda"))  # as a plan has it: no GPU is here
RAIN = Attention(use_rainfusion=True, rainfusion_type="v3", sparse_start_step=0)
LATER = Attention(use_rainfusion=True)  # after a quarter of the steps
EXPORTED = {("dit", 0): (torch.eye(64), torch.eye(64))}
SDPA, TILES = "PyTorch SDPA on cpu", "PyTorch SDPA, masked in tiles"
BY_FP8 = "fp8 (per-block E4M3; PyTorch SDPA, dequantised)"


@pytest.mark.parametrize(
    ("attention", "device", "exported", "said"),
    [
        (Attention(), CPU, {}, SDPA),
        (Attention(), CUDA, {}, "PyTorch SDPA on cuda"),
        (Attention(fa_quant="fp8"), CPU, {}, BY_FP8),
        (Attention(fa_quant="fp8"), CPU, EXPORTED, f"{BY_FP8}, else {SDPA}"),
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
    assert (
        select(attention, Target(device, 64, torch.float32, operators.load), exported).describe()
        == said
    )


def makers() -> list[str]:
    rows = [*DENSE.values(), *RAINFUSION.values(), FP8, *SMALL_OPS.values()]
    texts = [text for row in rows for text in row.make.values()]
    return sorted({text for text in [*texts, *FP8.quantise.values()] if ":" in text})


@pytest.mark.parametrize("text", makers())
def test_what_a_row_names_is_there(text: str) -> None:
    assert callable(resolve_name(text))


def test_compiled_operations_are_steps_of_a_block() -> None:
    for steps in STEPS.values():
        assert all(callable(getattr(BlockOps, step)) for step in steps)


ON_CPU = [name for name, row in DENSE.items() if "cpu" in row.make and row.member is None]


@pytest.mark.parametrize("head", [8, 64, 128])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ON_CPU)
def test_every_dense_kernel_of_cpus_computes_the_formula(
    name: str, precision: str, head: int
) -> None:
    """Those of xfuser are compared in tests/xfuser, those of NPUs in tests/npu_sim."""
    row, dtype = DENSE[name], DTYPES[precision]
    if precision not in row.precisions:
        pytest.skip(f"{name} takes no {precision}")
    kernel = dense(Attention(**{row.flag: name}), Target(CPU, head, dtype))
    assert kernel.can_return_lse == row.has_lse
    for rows, keys in ((19, 33), (130, 257)):
        q, k, v = (x.to(dtype) for x in qkv(head, rows, keys))
        expected, logsum = plain(*(x.transpose(1, 2) for x in (q, k, v)))
        near = {"atol": 2e-6, "rtol": 1e-5} if precision == "fp32" else {"atol": 2e-2, "rtol": 2e-2}
        found = kernel(q, k, v)
        assert found.dtype == dtype
        torch.testing.assert_close(found.transpose(1, 2).double(), expected, **near)
        if row.has_lse:
            found, lse = kernel.with_lse(q, k, v)
            torch.testing.assert_close(found.transpose(1, 2).double(), expected, **near)
            torch.testing.assert_close(lse.double(), logsum, **near)


@pytest.mark.parametrize("name", ["fp8", *(name for name, row in RAINFUSION.items() if row.make)])
def test_every_method_of_cpus_computes_the_formula(name: str) -> None:
    """FP8 up to its rounding; block-sparse attention that leaves nothing out exactly."""
    given = {"fa_quant": "fp8"} if name == "fp8" else {"rainfusion_type": name, "sparsity": 0.0}
    asked = Attention(**given, use_rainfusion=name != "fp8", sparse_start_step=0)
    (method,) = select(asked, Target(CPU, 64, torch.float32), {}).methods
    q, k, v = qkv(64, 300, 300)
    step = StepInfo(0, 4, "cond", "dit", (3, 10, 10), 300, layer=0)
    found = method.prepare(*map(Payload, (q, k, v)), step)(Payload(q), 0)
    expected, _ = plain(*(x.transpose(1, 2) for x in (q, k, v)))
    off = (found.transpose(1, 2).double() - expected).norm() / expected.norm()
    assert off < (0.1 if name == "fp8" else 1e-5)


@pytest.mark.parametrize(
    "name", [name for name in dense_names("attention_backend") if "cuda" in DENSE[name].make]
)
def test_a_backend_in_a_plan(name: str) -> None:
    """Neither a GPU nor xfuser is here; what is not known is said to be assumed."""
    row = DENSE[name]
    target = Target(CUDA, 64, torch.bfloat16, operators.load)
    selected = select(Attention(attention_backend=name), target, {})
    assert selected.dense.can_return_lse == row.has_lse
    assert selected.text.name == "PyTorch SDPA on cuda"
    assumed = f"assumed {'with' if row.has_lse else 'without'} log-sum-exp)"
    assert (assumed in selected.describe()) == (row.member is not None)
    out, lse = selected.dense.with_lse(*(x.to("meta", torch.bfloat16) for x in qkv(64)))
    assert out.shape == (2, 19, 3, 64) and lse.shape == (2, 3, 19)


def test_backends_of_pytorch_on_a_cpu() -> None:
    for name in ("auto", "sdpa"):
        kernel = dense(Attention(attention_backend=name), Target(CPU, 64, torch.float32))
        assert kernel.name == SDPA and kernel.can_return_lse


def test_a_backend_of_xfuser_where_it_is_not_installed() -> None:
    asked = Attention(attention_backend="sdpa_math")
    with pytest.raises(InputError, match=r"needs the Python module xfuser, .*-r requirements-cuda"):
        dense(asked, Target(CPU, 64, torch.float32))


def test_a_kernel_that_does_not_exist_on_the_device() -> None:
    with pytest.raises(ValueError, match=r"no kernel 'laser' on this device \(CPU\)"):
        select(Attention(attention_algo="laser"), Target(CPU, 64, torch.float32), {})
