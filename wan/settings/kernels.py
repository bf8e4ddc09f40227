"""Table of the kernels that flags can select. Does not import torch.

A row names the flag value, the supported devices and limits of a kernel, and its factory as
"module:name", which is called with a `wan.kernels.interfaces.Target`. The parser, `--help`,
refusals, `--plan`, records and tests use these rows; a new kernel is a new file and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wan.settings.numerics import LASER_HEAD, LASER_ROWS

NPUS = ("A2", "A3", "A5")
_BF16_FP32 = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A kernel that a flag selects by name.

    Attributes:
        name: Value of the flag.
        factories: Device type -> factory, as "module:name".
        chips: NPU models with this kernel, where `factories` has one for "npu".
    """

    name: str
    factories: Mapping[str, str]
    chips: tuple[str, ...] = NPUS


@dataclass(frozen=True, kw_only=True)
class DenseKernelRow(KernelRow):
    """A kernel of dense attention.

    Attributes:
        has_lse: Whether it returns the log-sum-exp, without which a ring gathers keys and values.
            For xfuser's kernels the value is an assumption of `--plan`; a run tries them.
        precisions: Supported values of `--precision`.
        min_rows: Smallest number of queries and keys of a call.
        max_head_dim: Largest number of channels of a head.
        low_precision: Whether it quantizes its inputs by itself.
        strided_devices: Device types on which it accepts strided tensors; on others the result of
            a fused exchange is copied into contiguous tensors.
        fused_exchange_devices: Device types on which one fused exchange of q, k and v was measured
            to be no slower than three.
        xfuser_member: Name in xfuser's `AttentionBackendType`; None for kernels without xfuser.
        modules: Modules that must be importable in addition to xfuser.
        install: PyPI packages that contain these modules.
    """

    has_lse: bool = True
    precisions: tuple[str, ...] = _BF16_FP32
    min_rows: int = 1
    max_head_dim: int | None = None
    low_precision: bool = False
    strided_devices: tuple[str, ...] = ()
    fused_exchange_devices: tuple[str, ...] = ()
    xfuser_member: str | None = None
    modules: tuple[str, ...] = ()
    install: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """The setting that selects this kernel, in backticks."""
        return f"`attention_backend={self.name}`"


def _make_xfuser_kernel(member: str, *devices: str, **attributes: object) -> DenseKernelRow:
    """Makes the row of a dense kernel in xfuser's registry that needs only q, k and v."""
    factories = dict.fromkeys(devices or ("cuda",), "wan.kernels.xfuser:build_xfuser_kernel")
    defaults: dict[str, object] = {"precisions": ("bf16",)}
    return DenseKernelRow(
        name=member.lower(),
        factories=factories,
        xfuser_member=member,
        **defaults | attributes,  # type: ignore[arg-type]
    )


def _make_aiter_kernel(member: str, **attributes: object) -> DenseKernelRow:
    """Makes the row of a kernel for AMD's GPUs; only AITER itself returns the log-sum-exp."""
    package = {"modules": ("aiter",), "install": ("amd-aiter",)}
    return _make_xfuser_kernel(member, has_lse=member == "AITER", **package, **attributes)


_SDPA = "wan.kernels.sdpa:SdpaKernel"
_FLASH_3 = {"modules": ("flash_attn_interface",), "install": ("flash-attn-3",)}
_FLASH_4 = {"modules": ("flash_attn.cute",), "install": ("flash-attn-4",)}
_FP4 = {
    "modules": ("flash_attn.cute", "flashinfer"),
    "install": ("flash-attn-4", "flashinfer-python"),
}
_LOW_PRECISION = {"low_precision": True}
_DENSE_ROWS = (
    DenseKernelRow(
        name="fused",
        factories={
            "cpu": "wan.kernels.avx512_attention:make_cpu_kernel",
            "cuda": "wan.kernels.sdpa:make_cuda_kernel",
            "npu": "wan.kernels.npu.dense:FusedKernel",
        },
        strided_devices=("cpu", "cuda"),
        fused_exchange_devices=("cpu",),
    ),
    DenseKernelRow(
        name="laser",
        factories={"npu": "wan.kernels.npu.dense:LaserKernel"},
        chips=("A2", "A3"),  # on others, and with fewer rows, mindiesd silently uses another
        has_lse=False,
        precisions=("bf16",),
        min_rows=LASER_ROWS,
        max_head_dim=LASER_HEAD,
    ),
    DenseKernelRow(
        name="sdpa",
        factories={"cpu": _SDPA, "cuda": "wan.kernels.sdpa:make_cuda_sdpa_kernel", "npu": _SDPA},
        strided_devices=("cpu", "cuda"),
        fused_exchange_devices=("cpu",),
    ),
    DenseKernelRow(
        name="cudnn", factories={"cuda": "wan.kernels.sdpa:make_cudnn_kernel"}, precisions=("bf16",)
    ),
    _make_xfuser_kernel("SDPA_FLASH", "cpu", "cuda"),
    _make_xfuser_kernel("SDPA_EFFICIENT", "cpu", "cuda", precisions=_BF16_FP32),
    # The second result is the attention weights, not the log-sum-exp.
    _make_xfuser_kernel("SDPA_MATH", "cpu", "cuda", precisions=_BF16_FP32, has_lse=False),
    _make_xfuser_kernel("FLASH", modules=("flash_attn",), install=("flash-attn",)),
    _make_xfuser_kernel("FLASH_3", **_FLASH_3),
    _make_xfuser_kernel("FLASH_3_FP8", **_FLASH_3, **_LOW_PRECISION),
    _make_xfuser_kernel("FLASH_4", **_FLASH_4),
    _make_xfuser_kernel("FLASH_4_FP4", **_FP4, **_LOW_PRECISION),
    _make_xfuser_kernel(
        "SAGE", modules=("sageattention",), install=("sageattention",), **_LOW_PRECISION
    ),
    _make_aiter_kernel("AITER"),
    _make_aiter_kernel("AITER_BF16"),
    _make_aiter_kernel("AITER_BF16FP8", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_I8FP8", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_FP8", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_MXFP8", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_F8F6", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_MXFP6", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_F6F4", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_MXFP4", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_F4F4", **_LOW_PRECISION),
    _make_aiter_kernel("AITER_FLYDSL"),
    _make_aiter_kernel("AITER_FLYDSL_FP8", **_LOW_PRECISION),
)
DENSE_KERNELS = {row.name: row for row in _DENSE_ROWS}
"""Name -> row."""
DEFAULT_KERNEL = "fused"


