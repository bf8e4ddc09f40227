"""Ascend chips and what each can do. A run that asks for more is refused by name.

Sources: mindiesd 3.1.0 (its device table, its operators' own checks, the kernel manifests and
strings of its binaries) and the operator reference of torch-npu. Facts about kernels that CANN
itself brings (block-sparse attention, rotary) are those two packages' word; none was measured.

What only a known device can refuse; flags alone cannot tell while --device is auto.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan.checkpoint.quantised import QuantisedDit, check_device
from wan.settings import devices as chips
from wan.settings.attention import Attention, npu_flag
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.numerics import LASER_HEAD

FP8_HEAD_DIMS = (64, 128)  # the FP8 attention kernel names no others


@dataclass(frozen=True)
class Chip:
    """One generation of chips.

    socs: values of `torch_npu.npu.get_soc_version()`, both ends included; mindiesd's device table.
    precisions: values of --precision it computes in. A Duo knows float16 only, in which no run is:
    it is in the table to be refused by name.
    laser: ascend_laser_attention runs; on A5 mindiesd silently takes fused_attn_score instead.
    fp8: the FP8 attention kernels (fused_infer_attention_score_v2, block-sparse attention with
    dequantising scales); shipped for A5 only.
    rainfusion: types of --rainfusion_type that run as asked; on A5 mindiesd turns v2 into v3.
    sparse_precise: `inner_precise` of block-sparse attention; A5 takes 4 only.
    weights: families of quantised linear layers, see `_family`; the operators that make MX numbers
    (npu_dynamic_mx_quant, npu_dynamic_dual_level_mx_quant) exist on A5 only.
    """

    name: str
    socs: tuple[int, int]
    precisions: tuple[str, ...] = ("bf16", "fp32")
    laser: bool = False
    fp8: bool = False
    rainfusion: tuple[str, ...] = ()
    sparse_precise: int = 0
    weights: tuple[str, ...] = ("integer",)


CHIPS = (
    Chip("A2", (220, 225), laser=True, rainfusion=("v2", "v3")),
    Chip("A3", (250, 255), laser=True, rainfusion=("v2", "v3")),
    Chip(
        "A5", (260, 260), fp8=True, rainfusion=("v3",), sparse_precise=4, weights=("integer", "MX")
    ),
    Chip("Duo", (200, 205), precisions=(), weights=()),
)


def of_soc(soc: int) -> Chip:
    """The chip of a `get_soc_version()`. InputError for one that mindiesd does not know."""
    for chip in CHIPS:
        if chip.socs[0] <= soc <= chip.socs[1]:
            return chip
    known = ", ".join(f"{chip.name} {chip.socs[0]}-{chip.socs[1]}" for chip in CHIPS)
    raise InputError(
        f"This NPU's SoC version {soc} is unknown to mindiesd (known: {known}); use --device cpu "
        "or one of these chips."
    )


def by_name(name: str) -> Chip:
    """The chip of that name. InputError for any other."""
    for chip in CHIPS:
        if chip.name == name:
            return chip
    names = ", ".join(chip.name for chip in CHIPS)
    raise InputError(f"There is no chip {name!r}; use one of {names}.")


def refusal(
    chip: Chip,
    attention: Attention,
    head_dim: int,
    precision: str,
    weights: tuple[str, ...] = (),
) -> str | None:
    """Why this chip cannot run such a DiT, in one sentence with what to use; None if it can.

    head_dim: channels of one head. precision: "bf16" or "fp32", in which q, k and v arrive.
    weights: algorithms of quantised linear layers.
    """
    return (
        _precision(chip, precision)
        or _laser(chip, attention, head_dim, precision)
        or _fp8(chip, attention, head_dim, precision)
        or _rainfusion(chip, attention, precision)
        or _weights(chip, weights)
    )


def _having(**wanted: object) -> str:
    """Names of the chips with such a field, as one says them: "an A2 or A3"."""
    (field, value), *_ = wanted.items()
    found = [
        chip.name
        for chip in CHIPS
        if getattr(chip, field) is value
        or (isinstance(getattr(chip, field), tuple) and value in getattr(chip, field))
    ]
    return "an " + " or ".join(found)


def _precision(chip: Chip, precision: str) -> str | None:
    if precision in chip.precisions:
        return None
    return (
        f"A {chip.name} computes in float16 only, and there is no --precision for that: use "
        f"{_having(precisions=precision)}."
    )


def _laser(chip: Chip, attention: Attention, head_dim: int, precision: str) -> str | None:
    flag = "--attention_algo laser"
    if attention.algorithm != "laser":
        return None
    if not chip.laser:
        return (
            f"{flag} needs {_having(laser=True)}; this is an {chip.name}, which has no such "
            "kernel: use --attention_algo fused."
        )
    if head_dim > LASER_HEAD:
        return (
            f"{flag} takes heads of at most {LASER_HEAD} channels, not {head_dim}: use "
            "--attention_algo fused."
        )
    if precision == "fp32":
        return (
            f"{flag} computes in float16 and takes no float32: use --precision bf16 or "
            "--attention_algo fused."
        )
    return None


def _fp8(chip: Chip, attention: Attention, head_dim: int, precision: str) -> str | None:
    flag = f"--fa_quant {attention.fa_quant}"
    if attention.fa_quant is None:
        return None
    if not chip.fp8:
        return (
            f"{flag} needs {_having(fp8=True)}; this is an {chip.name}, which has no FP8 "
            "attention kernel: drop the flag."
        )
    if head_dim not in FP8_HEAD_DIMS:
        sizes = " or ".join(str(size) for size in FP8_HEAD_DIMS)
        return f"{flag} takes heads of {sizes} channels, not {head_dim}: drop the flag."
    if precision == "fp32":
        return f"{flag} quantises 16-bit numbers only on an NPU: use --precision bf16."
    return None


def _rainfusion(chip: Chip, attention: Attention, precision: str) -> str | None:
    if attention.rainfusion is None:
        return None
    wished = attention.rainfusion.type
    flag = f"--rainfusion_type {wished}"
    if wished == "v1":
        return f"{flag} needs torch_atb, which mindiesd has given up: use v2 or v3."
    if not chip.rainfusion:
        return (
            f"--use_rainfusion needs {_having(rainfusion='v3')}; this is an {chip.name}, which "
            "has no block-sparse attention: drop the flag."
        )
    if wished not in chip.rainfusion:
        return (
            f"{flag} needs {_having(rainfusion=wished)}; on an {chip.name} mindiesd would "
            f"silently run v3 instead: use --rainfusion_type {chip.rainfusion[0]}."
        )
    if precision == "fp32":
        return "--use_rainfusion takes 16-bit numbers only on an NPU: use --precision bf16."
    return None


def _weights(chip: Chip, algorithms: tuple[str, ...]) -> str | None:
    for algorithm in algorithms:
        if _family(algorithm) not in chip.weights:
            return (
                f"--quant_dit_path holds {algorithm} weights, which need "
                f"{_having(weights=_family(algorithm))}; this is an {chip.name}, which has no "
                "operators for them: use an export in W8A8_DYNAMIC."
            )
    return None


def _family(algorithm: str) -> str:
    """Of a linear layer's numbers: integers, or floating point with scales per small group (MX)."""
    return "MX" if "_MXFP" in algorithm else "integer"


