"""Table of device capabilities, and the check of a run's settings against it.

Sources for NPUs: mindiesd 3.1.0 (its device table, its operators' checks, the kernel manifests and
strings of its binaries), the operator reference of torch-npu, and the vendor's data sheets for
memory. The limits of CANN's kernels (block-sparse attention, rotary) are taken from these two
packages; none was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import MULTIPLY, Execution
from wan.settings.kernels import FP8, RAINFUSION, SMALL_OPS, KernelRow
from wan.settings.values import join_with_or


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a CPU, of a GPU, or of one generation of NPUs.

    Its kernels are listed in `wan.settings.kernels`.

    Attributes:
        type: PyTorch's device type.
        socs: Range of `torch_npu.npu.get_soc_version()`, both ends included.
        memory: Bytes of one device; None where devices of this kind differ.
        precisions: Supported values of --precision. A Duo computes in float16 only, which no run
            uses; it has a row so that the refusal names it.
        methods_in: Precisions of q, k and v that FP8 and block-sparse attention accept, and of the
            activations of quantized linear layers.
        sparse_inner_precise: `inner_precise` of block-sparse attention; an A5 accepts 4 only.
        clock: Whether --fa_freq_cap can set its clock.
        compile: Whether --compile works.
        weights: Formats of quantized linear layers: names of algorithms, or "integer" or "MX" for
            all such formats. The operators of MX formats exist on A5 only.
    """

    name: str
    type: str
    socs: tuple[int, int] | None = None
    memory: int | None = None
    precisions: tuple[str, ...] = ("bf16", "fp32")
    methods_in: tuple[str, ...] = ("bf16", "fp32")
    sparse_inner_precise: int = 0
    clock: bool = False
    compile: bool = True
    weights: tuple[str, ...] = ("W8A8_DYNAMIC",)

    def has_kernel(self, kernel: KernelRow) -> bool:
        """Whether the device has this kernel."""
        return self.type in kernel.factories and (self.type != "npu" or self.name in kernel.chips)

    def list_fused_ops(self, attention: Attention, compiled: bool) -> tuple[str, ...]:
        """Returns the small operations to run as fused kernels; --compile fuses them by itself."""
        if attention.fused_ops != ("auto",):
            return attention.fused_ops
        return () if compiled else tuple(n for n, row in SMALL_OPS.items() if self.has_kernel(row))


_NPU: dict[str, Any] = {
    "type": "npu",
    "methods_in": ("bf16",),
    "clock": True,
    "compile": False,
    "weights": ("integer",),
}
DEVICES = {
    device.name: device
    for device in (
        Capabilities("CPU", "cpu"),
        Capabilities("CUDA GPU", "cuda"),
        Capabilities("A2", **_NPU, socs=(220, 225), memory=64 * 10**9),
        Capabilities("A3", **_NPU, socs=(250, 255), memory=64 * 10**9),
        Capabilities(
            "A5", **_NPU | {"weights": ("integer", "MX")}, socs=(260, 260), sparse_inner_precise=4
        ),
        Capabilities("Duo", **_NPU | {"weights": ()}, socs=(200, 205), precisions=()),
    )
}
CHIPS = tuple(name for name, device in DEVICES.items() if device.type == "npu")
"""Choices of --chip."""


def get_capabilities(device: str, soc: int | None = None) -> Capabilities:
    """Returns the row of a PyTorch device type ("cpu", "cuda", "npu").

    Args:
        device: The device type.
        soc: `get_soc_version()` of an NPU.

    Raises:
        InputError: mindiesd does not support this NPU.
    """
    for row in DEVICES.values():
        if row.type == device and (soc is None or (row.socs and row.socs[0] <= soc <= row.socs[1])):
            return row
    known_socs = ", ".join(f"{name} {DEVICES[name].socs}" for name in CHIPS)
    why = f"is unknown to mindiesd (known: {known_socs})"
    raise InputError("This NPU's SoC version", soc, why, "use `device=cpu` or one of these models")


def list_candidate_devices(device: str, chip: str | None = None) -> tuple[Capabilities, ...]:
    """Returns the rows that --device and --chip may refer to."""
    if chip is not None:
        return (DEVICES[chip],)
    return tuple(row for row in DEVICES.values() if device in ("auto", row.type))


def check_device_support(
    devices: tuple[Capabilities, ...],
    attention: Attention,
    execution: Execution,
    head_dim: int,
    weights: tuple[str, ...] = (),
) -> None:
    """Raises InputError where none of the devices supports these settings.

    The error is that of the device that meets the most requirements.

    Args:
        devices: Rows that --device may refer to.
        attention: Attention settings.
        execution: Device and precision settings.
        head_dim: Channels of one head.
        weights: Algorithms of quantized linear layers.
    """
    results = [_find_refusal(row, attention, execution, head_dim, weights) for row in devices]
    refusals = [refusal for refusal in results if refusal is not None]
    if refusals and len(refusals) == len(devices):
        _, error = max(refusals, key=lambda refusal: refusal[0])
        raise error


