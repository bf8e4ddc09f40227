"""Settings of the device: precision, offload, compilation, VAE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wan.settings.fields import layout_option, load_option, option
from wan.settings.values import choice, integer, switch, switch_or_choice

DEVICE_TYPES = ("auto", "cpu", "cuda", "npu")
PRECISIONS = ("auto", "bf16", "fp32")
VIDEO_GROUP_SIZE = 64  # videos of a prompt file that are encoded and grouped by expert together
VAE_PRECISIONS = ("fp32", "bf16")
MULTIPLY = "multiply"  # weights stay in FP8, and matrix products run in FP8
Offload = bool | Literal["cpu", "block"]
"""True: one network in memory at a time, loaded from its file for each use; False: networks stay on
the device after their first use; "cpu": all networks in host memory, and one at a time on the
device; "block": as True, with only some blocks of the DiT or text encoder on the device."""
OFFLOAD_MODEL = switch_or_choice("cpu", "block")


def count_block_buffers(device: str) -> int:
    """Returns the number of block buffers: one on a CPU, else two, to copy the next block ahead."""
    return 1 if device == "cpu" else 2


@dataclass(frozen=True)
class Execution:
    """Device, precision and memory settings."""

    device: str = load_option(
        "auto",
        choice(*DEVICE_TYPES),
        "device to run on (default auto: NPU or GPU where there is one, else CPU)",
        decoding=True,
        diffusers=True,
    )
    precision: str = load_option(
        "auto",
        choice(*PRECISIONS),
        "dtype of the networks (default auto: bf16, on a CPU fp32)",
        diffusers="torch_dtype",
    )
    convert_model_dtype: bool = load_option(
        False, switch, "convert all DiT weights to bf16, also norms and embeddings (default false)"
    )
    stored_weights: str = load_option(
        "auto",
        choice("auto", "keep", "upcast", MULTIPLY),
        "weights of an FP8 or GGUF checkpoint: keep: quantized in memory; upcast: --precision; "
        "multiply: FP8 in memory and in matrix products; auto (default): keep, except on NPUs and "
        "with --dit_fsdp",
    )
    offload_model: Offload = option(
        True,
        OFFLOAD_MODEL,
        "true (default): one network in memory at a time; false: all; cpu: all in host memory, one "
        "on the device; block: as true, with only some blocks on the device",
        line=False,
        decoding=True,
        common=True,
    )
    resident_blocks: int | None = layout_option(
        None,
        integer(0, 1000),
        "DiT blocks that stay on the device with --offload_model block (default: as many as fit; "
        "on a CPU 0)",
    )
    t5_cpu: bool = load_option(
        False,
        switch,
        "run the text encoder on the CPU (default false)",
        variables={"T5_LOAD_CPU": {"0": False, "1": True}},
    )
    compile: bool = load_option(
        False, switch, "compile the DiT blocks with torch.compile (default false)"
    )
    vae_tiling: bool = load_option(
        False,
        switch,
        "decode in overlapping tiles: less memory, not exact (default false)",
        decoding=True,
    )
    vae_parallel: bool = layout_option(
        False,
        switch,
        "run the VAE on all ranks, exact (default false)",
        decoding=True,
        common=True,
    )
    overlap_decoding: bool = layout_option(
        False,
        switch,
        "decode a clip while the next one is denoised (with --chain latent; default false)",
    )
    vae_precision: str = load_option(
        "fp32", choice(*VAE_PRECISIONS), "dtype of the VAE (default fp32)", decoding=True
    )

    def count_blocks_on_device(self, layers: int, device: str) -> int:
        """Returns how many of a DiT's `layers` blocks are on the device at a time, at least."""
        num_moving = layers - (self.resident_blocks or 0)
        if self.offload_model != "block" or num_moving <= count_block_buffers(device):
            return layers
        return layers - num_moving + count_block_buffers(device)

    def get_precision(self, device: str) -> str:
        """Returns "bf16" or "fp32", the precision on a device type ("cpu", "cuda" or "npu")."""
        if self.precision == "auto":
            return "fp32" if device == "cpu" else "bf16"
        return self.precision

    def get_dit_precision(self, device: str) -> str:
        """Returns the precision of the DiT's matrix products, that of its weights."""
        return "bf16" if self.convert_model_dtype else self.get_precision(device)