def check(
    execution: Execution,
    attention: Attention,
    quantised: QuantisedDit | None,
    head_dim: int,
    device: str,
    chip: Chip | None,
) -> None:
    """device: its type, "cpu", "cuda" or "npu". chip: which NPU, None where it is not known yet.

    Raises InputError.
    """
    if device == "npu" and execution.compile:
        raise InputError("--compile is not built for NPUs; drop it.")
    precision = _computes_in(execution, device)
    if quantised is not None:
        check_device(quantised, device)
        if device == "npu" and precision == "fp32":
            raise InputError(
                "--quant_dit_path computes in 16 bits on NPUs, but --precision fp32 asks for 32; "
                "drop one of them."
            )
    if chip is not None:
        weights = () if quantised is None else quantised.algorithms
        refusal = chips.refusal(chip, attention, head_dim, precision, weights)
        if refusal is not None:
            raise InputError(refusal)
    flag = npu_flag(attention)
    if flag is not None and device != "npu":
        raise InputError(f"{flag} exists on NPUs only, and this device is a {device}; drop it.")


def _computes_in(execution: Execution, device: str) -> str:
    """In what the DiT's blocks compute."""
    if execution.convert_model_dtype:
        return "bf16"
    if execution.precision == "auto":
        return "fp32" if device == "cpu" else "bf16"
    return execution.precision
