"""How the run is carried out on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wan.settings.fields import layout, loading, option
from wan.settings.values import choice, integer, switch, switch_or

DEVICE_TYPES = ("auto", "cpu", "cuda", "npu")
PRECISIONS = ("auto", "bf16", "fp32")
AHEAD = 64  # of many videos, those whose texts are embedded together, and which are grouped
VAE_PRECISIONS = ("fp32", "bf16")
KEPT_WEIGHTS = ("auto", "keep", "upcast")
MULTIPLY = "multiply"  # kept, and products run in FP8
Offload = bool | Literal["cpu", "block"]
"""True: one network in memory at a time, read again when it is needed again; False: all that were
needed; "cpu": all, in host memory, and one of them on the accelerator; "block": as True, and of a
DiT or the text encoder only some blocks are on the device."""
OFFLOAD = switch_or("cpu", "block")


def buffers(device: str) -> int:
    """Blocks that come and go: one on the CPU, and on others the next one beside it."""
    return 1 if device == "cpu" else 2


@dataclass(frozen=True)
class Execution:
    """Device, dtypes and memory."""

    device: str = loading(
        "auto", choice(*DEVICE_TYPES), "default auto", decoding=True, diffusers=True
    )
    precision: str = loading(
        "auto",
        choice(*PRECISIONS),
        "auto (default): bf16, on the CPU fp32",
        diffusers="torch_dtype",
    )
    convert_model_dtype: bool = loading(False, switch, "store all DiT weights in bf16")
    fp8_weights: str = loading(
        "auto", choice(*KEPT_WEIGHTS, MULTIPLY), "an FP8 checkpoint stays FP8, or not (auto)"
    )
    gguf_weights: str = loading(
        "auto", choice(*KEPT_WEIGHTS), "GGUF weights stay as stored, or not (auto)"
    )
    offload_model: Offload = option(
        True,
        OFFLOAD,
        "true (default): one network in memory at a time",
        line=False,
        decoding=True,
        common=True,
    )
    resident_blocks: int | None = layout(
        None, integer(0, 1000), "blocks that --offload_model block keeps"
    )
    t5_cpu: bool = loading(
        False,
        switch,
        "run the text encoder on the CPU",
        variables={"T5_LOAD_CPU": {"0": False, "1": True}},
    )
    text_kv_cache: bool = loading(True, switch, "keep the text's keys and values (default true)")
    compile: bool = loading(False, switch, "compile the transformer blocks")
    vae_tiling: bool = loading(
        False, switch, "decode in tiles: less memory, not exact", decoding=True
    )
    vae_parallel: bool = layout(
        False, switch, "encode and decode on all ranks, exactly", decoding=True, common=True
    )
    overlap_decoding: bool = layout(
        False, switch, "decode a clip of a chain of latents while the next one is denoised"
    )
    vae_precision: str = loading(
        "fp32", choice(*VAE_PRECISIONS), "fp32 (default) or bf16", decoding=True
    )

    def blocks_held(self, layers: int, device: str) -> int:
        """Of so many blocks of a DiT, how many a device of this type holds at least."""
        moving = layers - (self.resident_blocks or 0)
        if self.offload_model != "block" or moving <= buffers(device):
            return layers
        return layers - moving + buffers(device)

    def precision_on(self, device: str) -> str:
        """What "auto" is on a device of this type ("cpu", "cuda" or "npu"): "bf16" or "fp32"."""
        if self.precision == "auto":
            return "fp32" if device == "cpu" else "bf16"
        return self.precision

    def dit_precision_on(self, device: str) -> str:
        """What the DiT's matrix products run in: that of its weights, which may be converted."""
        return "bf16" if self.convert_model_dtype else self.precision_on(device)
