"""Table of the kernels that flags can select. Does not import torch.

A row names the flag value, the supported devices and limits of a kernel, and its factory as
"module:name", which is called with a `wan.kernels.base.Target`. The parser, `--help`, refusals,
`--plan`, records and tests use these rows; a new kernel is a new file and a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wan.settings.numerics import LASER_HEAD, LASER_ROWS

NPUS = ("A2", "A3", "A5")
_BOTH = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A kernel that a flag selects by name.

    Attributes:
        name: Value of the flag.
        factories: Device type -> factory, as "module:name".
        chips: NPU models with this kernel, where `factories` has one for "npu".
    """

    name: str
    make: Mapping[str, str]
    chips: tuple[str, ...] = NPUS


@dataclass(frozen=True, kw_only=True)
class Dense(KernelRow):
    """A kernel of dense attention.

    Attributes:
        flag: attention_algo for kernels of NPUs, attention_backend for kernels of CPUs and GPUs.
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

    flag: str = "attention_backend"
    has_lse: bool = True
    precisions: tuple[str, ...] = _BOTH
    min_rows: int = 1
    max_head: int | None = None
    low_precision: bool = False
    strided: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    member: str | None = None
    modules: tuple[str, ...] = ()
    install: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """The setting that selects this kernel, in backticks."""
        return f"`{self.flag}={self.name}`"


def _xfuser(member: str, *devices: str, **other: object) -> Dense:
    """Makes the row of a dense kernel in xfuser's registry that needs only q, k and v."""
    make = dict.fromkeys(devices or ("cuda",), "wan.kernels.xfuser:build_xfuser_kernel")
    usual: dict[str, object] = {"precisions": ("bf16",)}
    return Dense(name=member.lower(), make=make, member=member, **usual | other)  # type: ignore[arg-type]


def _aiter(member: str, **other: object) -> Dense:
    """Makes the row of a kernel for AMD's GPUs; only AITER itself returns the log-sum-exp."""
    package = {"modules": ("aiter",), "install": ("amd-aiter",)}
    return _xfuser(member, has_lse=member == "AITER", **package, **other)


_SDPA = "wan.kernels.sdpa:SdpaKernel"
_FLASH_3 = {"modules": ("flash_attn_interface",), "install": ("flash-attn-3",)}
_FLASH_4 = {"modules": ("flash_attn.cute",), "install": ("flash-attn-4",)}
_FP4 = {
    "modules": ("flash_attn.cute", "flashinfer"),
    "install": ("flash-attn-4", "flashinfer-python"),
}
_LOW = {"low_precision": True}
_DENSE = (
    Dense(
        name="fused",
        flag="attention_algo",
        make={
            "cpu": _SDPA,
            "cuda": "wan.kernels.sdpa:make_cuda_kernel",
            "npu": "wan.kernels.npu.dense:FusedKernel",
        },
        strided=("cpu", "cuda"),
        fused=("cpu",),
    ),
    Dense(
        name="laser",
        flag="attention_algo",
        make={"npu": "wan.kernels.npu.dense:LaserKernel"},
        chips=("A2", "A3"),  # on others, and with fewer rows, mindiesd silently uses another
        has_lse=False,
        precisions=("bf16",),
        min_rows=LASER_ROWS,
        max_head=LASER_HEAD,
    ),
    Dense(
        name="sdpa",
        make={"cpu": _SDPA, "cuda": "wan.kernels.sdpa:make_cuda_sdpa_kernel", "npu": _SDPA},
        strided=("cpu", "cuda"),
        fused=("cpu",),
    ),
    Dense(name="cudnn", make={"cuda": "wan.kernels.sdpa:make_cudnn_kernel"}, precisions=("bf16",)),
    _xfuser("SDPA_FLASH", "cpu", "cuda"),
    _xfuser("SDPA_EFFICIENT", "cpu", "cuda", precisions=_BOTH),
    # The second result is the attention weights, not the log-sum-exp.
    _xfuser("SDPA_MATH", "cpu", "cuda", precisions=_BOTH, has_lse=False),
    _xfuser("FLASH", modules=("flash_attn",), install=("flash-attn",)),
    _xfuser("FLASH_3", **_FLASH_3),
    _xfuser("FLASH_3_FP8", **_FLASH_3, **_LOW),
    _xfuser("FLASH_4", **_FLASH_4),
    _xfuser("FLASH_4_FP4", **_FP4, **_LOW),
    _xfuser("SAGE", modules=("sageattention",), install=("sageattention",), **_LOW),
    _aiter("AITER"),
    _aiter("AITER_BF16"),
    _aiter("AITER_BF16FP8", **_LOW),
    _aiter("AITER_I8FP8", **_LOW),
    _aiter("AITER_FP8", **_LOW),
    _aiter("AITER_MXFP8", **_LOW),
    _aiter("AITER_F8F6", **_LOW),
    _aiter("AITER_MXFP6", **_LOW),
    _aiter("AITER_F6F4", **_LOW),
    _aiter("AITER_MXFP4", **_LOW),
    _aiter("AITER_F4F4", **_LOW),
    _aiter("AITER_FLYDSL"),
    _aiter("AITER_FLYDSL_FP8", **_LOW),
)
DENSE = {row.name: row for row in _DENSE}
"""Name -> row; the names of the two flags are disjoint."""
DEFAULT = "fused"


