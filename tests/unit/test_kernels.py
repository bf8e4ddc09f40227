"""The dense kernel's log-sum-exp, the choice of CUDA operators, and the selection of kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from wan.app.launch import collect_start_invariants
from wan.device import Device
from wan.kernels.compiled_ops import STEPS_BY_OP
from wan.kernels.forward_context import StepInfo
from wan.kernels.interfaces import AttentionInput, Target
from wan.kernels.registry import CheckpointRotations, make_dense_kernel, select_kernels
from wan.kernels.sdpa import (
    CUDNN,
    EFFICIENT,
    FLASH,
    CudaKernel,
    attend_with_padded_heads,
    check_cudnn,
    select_cuda_operator,
)
from wan.modules.fused_ops import BlockOps
from wan.pipeline.build import DTYPES
from wan.planner import operators
from wan.settings.attention import Attention
from wan.settings.devices import get_capabilities
from wan.settings.kernels import DENSE_KERNELS, FP8, RAINFUSION, SMALL_OPS
from wan.utils import log


def qkv(head: int, rows: int = 19, keys: int = 33) -> list[Tensor]:
    generator = torch.Generator().manual_seed(head)
    return [torch.randn(2, n, 3, head, generator=generator) for n in (rows, keys, keys)]


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by definition, in float64; q, k, v and the result [B,N,S,D]."""
    q, k, v = (x.double() for x in (q, k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def test_padded_heads() -> None:
    """Heads that need no padding are not copied."""
    for head in (6, 8, 20, 24, 128):
        inputs: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, inputs=inputs) -> tuple:
            inputs.extend((q, k, v))
            return F.scaled_dot_product_attention(q, k, v, scale=scale), q

        tensors = [x.transpose(1, 2) for x in qkv(head)]
        out, _ = attend_with_padded_heads(attend, *tensors)
        assert inputs[0].shape[-1] % 8 == 0 and out.shape == tensors[0].shape
        assert (out - attend_by_definition(*tensors)[0]).abs().max() <= 2e-6, head
        if head % 8 == 0:
            assert [x.data_ptr() for x in inputs] == [x.data_ptr() for x in tensors]
            same, _ = attend_with_padded_heads(lambda q, k, v, scale: (q, q[..., 0]), *tensors)
            assert same.data_ptr() == tensors[0].data_ptr()


B, H, F32 = torch.bfloat16, torch.float16, torch.float32
CHOICES = [  # capability, dtype, head, cuDNN -> the operator
    ((9, 0), B, 128, 91900, CUDNN),
    ((9, 0), H, 128, 91600, CUDNN),
    ((10, 0), B, 64, 91900, CUDNN),
    ((12, 0), B, 128, 91900, CUDNN),
    ((9, 0), B, 256, 91900, FLASH),
    ((9, 0), B, 512, 91900, EFFICIENT),
    ((9, 0), B, 128, 91501, FLASH),  # a cuDNN version with an error
    ((9, 0), B, 128, None, FLASH),  # without cuDNN, or with cuDNN disabled
    ((9, 0), F32, 128, 91900, EFFICIENT),
    ((8, 9), B, 128, 91900, FLASH),
    ((8, 0), H, 128, 91900, FLASH),
    ((7, 5), H, 128, 91900, EFFICIENT),
    ((8, 0), F32, 128, 91900, EFFICIENT),
]


def test_the_operator_that_computes_on_a_gpu() -> None:
    for *arguments, operator in CHOICES:
        assert select_cuda_operator(*arguments) is operator, arguments


def test_where_cudnn_is_refused() -> None:
    messages = {
        "no cuDNN": get_refusal(check_cudnn, (9, 0), 128, None),
        "cuDNN 9.15": get_refusal(check_cudnn, (9, 0), 128, 91501),
        "an old GPU": get_refusal(check_cudnn, (7, 5), 128, 91900),
        "heads of 256": get_refusal(check_cudnn, (9, 0), 256, 91900),
    }
    check_refusals("kernels: cuDNN", messages)
    check_cudnn((8, 0), 128, 91600)


def test_operators_of_gpus_return_what_a_kernel_returns() -> None:
    """Schemas and shapes on meta tensors, without a GPU."""
    for operator, head in product((CUDNN, FLASH, EFFICIENT), (20, 64)):
        q, k, v = (x.to("meta", torch.bfloat16) for x in qkv(head))
        kernel = CudaKernel(operator)
        out, lse = kernel.with_lse(q, k, v)
        assert out.shape == q.shape == kernel(q, k, v).shape and out.dtype == torch.bfloat16
        assert lse.shape == (2, 3, 19) and lse.dtype == torch.float32, (operator.name, head)


def test_the_record_names_cudnn_on_gpus() -> None:
    for device_type in ("cpu", "cuda", "npu"):
        versions = log.collect_versions(device_type, ("hypothesis", "no-such-package"))
        assert ("cudnn" in versions) == (device_type == "cuda")
        assert versions["hypothesis"][0].isdigit()
        assert versions["no-such-package"] == "not installed as a package"


CPU = Device(torch.device("cpu"), get_capabilities("cpu"))
F32_ON_CPU = Target(CPU, 64, torch.float32)
CUDA = Device(torch.device("meta"), get_capabilities("cuda"))  # as in a plan, which needs no GPU
RAIN = Attention(use_rainfusion=True, rainfusion_type="v3", sparse_start_step=0)
LATER = Attention(use_rainfusion=True)  # after a quarter of the steps
EXPORTED = {("dit", 0): (torch.eye(64), torch.eye(64))}
SDPA, TILES = "PyTorch SDPA on cpu", "PyTorch SDPA, masked in tiles"
BY_FP8 = "fp8 (per-block E4M3; PyTorch SDPA, dequantised)"


def test_a_selection_names_what_can_run() -> None:
    """Kernels in the order of selection, up to the first one that accepts every call."""
    fp8 = Attention(fa_quant="fp8")
    table: tuple[tuple[Attention, Device, CheckpointRotations, str], ...] = (
        (Attention(), CPU, {}, SDPA),
        (Attention(), CUDA, {}, "PyTorch SDPA on cuda"),
        (fp8, CPU, {}, BY_FP8),
        (fp8, CPU, EXPORTED, f"{BY_FP8}, else {SDPA}"),
        (RAIN, CPU, {}, f"rainfusion v3 ({TILES})"),
        (LATER, CPU, {}, f"rainfusion v2 ({TILES}), else {SDPA}"),
        (RAIN, CUDA, {}, "rainfusion v3 (PyTorch FlexAttention)"),
        (replace(RAIN, fa_quant="fp8"), CPU, {}, f"rainfusion v3 (per-block E4M3; {TILES})"),
    )
    for attention, device, exported, description in table:
        target = Target(device, 64, torch.float32, operators.load_operator)
        assert select_kernels(attention, target, exported).describe() == description


def test_ranks_with_another_dense_kernel_differ() -> None:
    """A named kernel may be another one on each machine; PyTorch's own choice is not compared."""
    name = "what computes attention"
    run = resolve_plan("--task", "t2v-1.3B", "--attention_backend", "sdpa", "--device", "cpu")
    npu = Device(torch.device("meta"), get_capabilities("npu"))
    kernels = {collect_start_invariants(run, device)[name] for device in (CPU, npu)}
    assert kernels == {f"PyTorch SDPA on {device} with log-sum-exp" for device in ("cpu", "npu")}
    automatic = resolve_plan("--task", "t2v-1.3B", "--device", "cpu")
    assert name not in collect_start_invariants(automatic, CPU)


def test_factories_of_the_tables_exist() -> None:
    """The steps of compiled operations are methods of BlockOps, too."""
    rows = [*DENSE_KERNELS.values(), *RAINFUSION.values(), FP8, *SMALL_OPS.values()]
    texts = [text for row in rows for text in row.factories.values()]
    texts += FP8.quantizers.values()
    assert all(callable(resolve_name(text)) for text in texts if ":" in text)
    for steps in STEPS_BY_OP.values():
        assert all(callable(getattr(BlockOps, step)) for step in steps)


ON_CPU = [
    name
    for name, row in DENSE_KERNELS.items()
    if "cpu" in row.factories and row.xfuser_member is None
]


def test_every_dense_kernel_of_cpus_computes_the_formula() -> None:
    """Those of xfuser are compared in tests/xfuser, those of NPUs in tests/npu_sim."""
    for name, precision, head in product(ON_CPU, ("fp32", "bf16"), (6, 64, 128)):
        row, dtype = DENSE_KERNELS[name], DTYPES[precision]
        if precision not in row.precisions:
            continue
        kernel = make_dense_kernel(Attention(attention_backend=name), Target(CPU, head, dtype))
        assert kernel.can_return_lse == row.has_lse
        near = {"atol": 2e-6, "rtol": 1e-5} if precision == "fp32" else {"atol": 2e-2, "rtol": 2e-2}
        for rows, keys in ((19, 33), (130, 257)):
            q, k, v = (x.to(dtype) for x in qkv(head, rows, keys))
            expected, logsum = attend_by_definition(*(x.transpose(1, 2) for x in (q, k, v)))
            output = kernel(q, k, v)
            assert output.dtype == dtype
            assert_close(output.transpose(1, 2).double(), expected, **near)
            if row.has_lse:
                output, lse = kernel.with_lse(q, k, v)
                assert output.dtype == dtype and lse.dtype == torch.float32
                assert_close(output.transpose(1, 2).double(), expected, **near)
                assert_close(lse.double(), logsum, **near)


def test_every_method_of_cpus_computes_the_formula() -> None:
    """FP8 up to its rounding; block-sparse attention of sparsity 0 exactly."""
    for name in ("fp8", *(name for name, row in RAINFUSION.items() if row.factories)):
        settings = {"rainfusion_type": name, "sparsity": 0.0}
        settings = {"fa_quant": "fp8"} if name == "fp8" else settings
        attention = Attention(**settings, use_rainfusion=name != "fp8", sparse_start_step=0)
        (method,) = select_kernels(attention, F32_ON_CPU, {}).backends
        q, k, v = qkv(64, 300, 300)
        step = StepInfo(0, 4, "cond", "dit", (3, 10, 10), 300, layer=0)
        output = method.prepare_kv(*map(AttentionInput, (q, k, v)), step)(AttentionInput(q), 0)
        expected, _ = attend_by_definition(*(x.transpose(1, 2) for x in (q, k, v)))
        error = (output.transpose(1, 2).double() - expected).norm() / expected.norm()
        assert error < (0.1 if name == "fp8" else 1e-5), name


def test_a_backend_in_a_plan() -> None:
    """Without a GPU and without xfuser: unknown properties are described as assumed."""
    for name, row in DENSE_KERNELS.items():
        if "cuda" not in row.factories:
            continue
        target = Target(CUDA, 64, torch.bfloat16, operators.load_operator)
        selected = select_kernels(Attention(attention_backend=name), target, {})
        assert selected.dense_kernel.can_return_lse == row.has_lse, name
        assert selected.cross_attention_kernel.name == "PyTorch SDPA on cuda"
        assumed = f"assumed {'with' if row.has_lse else 'without'} log-sum-exp)"
        assert (assumed in selected.describe()) == (row.xfuser_member is not None), name
        out, lse = selected.dense_kernel.with_lse(*(x.to("meta", torch.bfloat16) for x in qkv(64)))
        assert out.shape == (2, 19, 3, 64) and lse.shape == (2, 3, 19), name


def test_only_named_operations_are_compiled_for_small_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda op, **_: compiled.append(op) or op)
    for name in ("auto", "gelu"):
        run = select_kernels(Attention(fused_ops=(name,)), F32_ON_CPU, {}).compiled_ops
        assert run is not None
        with torch.no_grad():
            BlockOps(run_op=run).gelu(torch.zeros(1, 4, 8))
        assert bool(compiled) == (name == "gelu")


def test_gelu_is_a_part_of_products_unless_another_operation_is_named() -> None:
    chosen = {("auto",): True, ("gelu",): True, ("add_norm",): False, (): False}
    for names, expected in chosen.items():
        assert select_kernels(Attention(fused_ops=names), F32_ON_CPU, {}).fuses_gelu is expected
    assert not select_kernels(Attention(), F32_ON_CPU, {}, compile_blocks=True).fuses_gelu


def test_backends_on_a_cpu() -> None:
    """PyTorch's; xfuser's are refused where it is not installed, and kernels of NPUs always."""
    for name in ("auto", "sdpa"):
        kernel = make_dense_kernel(Attention(attention_backend=name), F32_ON_CPU)
        assert kernel.name == SDPA and kernel.can_return_lse
    math = Attention(attention_backend="sdpa_math")
    messages = {"xfuser": get_refusal(make_dense_kernel, math, F32_ON_CPU)}
    check_refusals("kernels: backends", messages)
    with pytest.raises(ValueError, match=r"no kernel 'laser' on this device \(CPU\)"):
        select_kernels(Attention(attention_backend="laser"), F32_ON_CPU, {})
