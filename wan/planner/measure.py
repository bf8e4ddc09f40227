"""What a run holds, stage by stage: its own layers run on tensors without data.

Nothing is computed and nothing is sent: tensors are on the "meta" device, and the process group is
a fake one, in which this process plays one rank of the run. What lives is followed by its storages.
FSDP refuses the meta device, so sharded networks run on fake tensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wan.checkpoint.load import WHOLE, DTypeOf, Place, dit_dtypes
from wan.checkpoint.quantised import Export
from wan.device import Device
from wan.distributed import mesh
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.kernels.base import StepInfo
from wan.kernels.npu.planned import PlannedLinear, vendor_planned
from wan.kernels.select import select
from wan.modules.model import WanModel
from wan.modules.schedule import TokenPlan
from wan.pipeline import build, text, vae
from wan.pipeline.denoise import Conditions, denoise
from wan.pipeline.setup import Setup
from wan.planner import bound
from wan.settings.devices import of_type
from wan.settings.numerics import acting_as
from wan.settings.parallel import Parallel
from wan.settings.request import Request
from wan.torch_private import Live, WithoutData, fake_process_group, on_fake_tensors

META = torch.device("meta")
Parts = Counter[str]
"""Bytes by the part of the run that made them."""
Sent = list[tuple[str, int]]
"""(c10d's name of an operation, bytes that this rank gives to it)."""
_PARTS = {  # of a block
    "": "norms",
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "cross_attn.k": "text K/V",
    "cross_attn.v": "text K/V",
    "ffn": "feed-forward",
}


@dataclass(frozen=True)
class Forward:
    """A rank's forwards of a DiT, bytes.

    Attributes:
        weights: This rank's.
        kept: What lives from one forward to the next.
        beside: What lived beside these and the latents when the most did.
        sent: By a layer, in each kind of step.
        attention: How it is carried out, in a line.
    """

    weights: int
    kept: Parts
    beside: Parts
    sent: tuple[Sent, ...]
    attention: str


class Planner:
    """What a run holds on its fullest rank, for any topology of it; each part is measured once."""

    def __init__(self, setup: Setup, request: Request) -> None:
        self.setup, self.request = setup, request
        self.device = Device(META, bound.device(setup))
        self.precision = setup.execution.dit_precision_on(self.device.type)
        self.dtype = build.DTYPES[setup.execution.precision_on(self.device.type)]
        self.holds_frame = setup.preset.kind == "ti2v" and request.image_size is not None
        self._text, self._vae = cache(self._text_encoder), cache(self._autoencoder)
        self._rank, self._loop = cache(self._forward), cache(self._in_loop)

    def stages(self, setup: Setup | None = None) -> dict[str, Parts]:
        """What lives on the fullest rank when the most does, for each stage in their order.

        setup: the planned one with another topology or memory policy.
        """
        setup = self.setup if setup is None else setup
        execution, parallel = setup.execution, setup.parallel
        stays, found = Parts(), dict[str, Parts]()

        def stage(name: str, weights: Parts, beside: Parts) -> None:
            found[name] = stays + weights + beside
            if not execution.offload_model:
                stays.update(weights)

        if self.device.type == "cpu" or not execution.t5_cpu:
            stage("text encoder", *self._text(parallel.world_size if parallel.t5_fsdp else 1))
        weights, encoding, decoding = self._vae(execution.vae_tiling)
        if encoding:
            stage("image encoder", weights, encoding)
        forward = max(self.forwards(parallel), key=lambda forward: forward.beside.total())
        networks = 1 if execution.offload_model else len(setup.preset.experts)
        resident = Parts({"DiT weights": forward.weights}) + forward.kept
        resident = Parts({part: networks * size for part, size in resident.items()})
        stage("denoising", resident, forward.beside + Parts(latents=self._loop(parallel)))
        stage("decoding", weights - stays, decoding)
        return found

    def need(self, setup: Setup | None = None) -> int:
        """The most that the fullest rank holds."""
        return max(parts.total() for parts in self.stages(setup).values())

    def branches(self, parallel: Parallel) -> tuple[str, ...]:
        """The guidance branches that a rank computes."""
        return ("cond", "uncond")[: 2 if self.request.guided and parallel.cfg_size == 1 else 1]

    def tokens(self, parallel: Parallel) -> TokenPlan:
        """How the ranks share the tokens."""
        ranks = parallel.sequence_size
        multiple = self.setup.attention.row_multiple(parallel.ring_size) if ranks > 1 else 1
        return TokenPlan(prod(self.request.grid), ranks, multiple)

    def forwards(self, parallel: Parallel) -> list[Forward]:
        """Of the first rank, the last one if it is padded, and one amid a line of ranks."""
        tokens, last = self.tokens(parallel), parallel.ring_size - 1
        places = {0, last if tokens.padded > tokens.tokens else 0}
        places.add(parallel.ring_size // 2 if parallel.ring_type == "bidirectional" else 0)
        return [self._rank(parallel, place * parallel.ulysses_size) for place in sorted(places)]

    def _forward(self, parallel: Parallel, rank: int) -> Forward:
        """Of as few blocks as show all; what one keeps is then counted for all of them."""
        setup = replace(self.setup, parallel=parallel)
        compute, checkpoint = build.DTYPES[self.precision], setup.checkpoint
        with self._played(parallel, rank) as team, vendor_planned():
            selected = select(setup.attention, self.device, checkpoint.head_dim, compute, {})
            shared = build.collaborators(setup, selected, team)
            expert, files = next(iter(checkpoint.experts.items()))
            with META:
                network = WanModel(**files.config, collaborators=shared)
                if setup.quantised is not None:
                    _quantise(network, setup.quantised.experts[expert], self.device, compute)
            place, _ = build.places(parallel, team)
            dtypes = dit_dtypes(compute, setup.execution.convert_model_dtype)
            with _loaded(network, network.blocks, dtypes, place) as (live, weights):
                sent = self._called(network, live, self.branches(parallel))
                beside, kept = live.peak - live.held, +live.held
        count, run = checkpoint.config["num_layers"], len(network.blocks)
        kept["text K/V"] = kept["text K/V"] * count // run
        if setup.attention.use_rainfusion:
            kept["masks"] = kept.pop("self-attention", 0) * count // run
        line = build.attention_line(setup, selected)
        return Forward(weights, +kept, beside, sent, line)

    def _called(self, network: WanModel, live: Live, branches: tuple[str, ...]) -> tuple[Sent, ...]:
        """A forward of each branch in each kind of step; what a layer sends in each kind."""
        live.watch(network, "embeddings")
        live.watch(network.text_embedding, "text")
        live.watch(network.head, "head")
        for block in network.blocks:
            for name, part in _PARTS.items():
                live.watch(block.get_submodule(name), part)
        given, sent = self._conditions(live.device), list[Sent]()
        contexts = {"cond": given.context, "uncond": given.negative_context}
        y = [] if given.y is None else [given.y]
        live.leave_out([given.start, *contexts.values(), *y])
        attention, grid, steps = self.setup.attention, self.request.grid, self.request.sample_steps
        first = attention.start_step(steps) if attention.use_rainfusion else 0
        for index in sorted({0, first}):
            live.sent.clear()
            for branch in branches:
                expert = self.setup.preset.experts[0]
                step = StepInfo(index, steps, branch, expert, grid, prod(grid))
                t, context = given.timesteps(torch.tensor(500.0)), [contexts[branch]]
                with live:
                    network([given.start], t, context, prod(grid), y or None, step=step)
            sent.append(live.sent[: len(live.sent) // len(branches) // len(network.blocks)])
        return tuple(sent)

    def _conditions(self, device: str) -> Conditions:
        """As `wan.pipeline.conditioning` makes them."""
        config, latents = self.setup.checkpoint.config, self.request.latent_shape
        size, channels = (config["text_len"], config["text_dim"]), config["in_dim"] - latents[0]
        contexts = [torch.empty(size, dtype=self.dtype, device=device) for _ in range(2)]
        y = torch.empty(channels, *latents[1:], device=device) if channels else None
        start, frame = torch.empty(latents, device=device), prod(self.request.grid[1:])
        if not self.holds_frame:
            return Conditions(start, *contexts, y)
        t_S = torch.ones(1, prod(self.request.grid))
        t_S[:, :frame] = 0
        return Conditions(start, *contexts, y, timesteps=lambda t: t_S * t)

    def _in_loop(self, parallel: Parallel) -> int:
        """Latents, conditions and the solver's history when a network is called."""
        live, most = Live("meta"), 0

        def call(x: list[Tensor], *_: Any, **__: Any) -> list[Tensor]:
            nonlocal most
            most = max(most, live.held.total())
            return [torch.empty_like(x[0])]

        with self._played(parallel) as team, live:
            branches = build.sharing(parallel, team).branches
            source = SimpleNamespace(get=lambda _: call, prefetch=lambda _: None)
            request = replace(self.request, sample_steps=min(4, self.request.sample_steps))
            denoise(request, self._conditions("meta"), source, branches)
        return most

    def _text_encoder(self, ranks: int) -> tuple[Parts, Parts]:
        """The weights, and what lives beside them while a prompt is encoded."""
        path, text_len = self.setup.checkpoint.text_encoder, self.setup.checkpoint.config["text_len"]
        with self._played(Parallel(ranks, 1, 1, ranks)) as team:
            with META:
                network: Any = text.published() if path is None else text.blueprint(path).make()
            place = WHOLE if team is None else Sharded(team.world_mesh(), text.umt5_blocks)
            blocks, dtypes = network.encoder.block, text.dtypes(self.dtype)
            with _loaded(network, blocks, dtypes, place) as (live, weights):
                text.TextEncoder(network, None, dtype=self.dtype, text_len=text_len)  # upcasts it
                ids = torch.ones(1, text_len, dtype=torch.int64, device=live.device)
                with live:
                    network(ids, torch.ones_like(ids))
        return Parts({"text encoder weights": weights}), live.peak

    def _autoencoder(self, tiling: bool) -> tuple[Parts, Parts, Parts]:
        """The weights, and what lives beside them while an image is encoded and while decoding."""
        path, preset = self.setup.checkpoint.vae, self.setup.preset
        with META:
            network = vae.published(preset.vae) if path is None else vae.blueprint(path).make()
        model = vae.VideoVAE(network.eval().requires_grad_(False))
        (channels, latent_frames, *size), (stride, *_) = self.request.latent_shape, preset.vae_stride
        sides = self.request.video_size[::-1]

        def decode(frames: int) -> None:
            model.decode(torch.empty(channels, frames, *size))

        def encode(frames: int) -> None:
            video = torch.empty(3, (frames - 1) * stride + 1, *sides)
            joined = video.clone() if self.device.type == "cpu" else None  # what it was made of
            model.encode(video)
            del joined

        def followed(work: Callable[[int], None], frames: int) -> Parts:
            """From the third latent frame on, each adds the same: four are enough."""
            peaks = []
            for few in (min(frames, 3), min(frames, 4)):
                live = Live("meta")
                live.leave_out(network.parameters())
                with self._played(Parallel()), META, live:
                    work(few)
                peaks.append(live.peak)
            more = peaks[1].total() - peaks[0].total()
            return peaks[1] + Parts(activations=max(0, frames - 4) * more)

        frames = {"i2v": latent_frames, "ti2v": int(self.holds_frame)}.get(preset.kind)
        encoding = followed(encode, frames) if frames else Parts()
        weights, most = Parts({"VAE weights": _bytes(network)}), network.tile_sample_min_height
        if not tiling or max(sides) <= most:
            return weights, encoding, followed(decode, latent_frames)
        # All tiles live while the last one is decoded, and while they are joined, in three copies.
        step, pixel = network.tile_sample_stride_height, 3 * self.request.frame_num * 4
        tiles = prod(sum(min(most, side - i) for i in range(0, side, step)) for side in sides)
        size = [min(side, most * side // whole) for side, whole in zip(size, sides, strict=True)]
        one = followed(decode, latent_frames)
        return weights, encoding, max(one, Parts(activations=3 * prod(sides) * pixel), key=Parts.total) + Parts(tiles=tiles * pixel)

    @contextmanager
    def _played(self, parallel: Parallel, rank: int = 0) -> Iterator[Team | None]:
        """The team of a run, in which this process plays a rank; None for a run of one process."""
        logging.disable(logging.INFO)  # which progress bars go by
        with torch.no_grad(), WithoutData(), acting_as(self.device.type):
            if parallel.world_size == 1:
                yield None
            else:
                fake_process_group(rank, parallel.world_size)
                yield mesh.form(Device(torch.device("cpu"), of_type("cpu")), parallel.sizes)
                dist.destroy_process_group()
        logging.disable(logging.NOTSET)


def _quantise(network: WanModel, export: Export, device: Device, compute: torch.dtype) -> None:
    if device.type != "npu":
        build.quantised_layers(export, META, compute)(network, {})
        return
    for name, layer in export.linears.items():
        size = sum(info.nbytes for info in layer.tensors.values())
        network.set_submodule(name, PlannedLinear(size, network.get_submodule(name).out_features))


@contextmanager
def _loaded(
    network: nn.Module, blocks: nn.ModuleList, dtype_of: DTypeOf, place: Place
) -> Iterator[tuple[Live, int]]:
    """The network for inference, without data, and with as few of its blocks as show all.

    Yields what follows its calls, and the bytes of this rank's weights, all blocks counted.
    """
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, torch.bfloat16))
    is_whole = place is WHOLE
    rest = blocks[2 if is_whole else 3 :]
    del blocks[2 if is_whole else 3 :]
    place.prepare(network.eval().requires_grad_(False))
    with nullcontext() if is_whole else on_fake_tensors():
        live = Live("meta" if is_whole else "cpu", resized=not is_whole)
        network.to_empty(device=live.device)
        live.leave_out(_own(network))
        others = _bytes(rest) if is_whole else len(rest) * _bytes(blocks[-1])
        yield live, _bytes(network) + others


def _own(network: nn.Module) -> list[Tensor]:
    """This rank's weights."""
    tensors = [*network.parameters(), *network.buffers()]
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def _bytes(network: nn.Module) -> int:
    return sum(x.nbytes for x in _own(network))
