"""How the run is carried out on its device."""

from __future__ import annotations

from dataclasses import dataclass

from wan.settings.errors import InputError

DEVICES = ("auto", "cpu", "cuda", "npu")
PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class Execution:
    """Device, number formats and memory.

    precision "auto" is bf16 on CUDA and fp32 on the CPU. convert_model_dtype stores all DiT weights
    in bf16, also those that are computed with in fp32. offload_model keeps one network at a time.
    Raises InputError for combinations that contradict each other.
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
        if self.device == "npu":
            raise InputError("--device npu is not built yet; use --device cuda or --device cpu.")
        if self.convert_model_dtype and self.precision == "fp32":
            raise InputError(
                "--convert_model_dtype stores the DiT in bf16, but --precision fp32 asks for fp32; "
                "drop one of them."
            )


@dataclass(frozen=True)
class Parallel:
    """Several processes. One process is all there is so far; every other wish is refused."""

    world_size: int = 1
    ulysses_size: int = 1
    t5_fsdp: bool = False
    dit_fsdp: bool = False

    def __post_init__(self) -> None:
        wishes = {
            f"{self.world_size} processes (torchrun)": self.world_size > 1,
            f"--ulysses_size {self.ulysses_size}": self.ulysses_size > 1,
            "--t5_fsdp": self.t5_fsdp,
            "--dit_fsdp": self.dit_fsdp,
        }
        for wish, asked in wishes.items():
            if asked:
                raise InputError(
                    f"{wish} needs several devices, and this version runs on one; start it as "
                    "`python generate.py ...` without the flag."
                )
