"""What only a known device can refuse; flags alone cannot tell while --device is auto."""

from __future__ import annotations

from wan.settings import chips
from wan.settings.attention import Attention, npu_flag
from wan.settings.chips import Chip
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.quantised import QuantisedDit, check_device


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
    precision = _precision(execution, device)
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


def _precision(execution: Execution, device: str) -> str:
    """In what the DiT's blocks compute."""
    if execution.convert_model_dtype:
        return "bf16"
    if execution.precision == "auto":
        return "fp32" if device == "cpu" else "bf16"
    return execution.precision
