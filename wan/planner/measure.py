"""What a run holds, stage by stage: its own layers run on tensors without data.

Nothing is computed and nothing is sent: tensors are on the "meta" device, and the process group is
a fake one, in which this process plays one rank of the run. What lives is followed by its storages.
FSDP refuses the meta device, so sharded networks run on fake tensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from wan.cache.policy import BRANCHES
from wan.checkpoint.load import WHOLE, DTypeOf, Place, dit_dtypes
from wan.device import Device, resolve
from wan.distributed import mesh
from wan.kernels.base import StepInfo, Target
from wan.kernels.select import select
from wan.modules.model import WanModel
from wan.modules.schedule import TokenPlan
from wan.pipeline import adapt, bound, build, clip, text, vae
from wan.pipeline.setup import Setup
from wan.planner import operators
from wan.settings.execution import Execution, buffers
from wan.settings.parallel import Parallel
from wan.settings.request import Request
from wan.torch_private import Live, WithoutData, fake_process_group, weight_bytes, without_memory
from wan.vae import tiles
from wan.vae.network import Autoencoder

META = torch.device("meta")
Parts = Counter[str]
"""Bytes by the part of the run that made them."""
Sent = list[tuple[str, int]]  # (c10d's name of an operation, bytes that a rank gives to it)
_PARTS = {  # of a block
    "": "norms",
    "self_attn": "self-attention",
    "cross_attn": "cross-attention",
    "cross_attn.k": "text K/V",
    "cross_attn.v": "text K/V",
    "ffn": "feed-forward",
}
_LATENTS = 6  # when a network is called: the solver's, and the other branch's; a test counts them


@dataclass(frozen=True)
class Forward:
    """A rank's forwards of a DiT, bytes."""

    weights: int  # this rank's
    block: int  # of these, in one block
    kept: Parts  # what lives from one forward to the next
    beside: Parts  # what lived beside these and the latents when the most did
    sent: tuple[Sent, ...]  # by a layer, in each kind of step
    attention: str  # how it is carried out