def dense_names(flag: str) -> tuple[str, ...]:
    """Returns the names of the dense kernels that a flag selects."""
    return tuple(row.name for row in _DENSE if row.flag == flag)


@dataclass(frozen=True, kw_only=True)
class Fp8(KernelRow):
    """A kernel of FP8 attention.

    Attributes:
        quantizers: Device type -> factory of its block quantization operator; device types without
            one quantize with plain PyTorch operations.
        head_dims: Supported channels of a head on an NPU; elsewhere any power of two.
    """

    quantise: Mapping[str, str]
    heads: tuple[int, ...]


_DEQUANTISED = "wan.kernels.fp8:DequantizedAttention"
FP8 = Fp8(
    name="fp8",
    make={
        "cpu": _DEQUANTISED,
        "cuda": _DEQUANTISED,
        "npu": "wan.kernels.npu.fp8:NpuFp8Attention",
    },
    chips=("A5",),
    quantise={"npu": "wan.kernels.npu.fp8:NpuBlockQuantizer"},
    heads=(64, 128),
)


@dataclass(frozen=True, kw_only=True)
class Sparse(KernelRow):
    """A kernel of block-sparse attention, selected by rainfusion_type.

    Attributes:
        has_fp8: Whether it also accepts FP8 tensors.
        unsupported_reason: Why it is not supported; empty for a supported kernel.
    """

    has_fp8: bool = False
    absent: str = ""


_BY_TILES, _BY_FLEX = "wan.kernels.rainfusion:ReferenceBlocks", "wan.kernels.flex:FlexBlocks"
_NPU_SPARSE = "wan.kernels.npu.block_sparse"
RAINFUSION = {
    row.name: row
    for row in (
        Sparse(name="v1", make={}, absent="on NPUs it needs torch_atb, which mindiesd dropped"),
        Sparse(
            name="v2",
            make={"cpu": _BY_TILES, "cuda": _BY_FLEX, "npu": f"{_NPU_SPARSE}:RainKernelV2"},
            chips=("A2", "A3"),  # on A5 mindiesd replaces v2 by v3
        ),
        Sparse(
            name="v3",
            make={"cpu": _BY_TILES, "cuda": _BY_FLEX, "npu": f"{_NPU_SPARSE}:RainKernelV3"},
            has_fp8=True,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class SmallOp(KernelRow):
    """A kernel for operations of a block between its matrix products, selected by fused_ops.

    On CPUs and GPUs the factory text lists methods of `wan.modules.small_ops.BlockOps` to compile;
    on NPUs it names a function that adds the vendor's kernel to `wan.kernels.base.SmallOps`.
    """


def _compiled(name: str, *steps: str) -> SmallOp:
    return SmallOp(name=name, make=dict.fromkeys(("cpu", "cuda"), " ".join(steps)))


def _vendor(name: str, chips: tuple[str, ...] = NPUS) -> SmallOp:
    return SmallOp(name=name, make={"npu": f"wan.kernels.npu.small_ops:{name}"}, chips=chips)


SMALL_OPS = {
    row.name: row
    for row in (
        _vendor("rope", ("A2", "A3")),  # documented to rotate neighboring channels
        _vendor("rms_norm"),
        _vendor("layer_norm"),
        _vendor("scale_shift"),  # must follow layer_norm, a part of which it replaces
        _compiled("modulated_norm", "_modulated_norm"),
        _compiled("norm_rope", "_norm_rope", "_rms_norm"),
        _compiled("add_norm", "_add_norm", "_add_modulated_norm", "_add"),
        _compiled("gelu", "_gelu"),
    )
}
"""Name -> row, in the order in which the vendor's kernels are added."""
