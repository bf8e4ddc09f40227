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
from wan.settings.kernels import DEFAULT, FP8, RAINFUSION, SMALL_OPS, KernelRow
from wan.settings.values import either


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
    sparse_precise: int = 0
    clock: bool = False
    compile: bool = True
    weights: tuple[str, ...] = ("W8A8_DYNAMIC",)

    def has(self, row: KernelRow) -> bool:
        """Whether the device has this kernel."""
        return self.type in row.make and (self.type != "npu" or self.name in row.chips)

    def fused(self, attention: Attention, compiled: bool) -> tuple[str, ...]:
        """Returns the small operations to run as fused kernels; --compile fuses them by itself."""
        if attention.fused_ops != ("auto",):
            return attention.fused_ops
        return () if compiled else tuple(n for n, row in SMALL_OPS.items() if self.has(row))


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
            "A5", **_NPU | {"weights": ("integer", "MX")}, socs=(260, 260), sparse_precise=4
        ),
        Capabilities("Duo", **_NPU | {"weights": ()}, socs=(200, 205), precisions=()),
    )
}
CHIPS = tuple(name for name, device in DEVICES.items() if device.type == "npu")
"""Choices of --chip."""


def of_type(device: str, soc: int | None = None) -> Capabilities:
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
    known = ", ".join(f"{name} {DEVICES[name].socs}" for name in CHIPS)
    why = f"is unknown to mindiesd (known: {known})"
    raise InputError("This NPU's SoC version", soc, why, "use `device=cpu` or one of these models")


def candidates(device: str, chip: str | None = None) -> tuple[Capabilities, ...]:
    """Returns the rows that --device and --chip may refer to."""
    if chip is not None:
        return (DEVICES[chip],)
    return tuple(row for row in DEVICES.values() if device in ("auto", row.type))


def check(
    rows: tuple[Capabilities, ...],
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
    found = [_refusal(row, attention, execution, head_dim, weights) for row in rows]
    refusals = [refusal for refusal in found if refusal is not None]
    if refusals and len(refusals) == len(rows):
        _, error = max(refusals, key=lambda refusal: refusal[0])
        raise error


def _refusal(
    row: Capabilities,
    attention: Attention,
    execution: Execution,
    head_dim: int,
    weights: tuple[str, ...],
) -> tuple[int, InputError] | None:
    """Returns the first unmet requirement as an error, after the number of requirements met."""
    precision = execution.dit_precision_on(row.type)
    here = _an(row.name)
    if precision not in row.precisions:
        having = _an(either(_names(lambda row: precision in row.precisions)))
        why = "computes in float16 only, which is not supported"
        return -1, InputError(here, None, why, f"use {having}")
    for met, wish in enumerate(_wishes(attention, execution, head_dim, weights)):
        if not wish.met(row):
            names = _names(wish.met)
            needs = f"needs {_an(either(names))}; this device is" if names else "does not work on"
            return met, InputError(wish.what, None, f"{needs} {here}", wish.instead)
        if precision not in wish.precisions:
            why = f"does not support {precision}, in which a run on {here} computes"
            remedy = f"use `precision={either(wish.precisions)}`, or {wish.instead}"
            return met + 1, InputError(wish.what, None, why, remedy)
        if wish.method and precision not in row.methods_in:
            why, remedy = "takes 16-bit tensors only on an NPU", "use `precision=bf16`"
            return met + 1, InputError(wish.what, None, why, f"{remedy}, or {wish.instead}")
    return None


@dataclass(frozen=True)
class _Wish:
    """A capability that the settings of a run need from its device.

    Attributes:
        subject: Subject of the refusal: the setting in backticks.
        is_met: Returns whether a device has the capability.
        remedy: Suggestion for a device without it.
        uses_methods_in: Whether the device's `methods_in` limit the precision.
        precisions: Precisions supported on every device.
    """

    what: str
    met: Callable[[Capabilities], bool]
    instead: str = "drop it"
    method: bool = False
    precisions: tuple[str, ...] = ("bf16", "fp32")


def _wishes(
    attention: Attention, execution: Execution, head_dim: int, weights: tuple[str, ...]
) -> Iterator[_Wish]:
    dense = attention.dense
    instead = f"use `attention_algo={DEFAULT}`"
    if dense.flag == "attention_backend":
        instead = "use `attention_backend=auto` (`attention_algo` selects the kernels of NPUs)"
    yield _Wish(dense.asked, _having(dense), instead, precisions=dense.precisions)
    if attention.fp8:
        yield _Wish("`fa_quant=fp8`", _having(FP8), method=True)
        what = f"`fa_quant=fp8` with heads of {head_dim} channels"
        yield _Wish(what, lambda row: row.type != "npu" or head_dim in FP8.heads)
    if attention.use_rainfusion:
        kinds = {f"`rainfusion_type={name}`": one for name, one in RAINFUSION.items() if one.make}
        yield _Wish("`use_rainfusion`", lambda row: any(map(row.has, kinds.values())), method=True)
        what = f"`rainfusion_type={attention.rainfusion_type}`"
        sparse = kinds.pop(what)
        yield _Wish(what, _having(sparse), f"use {either(list(kinds))}")
    for name in sorted({*attention.fused_ops} - {"auto"}):
        yield _Wish(f"`fused_ops={name}`", _having(SMALL_OPS[name]), f"leave {name} out")
    if attention.fa_freq_cap is not None:
        yield _Wish("`fa_freq_cap`", lambda row: row.clock)
    if execution.compile:
        yield _Wish("`compile`", lambda row: row.compile)
    if execution.fp8_weights == MULTIPLY:
        instead = "use an export in W8A8_MXFP8 on an A5 (`quant_dit_path`)"
        yield _Wish("`fp8_weights=multiply`", lambda row: row.type != "npu", instead)
    offload = execution.offload_model
    if offload == "cpu":
        instead = "use `offload_model=false`, which keeps all networks in host memory"
        yield _Wish("`offload_model=cpu`", lambda row: row.type != "cpu", instead)
    if weights and not isinstance(offload, bool):
        what = f"`offload_model={offload}` with `quant_dit_path`"
        # mindiesd converts quantized weights to a layout that cannot be copied block by block.
        yield _Wish(what, lambda row: row.type != "npu", "use `offload_model=true`")
    for name in weights:
        # Integers, or microscaling formats (MX): floating point with a scale for each small group.
        formats = {name, "MX" if "_MXFP" in name else "integer"}
        yield _Wish(
            f"`quant_dit_path` with {name} weights",
            lambda row, formats=formats: not formats.isdisjoint(row.weights),  # type: ignore[misc]
            "use an export in W8A8_DYNAMIC",
            method=True,
        )


def _having(kernel: KernelRow) -> Callable[[Capabilities], bool]:
    return lambda row: row.has(kernel)


def _names(met: Callable[[Capabilities], bool]) -> list[str]:
    return [name for name, row in DEVICES.items() if row.precisions and met(row)]


def _an(words: str) -> str:
    return f"{'an' if words[0] == 'A' else 'a'} {words}"
