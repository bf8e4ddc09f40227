"""Settings of the device: precision, offload, compilation, VAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wan.settings.fields import layout, loading, option
from wan.settings.values import choice, integer, switch, switch_or

DEVICE_TYPES = ("auto", "cpu", "cuda", "npu")
PRECISIONS = ("auto", "bf16", "fp32")
AHEAD = 64  # videos of a prompt file that are encoded and grouped by expert together
VAE_PRECISIONS = ("fp32", "bf16")
KEPT_WEIGHTS = ("auto", "keep", "upcast")
MULTIPLY = "multiply"  # weights stay in FP8, and matrix products run in FP8
Offload = bool | Literal["cpu", "block"]
"""True: one network in memory at a time, loaded from its file for each use; False: networks stay on
the device after their first use; "cpu": all networks in host memory, and one at a time on the
device; "block": as True, with only some blocks of the DiT or text encoder on the device."""
OFFLOAD = switch_or("cpu", "block")


def buffers(device: str) -> int:
    """Returns the number of block buffers: one on a CPU, else two, to copy the next block ahead."""
    return 1 if device == "cpu" else 2


@dataclass(frozen=True)
class Execution:
    """Device, precision and memory settings."""

    device: str = loading(
        "auto",
        choice(*DEVICE_TYPES),
        "device to run on (default auto: NPU or GPU where there is one, else CPU)",
        decoding=True,
        diffusers=True,
    )
    precision: str = loading(
        "auto",
        choice(*PRECISIONS),
        "dtype of the networks (default auto: bf16, on a CPU fp32)",
        diffusers="torch_dtype",
    )
    convert_model_dtype: bool = loading(
        False, switch, "convert all DiT weights to bf16, also norms and embeddings (default false)"
    )
    fp8_weights: str = loading(
        "auto",
        choice(*KEPT_WEIGHTS, MULTIPLY),
        "weights of an FP8 checkpoint: keep: FP8 in memory; upcast: --precision; multiply: FP8 in "
        "memory and in matrix products; auto (default): keep, except on NPUs and with --dit_fsdp",
    )
    gguf_weights: str = loading(
        "auto",
        choice(*KEPT_WEIGHTS),
        "weights of a GGUF checkpoint: keep: quantized in memory; upcast: --precision; auto "
        "(default): keep, except on NPUs and with --dit_fsdp",
    )
    offload_model: Offload = option(
        True,
        OFFLOAD,
        "true (default): one network in memory at a time; false: all; cpu: all in host memory, one "
        "on the device; block: as true, with only some blocks on the device",
        line=False,
        decoding=True,
        common=True,
    )
    resident_blocks: int | None = layout(
        None,
        integer(0, 1000),
        "DiT blocks that stay on the device with --offload_model block (default: as many as fit; "
        "on a CPU 0)",
    )
    t5_cpu: bool = loading(
        False,
        switch,
        "run the text encoder on the CPU (default false)",
        variables={"T5_LOAD_CPU": {"0": False, "1": True}},
    )
    text_kv_cache: bool = loading(
        True, switch, "cache the cross-attention keys and values of the text (default true)"
    )
    compile: bool = loading(
        False, switch, "compile the DiT blocks with torch.compile (default false)"
    )
    vae_tiling: bool = loading(
        False,
        switch,
        "decode in overlapping tiles: less memory, not exact (default false)",
        decoding=True,
    )
    vae_parallel: bool = layout(
        False,
        switch,
        "run the VAE on all ranks, exact (default false)",
        decoding=True,
        common=True,
    )
    overlap_decoding: bool = layout(
        False,
        switch,
        "decode a clip while the next one is denoised (with --chain latent; default false)",
    )
    vae_precision: str = loading(
        "fp32", choice(*VAE_PRECISIONS), "dtype of the VAE (default fp32)", decoding=True
    )

    def blocks_held(self, layers: int, device: str) -> int:
        """Returns how many of a DiT's `layers` blocks are on the device at a time, at least."""
        moving = layers - (self.resident_blocks or 0)
        if self.offload_model != "block" or moving <= buffers(device):
            return layers
        return layers - moving + buffers(device)

    def precision_on(self, device: str) -> str:
        """Returns "bf16" or "fp32", the precision on a device type ("cpu", "cuda" or "npu")."""
        if self.precision == "auto":
            return "fp32" if device == "cpu" else "bf16"
        return self.precision

    def dit_precision_on(self, device: str) -> str:
        """Returns the precision of the DiT's matrix products, that of its weights."""
        return "bf16" if self.convert_model_dtype else self.precision_on(device)