class Planner:
    """What a run holds on its fullest rank, for any topology of it; each part is measured once."""

    def __init__(self, setup: Setup, request: Request) -> None:
        self.setup, self.request = setup, request
        self.device = Device(META, bound.device(setup))
        self.precision = setup.execution.dit_precision_on(self.device.type)
        self.dtype = build.DTYPES[setup.execution.precision_on(self.device.type)]
        self.holds_frame = setup.preset.kind == "ti2v" and request.image_size is not None
        self._text, self._vae = cache(self._text_encoder), cache(self._autoencoder)
        self._rank = cache(self._forward)

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
            stage("text encoder", *self._encoding(execution, parallel))
        ranks = parallel.world_size if execution.vae_parallel else 1
        weights, encoding, decoding = self._vae(execution.vae_tiling, ranks)
        if not execution.offload_model:  # it is released before the VAE works otherwise
            stays += self._clip_weights()
        if encoding:
            stage("image encoder", weights, encoding)
        forward = max(self.forwards(parallel), key=lambda forward: forward.beside.total())
        networks = 1 if execution.offload_model else len(setup.preset.experts)
        layers = setup.checkpoint.config["num_layers"]
        absent = layers - execution.blocks_held(layers, self.device.type)
        resident = forward.kept + Parts({"DiT weights": forward.weights - absent * forward.block})
        resident = Parts({part: networks * size for part, size in resident.items()})
        latents = Parts(latents=_LATENTS * prod(self.request.latent_shape) * 4)
        stage("denoising", resident, forward.beside + latents)
        stage("decoding", weights - stays, decoding)
        return found

    def need(self, setup: Setup | None = None) -> int:
        """The most that the fullest rank holds."""
        return max(parts.total() for parts in self.stages(setup).values())

    def host(self) -> int:
        """Bytes of page-locked memory that the first rank holds, beside its device."""
        setup, execution = self.setup, self.setup.execution
        if self.device.type == "cpu" or isinstance(execution.offload_model, bool):
            return 0
        forward, layers = self.forwards(setup.parallel)[0], setup.checkpoint.config["num_layers"]
        text, table, _, _ = (0, 0, 0, Parts()) if execution.t5_cpu else self._text(1)
        if execution.offload_model == "block":  # one after the other
            return max(layers * forward.block, text - table)
        return len(setup.preset.experts) * forward.weights + text

    def _encoding(self, execution: Execution, parallel: Parallel) -> tuple[Parts, Parts]:
        """The text encoder's weights, and what lives beside them while a prompt is encoded."""
        weights, _, block, beside = self._text(parallel.world_size if parallel.t5_fsdp else 1)
        if execution.offload_model == "block":
            weights = buffers(self.device.type) * block
        return Parts({"text encoder weights": weights}), beside

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
        alike = replace(parallel, t5_fsdp=False)  # to the loop
        return [self._rank(alike, place * parallel.ulysses_size) for place in sorted(places)]

    def _forward(self, parallel: Parallel, rank: int) -> Forward:
        """Of as few blocks as show all; what one keeps is then counted for all of them."""
        setup = replace(self.setup, parallel=parallel)
        compute, checkpoint = build.DTYPES[self.precision], setup.checkpoint
        with self._played(parallel, rank) as team:
            target = Target(self.device, checkpoint.head_dim, compute, operators.load)
            selected = select(setup.attention, target, {})
            caches = build.step_caches(setup, team)
            shared = build.collaborators(setup, selected, team, caches)
            caches.begin(dict.fromkeys(BRANCHES, caches.rehearsed))
            expert, files = next(iter(checkpoint.experts.items()))
            with META:
                network = WanModel(**files.config, collaborators=shared)
                if setup.quantised is not None:
                    export = setup.quantised.experts[expert]
                    if self.device.type == "npu":
                        operators.quantise(network, export.sizes)
                    else:
                        adapt.quantised_layers(export, self.device, compute)(network, {})
                elif setup.keeps_fp8(self.device.type):
                    adapt.keep_fp8(files.tensors, network, {})
            place, _ = build.places(parallel, team)
            dtypes = dit_dtypes(compute, setup.execution.convert_model_dtype)
            with _loaded(network, network.blocks, dtypes, place) as (live, weights, block):
                sent = self._called(network, live, self.branches(parallel))
                beside, kept = live.peak - live.held, +live.held
                residuals = Parts({"step cache": caches.kept_bytes()})
        count, run = checkpoint.config["num_layers"], len(network.blocks)
        kept["text K/V"] = kept["text K/V"] * count // run
        kept = kept - Parts(embeddings=residuals.total()) + residuals
        by_layer = "masks" if setup.attention.use_rainfusion else "attention cache"
        kept[by_layer] = kept.pop("self-attention", 0) * count // run
        line = build.attention_line(setup, selected)
        return Forward(weights, block, +kept, beside, sent, line)

    def _called(self, network: WanModel, live: Live, branches: tuple[str, ...]) -> tuple[Sent, ...]:
        """A forward of each branch in each kind of step; what a layer sends in each kind."""
        live.watch(network, "embeddings")
        live.watch(network.text_embedding, "text")
        live.watch(network.head, "head")
        for block in network.blocks:
            for name, part in _PARTS.items():
                live.watch(block.get_submodule(name), part)
        setup, request, config = self.setup, self.request, self.setup.checkpoint.config
        (channels, *size), grid, steps = request.latent_shape, request.grid, request.sample_steps
        sizes = [(channels, *size), (config["in_dim"] - channels, *size)]
        x, y = (torch.empty(size, device=live.device) for size in sizes)
        given = (config["text_len"], config["text_dim"])
        texts = [torch.empty(given, dtype=self.dtype, device=live.device) for _ in branches]
        live.leave_out([x, y, *texts])
        t, sent = torch.tensor([500.0]), list[Sent]()
        if self.holds_frame and live.device == "meta":  # its tokens are at timestep 0
            t = 500.0 * (torch.arange(prod(grid)) >= prod(grid[1:])).unsqueeze(0)
        first = setup.attention.start_step(steps) if setup.attention.use_rainfusion else 0
        again = [0] if setup.cache.policy != "none" else []  # more is kept in the second
        images = setup.preset.images
        seen = torch.empty(images, clip.TOKENS, config["image_dim"], device=live.device)
        live.leave_out([seen])
        for index in [*again, *sorted({0, first})]:
            live.sent.clear()
            for branch, text_LC in zip(branches, texts, strict=True):
                step = StepInfo(index, steps, branch, setup.preset.experts[0], grid, prod(grid))
                with live:
                    told = prod(grid), [y] if len(y) else None
                    clip_fea = seen if images else None
                    network([x], t, [text_LC], *told, clip_fea=clip_fea, step=step)
            if again:
                again.clear()
                continue
            sent.append(live.sent[: len(live.sent) // len(branches) // len(network.blocks)])
        return tuple(sent)

    def _text_encoder(self, ranks: int) -> tuple[int, int, int, Parts]:
        """The weights; of them the word table, and a block; what lives beside them."""
        checkpoint = self.setup.checkpoint
        path, length = checkpoint.text_encoder, checkpoint.config["text_len"]
        parallel = Parallel(ranks, 1, 1, ranks, t5_fsdp=ranks > 1)
        with self._played(parallel) as team:
            with META:
                network: Any = text.published() if path is None else text.blueprint(path).make()
            _, place = build.places(parallel, team)
            blocks, dtypes = network.encoder.block, text.dtypes(self.dtype)
            with _loaded(network, blocks, dtypes, place) as (live, weights, block):
                text.TextEncoder(network, None, dtype=self.dtype, text_len=length)  # upcasts it
                ids = torch.ones(1, length, dtype=torch.int64, device=live.device)
                with live:
                    network(ids, torch.ones_like(ids))
                table = weight_bytes(network.get_submodule(text.TABLE))
        return weights, table, block, live.peak

    def _clip_weights(self) -> Parts:
        path, images = self.setup.checkpoint.image_encoder, self.setup.preset.images
        if not images:
            return Parts()
        count = clip.PUBLISHED if path is None else clip.Blueprint(path).elements
        return Parts({"CLIP weights": count * self.dtype.itemsize})

    def _vae_network(self) -> Autoencoder:
        setup, path = self.setup, self.setup.checkpoint.vae
        with META:
            network = (
                vae.published(setup.preset.vae) if path is None else vae.blueprint(path).make()
            )
        dtype = build.DTYPES[setup.execution.vae_precision]
        return network.to(dtype).eval().requires_grad_(False)

    def _autoencoder(self, tiling: bool, ranks: int) -> tuple[Parts, Parts, Parts]:
        """The weights, and what lives beside them while an image is encoded and while decoding.

        ranks: that share the rows; the first one has the most, and the whole video.
        """
        request, preset, network = self.request, self.setup.preset, self._vae_network()
        model = vae.VideoVAE(network)
        (channels, frames, *size), sides = request.latent_shape, request.video_size[::-1]
        if tiling:
            most = tiles.SIDE // preset.vae_stride[1]
            size = [min(side, most) for side in size]
        size[0] = -(-size[0] // ranks)
        own = size[0] * preset.vae_stride[1]

        def decode(frames: int) -> None:
            model.decode(torch.empty(channels, frames, *size))

        def encode(frames: int) -> None:
            video = torch.empty(3, (frames - 1) * preset.vae_stride[0] + 1, *sides)
            given = video.clone() if self.device.type == "cpu" else None  # what it was made of
            model.encode(video[:, :, :own] if ranks > 1 else video)
            del given

        def followed(work: Callable[[int], None], frames: int) -> Parts:
            """From the third latent frame on, each adds the same: four are enough."""
            peaks = []
            for few in (min(frames, 3), min(frames, 4)):
                live = Live("meta")
                live.leave_out(network.parameters())
                with self._played(Parallel()), META, live:
                    work(few)
                peaks.append(live.peak)
            more = max(0, frames - 4) * (peaks[1].total() - peaks[0].total())
            return peaks[1] + Parts(activations=more)

        encoded = {"i2v": frames, "ti2v": int(self.holds_frame)}.get(preset.kind)
        encoding = followed(encode, encoded) if encoded else Parts()
        kept = tiles.kept_bytes(sides, request.frame_num) if tiling else 0
        rest = (sides[0] - own) * sides[1] * 3 * request.frame_num * 4 if ranks > 1 else 0
        decoding = followed(decode, frames) + Parts(tiles=kept) + Parts({"other ranks' rows": rest})
        return Parts({"VAE weights": weight_bytes(network)}), encoding, decoding

    @contextmanager
    def _played(self, parallel: Parallel, rank: int = 0) -> Iterator[mesh.Team | None]:
        """The team in which this process plays a rank; None for a run of one process."""
        logging.disable(logging.INFO)  # which progress bars go by
        several = parallel.world_size > 1
        with torch.no_grad(), WithoutData(), ExitStack() as after:
            after.callback(logging.disable, logging.NOTSET)
            if several:
                fake_process_group(rank, parallel.world_size)
                after.callback(dist.destroy_process_group)
            yield mesh.form(resolve("cpu"), parallel.sizes) if several else None


@contextmanager
def _loaded(
    network: nn.Module, blocks: nn.ModuleList, dtype_of: DTypeOf, place: Place
) -> Iterator[tuple[Live, int, int]]:
    """The network for inference, without data, and with as few of its blocks as show all.

    Yields what follows its calls, and the bytes of this rank's weights: of all blocks and of one.
    """
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, torch.bfloat16))
    is_whole = place is WHOLE
    rest = blocks[2 if is_whole else 3 :]
    del blocks[2 if is_whole else 3 :]
    place.prepare(network.eval().requires_grad_(False))
    with without_memory(network, sharded=not is_whole) as live:
        block = weight_bytes(blocks[-1])
        others = weight_bytes(rest) if is_whole else len(rest) * block
        yield live, weight_bytes(network) + others, block
