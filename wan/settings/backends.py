"""Dense attention kernels of GPUs that --attention_backend names: one table, no torch.

Three are PyTorch's own; the others are functions of xfuser's registry. Of that registry only what
is dense and takes nothing beside q, k and v is offered, see docs/attention_backends.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """A dense attention kernel of CPUs and GPUs that can be asked for by name.

    Attributes:
        member: Its name in xfuser's `AttentionBackendType`; None for PyTorch's own kernels.
        modules: What has to be there to be imported beside xfuser.
        install: The packages that bring these, by their names in registries and in records.
        devices: Names of `wan.settings.devices.DEVICES` that may have it.
        precisions: What it can compute with.
        low_precision: It quantises by itself, so that it needs no --fa_quant and excludes it.
        has_lse: Whether it is assumed to return the log-sum-exp where it cannot be tried (--plan).
    """

    name: str
    member: str | None = None
    modules: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("CUDA GPU",)
    precisions: tuple[str, ...] = ("bf16",)
    low_precision: bool = False
    has_lse: bool = True


def _aiter(member: str, low_precision: bool) -> Backend:
    """For AMD's GPUs; of these, only the first returns the log-sum-exp."""
    return Backend(
        member.lower(),
        member,
        ("aiter",),
        ("amd-aiter",),
        low_precision=low_precision,
        has_lse=member == "AITER",
    )


_BOTH = ("bf16", "fp32")
_AND_CPU = ("CPU", "CUDA GPU")
_EVERYWHERE = ("CPU", "CUDA GPU", "A2", "A3", "A5")
_FLASH_3 = (("flash_attn_interface",), ("flash-attn-3",))
_FLASH_4 = (("flash_attn.cute",), ("flash-attn-4",))
_FLASH_4_FP4 = (("flash_attn.cute", "flashinfer"), ("flash-attn-4", "flashinfer-python"))

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("auto", devices=_EVERYWHERE, precisions=_BOTH),
        Backend("sdpa", devices=_EVERYWHERE, precisions=_BOTH),
        Backend("cudnn"),
        Backend("sdpa_flash", "SDPA_FLASH", devices=_AND_CPU),
        Backend("sdpa_efficient", "SDPA_EFFICIENT", devices=_AND_CPU, precisions=_BOTH),
        # Its second result is the softmax's weights.
        Backend("sdpa_math", "SDPA_MATH", devices=_AND_CPU, precisions=_BOTH, has_lse=False),
        Backend("flash", "FLASH", ("flash_attn",), ("flash-attn",)),
        Backend("flash_3", "FLASH_3", *_FLASH_3),
        Backend("flash_3_fp8", "FLASH_3_FP8", *_FLASH_3, low_precision=True),
        Backend("flash_4", "FLASH_4", *_FLASH_4),
        Backend("flash_4_fp4", "FLASH_4_FP4", *_FLASH_4_FP4, low_precision=True),
        Backend("sage", "SAGE", ("sageattention",), ("sageattention",), low_precision=True),
        _aiter("AITER", False),
        _aiter("AITER_BF16", False),
        _aiter("AITER_BF16FP8", True),
        _aiter("AITER_I8FP8", True),
        _aiter("AITER_FP8", True),
        _aiter("AITER_MXFP8", True),
        _aiter("AITER_F8F6", True),
        _aiter("AITER_MXFP6", True),
        _aiter("AITER_F6F4", True),
        _aiter("AITER_MXFP4", True),
        _aiter("AITER_F4F4", True),
        _aiter("AITER_FLYDSL", False),
        _aiter("AITER_FLYDSL_FP8", True),
    )
}