def _find_refusal(
    device: Capabilities,
    attention: Attention,
    execution: Execution,
    head_dim: int,
    weights: tuple[str, ...],
) -> tuple[int, InputError] | None:
    """Returns the first unmet requirement as an error, after the number of requirements met."""
    precision = execution.get_dit_precision(device.type)
    device_name = _add_article(device.name)
    if precision not in device.precisions:
        alternatives = _add_article(
            join_with_or(_list_device_names(lambda device: precision in device.precisions))
        )
        why = "computes in float16 only, which is not supported"
        return -1, InputError(device_name, None, why, f"use {alternatives}")
    for num_met, rule in enumerate(_list_requirements(attention, execution, head_dim, weights)):
        if not rule.is_met(device):
            names = _list_device_names(rule.is_met)
            predicate = "does not work on"
            if names:
                predicate = f"needs {_add_article(join_with_or(names))}; this device is"
            return num_met, InputError(
                rule.subject, None, f"{predicate} {device_name}", rule.remedy
            )
        if precision not in rule.precisions:
            why = f"does not support {precision}, in which a run on {device_name} computes"
            remedy = f"use `precision={join_with_or(rule.precisions)}`, or {rule.remedy}"
            return num_met + 1, InputError(rule.subject, None, why, remedy)
        if rule.uses_methods_in and precision not in device.methods_in:
            why, remedy = "takes 16-bit tensors only on an NPU", "use `precision=bf16`"
            return num_met + 1, InputError(rule.subject, None, why, f"{remedy}, or {rule.remedy}")
    return None


@dataclass(frozen=True)
class _Requirement:
    """A capability that the settings of a run need from its device.

    Attributes:
        subject: Subject of the refusal: the setting in backticks.
        is_met: Returns whether a device has the capability.
        remedy: Suggestion for a device without it.
        uses_methods_in: Whether the device's `methods_in` limit the precision.
        precisions: Precisions supported on every device.
    """

    subject: str
    is_met: Callable[[Capabilities], bool]
    remedy: str = "drop it"
    uses_methods_in: bool = False
    precisions: tuple[str, ...] = ("bf16", "fp32")


def _list_requirements(
    attention: Attention, execution: Execution, head_dim: int, weights: tuple[str, ...]
) -> Iterator[_Requirement]:
    dense = attention.dense_kernel
    remedy = "use `attention_backend=auto`"
    yield _Requirement(
        dense.setting, _make_kernel_check(dense), remedy, precisions=dense.precisions
    )
    if attention.fp8:
        yield _Requirement("`fa_quant=fp8`", _make_kernel_check(FP8), uses_methods_in=True)
        subject = f"`fa_quant=fp8` with heads of {head_dim} channels"
        yield _Requirement(
            subject, lambda device: device.type != "npu" or head_dim in FP8.head_dims
        )
    if attention.use_rainfusion:
        kernels = {name: kernel for name, kernel in RAINFUSION.items() if kernel.factories}
        kernels_by_setting = {f"`rainfusion_type={name}`": k for name, k in kernels.items()}
        yield _Requirement(
            "`use_rainfusion`",
            lambda device: any(map(device.has_kernel, kernels_by_setting.values())),
            uses_methods_in=True,
        )
        subject = f"`rainfusion_type={attention.rainfusion_type}`"
        sparse = kernels_by_setting.pop(subject)
        yield _Requirement(
            subject, _make_kernel_check(sparse), f"use {join_with_or(list(kernels_by_setting))}"
        )
    for name in sorted({*attention.fused_ops} - {"auto"}):
        yield _Requirement(
            f"`fused_ops={name}`", _make_kernel_check(SMALL_OPS[name]), f"leave {name} out"
        )
    if attention.fa_freq_cap is not None:
        yield _Requirement("`fa_freq_cap`", lambda device: device.clock)
    if execution.compile:
        yield _Requirement("`compile`", lambda device: device.compile)
    if execution.stored_weights == MULTIPLY:
        remedy = "use an export in W8A8_MXFP8 on an A5 (`quant_dit_path`)"
        yield _Requirement("`stored_weights=multiply`", lambda device: device.type != "npu", remedy)
    offload = execution.offload_model
    if offload == "cpu":
        remedy = "use `offload_model=false`, which keeps all networks in host memory"
        yield _Requirement("`offload_model=cpu`", lambda device: device.type != "cpu", remedy)
    if weights and not isinstance(offload, bool):
        subject = f"`offload_model={offload}` with `quant_dit_path`"
        # mindiesd converts quantized weights to a layout that cannot be copied block by block.
        yield _Requirement(subject, lambda device: device.type != "npu", "use `offload_model=true`")
    for name in weights:
        # Integers, or microscaling formats (MX): floating point with a scale for each small group.
        formats = {name, "MX" if "_MXFP" in name else "integer"}
        yield _Requirement(
            f"`quant_dit_path` with {name} weights",
            lambda device, formats=formats: not formats.isdisjoint(device.weights),  # type: ignore[misc]
            "use an export in W8A8_DYNAMIC",
            uses_methods_in=True,
        )


def _make_kernel_check(kernel: KernelRow) -> Callable[[Capabilities], bool]:
    return lambda device: device.has_kernel(kernel)


def _list_device_names(is_supported: Callable[[Capabilities], bool]) -> list[str]:
    return [name for name, device in DEVICES.items() if device.precisions and is_supported(device)]


def _add_article(noun: str) -> str:
    return f"{'an' if noun[0] == 'A' else 'a'} {noun}"