@dataclass(frozen=True, kw_only=True)
class Fp8KernelRow(KernelRow):
    """A kernel of FP8 attention.

    Attributes:
        quantizers: Device type -> factory of its block quantization operator; device types without
            one quantize with plain PyTorch operations.
        head_dims: Supported channels of a head on an NPU; elsewhere any power of two.
    """

    quantizers: Mapping[str, str]
    head_dims: tuple[int, ...]


_DEQUANTIZED = "wan.kernels.fp8:DequantizedAttention"
FP8 = Fp8KernelRow(
    name="fp8",
    factories={
        "cpu": _DEQUANTIZED,
        "cuda": _DEQUANTIZED,
        "npu": "wan.kernels.npu.fp8:NpuFp8Attention",
    },
    chips=("A5",),
    quantizers={"npu": "wan.kernels.npu.fp8:NpuBlockQuantizer"},
    head_dims=(64, 128),
)


@dataclass(frozen=True, kw_only=True)
class SparseKernelRow(KernelRow):
    """A kernel of block-sparse attention, selected by rainfusion_type.

    Attributes:
        has_fp8: Whether it also accepts FP8 tensors.
        unsupported_reason: Why it is not supported; empty for a supported kernel.
    """

    has_fp8: bool = False
    unsupported_reason: str = ""


_BY_TILES = "wan.kernels.rainfusion:ReferenceBlockSparseKernel"
_BY_FLEX = "wan.kernels.flex:FlexBlocks"
_NPU_SPARSE = "wan.kernels.npu.block_sparse"
RAINFUSION = {
    row.name: row
    for row in (
        SparseKernelRow(
            name="v1",
            factories={},
            unsupported_reason="on NPUs it needs torch_atb, which mindiesd dropped",
        ),
        SparseKernelRow(
            name="v2",
            factories={"cpu": _BY_TILES, "cuda": _BY_FLEX, "npu": f"{_NPU_SPARSE}:RainKernelV2"},
            chips=("A2", "A3"),  # on A5 mindiesd replaces v2 by v3
        ),
        SparseKernelRow(
            name="v3",
            factories={"cpu": _BY_TILES, "cuda": _BY_FLEX, "npu": f"{_NPU_SPARSE}:RainKernelV3"},
            has_fp8=True,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class SmallOpRow(KernelRow):
    """A kernel for operations of a block between its matrix products, selected by fused_ops.

    On CPUs and GPUs the factory text lists methods of `wan.modules.fused_ops.BlockOps` to compile;
    on NPUs it names a function that adds the vendor's kernel to `wan.kernels.interfaces.SmallOps`.
    """


def _make_compiled_op(name: str, *steps: str) -> SmallOpRow:
    return SmallOpRow(name=name, factories=dict.fromkeys(("cpu", "cuda"), " ".join(steps)))


def _make_vendor_op(name: str, chips: tuple[str, ...] = NPUS) -> SmallOpRow:
    return SmallOpRow(
        name=name, factories={"npu": f"wan.kernels.npu.small_ops:{name}"}, chips=chips
    )


SMALL_OPS = {
    row.name: row
    for row in (
        _make_vendor_op("rope", ("A2", "A3")),  # documented to rotate neighboring channels
        _make_vendor_op("rms_norm"),
        _make_vendor_op("layer_norm"),
        _make_vendor_op("scale_shift"),  # must follow layer_norm, a part of which it replaces
        _make_compiled_op("modulated_norm", "_modulated_norm"),
        _make_compiled_op("norm_rope", "_norm_rope", "_rms_norm"),
        _make_compiled_op("add_norm", "_add_norm", "_add_modulated_norm", "_add"),
        _make_compiled_op("gelu", "_gelu"),
    )
}
"""Name -> row, in the order in which the vendor's kernels are added."""
