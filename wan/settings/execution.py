"""How the run is carried out on its device."""

from __future__ import annotations

from dataclasses import dataclass

from wan.settings import values
from wan.settings.errors import InputError

DEVICES = ("auto", "cpu", "cuda", "npu")
PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class Execution:
    """Device, number formats and memory.

    precision "auto" is bf16 on CUDA and NPUs, fp32 on the CPU. convert_model_dtype stores all DiT
    weights in bf16, also those that are computed with in fp32. offload_model keeps one network at
    a time.
    Raises InputError for unknown words and for combinations that contradict each other.
    """

    device: str = "auto"
    precision: str = "auto"
    convert_model_dtype: bool = False
    offload_model: bool = True
    t5_cpu: bool = False
    text_kv_cache: bool = True
    compile: bool = False
    vae_tiling: bool = False

    def __post_init__(self) -> None:
        values.choice(*DEVICES)("device", self.device)
        values.choice(*PRECISIONS)("precision", self.precision)
        if self.convert_model_dtype and self.precision == "fp32":
            raise InputError(
                "--convert_model_dtype stores the DiT in bf16, but --precision fp32 asks for fp32; "
                "drop one of them."
            )
