"""A run's memory, topology by topology: the formulas of `wan.plan` with the run's own sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from wan.checkpoint.files import folder_tensors
from wan.checkpoint.layout import KINDS
from wan.cli.planned import Planned
from wan.planner.chunk import FP32
from wan.planner.forward import SOLVER_LATENTS, Forward, Moment
from wan.planner.network import Network, Shapes, Weights, text_bytes, weights
from wan.settings.numerics import slice_elements
from wan.settings.parallel import Parallel
from wan.settings.request import latent_shape

T5_BYTES = 11_361_820_672  # umt5-xxl's encoder as published, bfloat16; a test counts it
T5_TABLE = 2_100_297_728  # its word table, whole while it runs


@dataclass(frozen=True)
class Card:
    """Memory of the fullest rank (bytes): the rank that also holds the text encoder."""

    text_encoder: int
    network: Weights
    resident: int  # networks in memory at once
    prompts: int
    solver: int
    masks: int
    moments: tuple[Moment, ...]
    sharded: bool
    offload: bool

    @property
    def forward(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def dit(self) -> int:
        each = self.network.share if self.sharded else self.network.whole
        return self.resident * each + self.network.gathered

    @property
    def denoising(self) -> int:
        beside = 0 if self.offload else self.text_encoder
        return beside + self.dit + self.prompts + self.solver + self.masks + self.forward.total

    @property
    def total(self) -> int:
        return max(self.text_encoder, self.denoising)


class Planner:
    """What is the same for every topology of a run: sizes of its networks and of the video."""

    def __init__(self, planned: Planned) -> None:
        self.planned, self.execution, self.request = planned, planned.execution, planned.request
        preset = self.request.preset
        bf16 = self.execution.precision == "bf16" or self.execution.convert_model_dtype
        auto = self.execution.precision == "auto" and self.execution.device != "cpu"
        self.e = 2 if bf16 or auto else 4
        self.net, self.shapes = _network(planned)
        self.voxels = prod(latent_shape(preset, self.request.video_size, self.request.frame_num))
        self.guided = any(scale != 1 for scale in self.request.guide_scale)
        self._weights: dict[int, Weights] = {}
        self._quantised = _quantised(planned)

    def forward(self, parallel: Parallel) -> Forward:
        return Forward(
            self.net,
            prod(self.request.grid),
            self.voxels,
            parallel,
            self.e,
            conditioned=self.request.preset.kind == "i2v",
            slice_elements=slice_elements(self.device),
            attention=self.planned.attention,
            device=self.device,
        )

    @property
    def device(self) -> str:
        """The device's type; "auto" counts as a GPU unless the flags are an NPU's."""
        if self.execution.device != "auto":
            return self.execution.device
        attention = self.planned.attention
        asks = attention.algorithm == "laser" or attention.fused_ops or attention.freq_cap
        return "npu" if asks else "cuda"

    def forwards_per_step(self, parallel: Parallel) -> int:
        """Of one rank: both guidance branches, unless the other half of the ranks has one."""
        return 2 if self.guided and parallel.cfg_size == 1 else 1

    def rank(self, parallel: Parallel, *, offload: bool | None = None) -> Card:
        offload = self.execution.offload_model if offload is None else offload
        ranks = parallel.world_size if parallel.dit_fsdp else 1
        experts = len(self.request.preset.experts)
        contexts = self.forwards_per_step(parallel)
        resident = 1 if offload else experts
        text = text_bytes(self.net, self.e, contexts, self.execution.text_kv_cache)
        inputs = 2 * self.net.text_len * self.net.text_dim * self.e
        y = self.net.in_dim - self.net.out_dim
        forward = self.forward(parallel)
        return Card(
            text_encoder=self._text_encoder(parallel),
            network=self._network_weights(ranks),
            resident=resident,
            prompts=(resident if self.execution.text_kv_cache else 1) * text + inputs,
            solver=(SOLVER_LATENTS * self.net.out_dim + y) * self.voxels * FP32,
            masks=contexts * forward.masks(),
            moments=forward.moments(),
            sharded=parallel.dit_fsdp,
            offload=offload,
        )

    def _network_weights(self, ranks: int) -> Weights:
        if ranks not in self._weights:
            convert = self.execution.convert_model_dtype
            self._weights[ranks] = weights(self.shapes, self.e, convert, ranks, self._quantised)
        return self._weights[ranks]

    def _text_encoder(self, parallel: Parallel) -> int:
        if self.execution.t5_cpu and self.execution.device != "cpu":
            return 0
        checkpoint = self.planned.checkpoint
        stored = None if checkpoint is None else checkpoint.text_encoder
        size = T5_BYTES if stored is None else _file_bytes(stored)
        table = min(T5_TABLE, size)
        return size // parallel.world_size + table if parallel.t5_fsdp else size


def _network(planned: Planned) -> tuple[Network, Shapes]:
    """The DiT's sizes and tensors: from the checkpoint's headers, else as published."""
    preset = planned.request.preset
    if planned.checkpoint is None:
        channels = {kind: count for count, kind in KINDS.items()}[preset.kind]
        sizes = (preset.dim, preset.ffn_dim, preset.num_heads, preset.num_layers)
        net = Network(*sizes, channels, preset.latent_channels)
        return net, net.shapes()
    files = next(iter(planned.checkpoint.experts.values()))
    config: dict[str, Any] = {**files.config}
    names = ("dim", "ffn_dim", "in_dim", "out_dim", "text_len", "text_dim", "freq_dim")
    net = Network(
        heads=config["num_heads"],
        layers=config["num_layers"],
        patch=prod(config.get("patch_size", (1, 2, 2))),
        **{name: config[name] for name in names if name in config},
    )
    return net, {name: info.shape for name, info in files.tensors.items()}


def _quantised(planned: Planned) -> dict[str, int]:
    """Bytes of the tensors that stand for a quantised layer's weight and bias."""
    if planned.quantised is None:
        return {}
    found = {}
    for layer, export in next(iter(planned.quantised.experts.values())).linears.items():
        parts = {name: info for name, info in export.tensors.items() if name != "bias"}
        payload = parts.pop("weight").nbytes
        found[f"{layer}.weight"] = payload + FP32 * sum(prod(i.shape) for i in parts.values())
        if "bias" in export.tensors:
            found[f"{layer}.bias"] = FP32 * prod(export.tensors["bias"].shape)
    return found


def _file_bytes(path: Path) -> int:
    """Weights as stored; a .pth is an uncompressed archive of them."""
    if path.is_file():
        return path.stat().st_size
    return sum(info.nbytes for info in (folder_tensors(path) or {}).values())
