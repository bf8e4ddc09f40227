"""The network of Wan2.2 S2V, with the official names and forward signature: sound and a picture.

It is `WanModel` with more tokens and a second attention behind some blocks. The reference picture
and the end of the clip before stand behind the video's tokens, at timestep 0, and have rotary
positions of their own. Behind some blocks each token of the video attends to the sound of its own
latent frame, so this needs no exchange between devices. A pose video is added to the video's
tokens. What depends on the clip alone is computed once where the text's keys and values are kept.

Legend: B batch (always 1), C channels, F H W latent frames/height/width, N the video's tokens on
this device, M tokens behind them, L all of this device, T steps of sound, A tokens of sound of a
latent frame, R runs of tokens of the same frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan import trace
from wan.kernels.base import StepInfo
from wan.modules.blocks import BlockSizes, WanAttention, fp32_linear
from wan.modules.framewise import (
    CausalConv,
    activated,
    added,
    attend_in_frames,
    check_shapes,
    own_frames,
)
from wan.modules.interfaces import Collaborators
from wan.modules.model import After, Conditioning, WanModel, embedded, patches
from wan.modules.rope import Axes, RopeTable, rope_angles, tabulated
from wan.modules.textcache import KeptByInput
from wan.settings.schedule import Grid
from wan.settings.sound import (
    INJECT_LAYERS,
    MOTION_FRAMES,
    MOTION_LATENTS,
    SOUND_LAYERS,
    STATED,
)

REFERENCE_TIME = 30  # where the reference picture stands on the time axis
_KINDS = {"video": 0, "reference": 1, "motion": 2}  # rows of `trainable_cond_mask`
_PACKED = (  # of the clip before, newest first: latent frames, patch, positions on the time axis
    ("proj", 1, (1, 2, 2), (-1,)),
    ("proj_2x", 2, (2, 4, 4), (-3,)),
    ("proj_4x", 16, (4, 8, 8), (-19, -14, -9, -4)),
)


class WanModel_S2V(WanModel):  # noqa: N801 (the official name)
    """Predicts the flow velocity of noisy video latents, given sound, a picture and poses.

    The arguments are the official ones (config.json); ValueError for what no published network
    has. audio_dim: channels of the sound's features. num_audio_token: tokens of sound of a latent
    frame, beside one that is learned. audio_inject_layers: the blocks behind which tokens attend to
    the sound.
    """

    def __init__(
        self,
        cond_dim: int = 16,
        audio_dim: int = 1024,
        num_audio_token: int = 4,
        audio_inject_layers: Sequence[int] = INJECT_LAYERS,
        *,
        zero_init: bool = True,
        motion_token_num: int = 1024,
        model_type: str = "s2v",
        collaborators: Collaborators | None = None,
        **config: Any,
    ) -> None:
        """Builds the network. zero_init, motion_token_num: they have no effect here."""
        known = {name: config.pop(name, value) for name, value in STATED.items()} | {
            "cond_dim": cond_dim
        }
        for name, value in known.items():
            if value != STATED[name]:
                raise ValueError(f"{name} is {value!r}; only {STATED[name]!r} is supported.")
        given = Collaborators() if collaborators is None else collaborators
        super().__init__(model_type, **config, collaborators=given)
        self.injected = {layer: i for i, layer in enumerate(sorted(audio_inject_layers))}
        if max(self.injected, default=0) >= self.num_layers:
            raise ValueError(
                f"audio_inject_layers names layer {max(self.injected)}; the network has "
                f"{self.num_layers}."
            )
        dim, patch = self.dim, self.patch_size
        self.cond_encoder = nn.Conv3d(cond_dim, dim, patch, patch)
        self.trainable_cond_mask = nn.Embedding(len(_KINDS), dim)
        self.frame_packer = nn.ModuleDict(
            {name: nn.Conv3d(self.in_dim, dim, size, size) for name, _, size, _ in _PACKED}
        )
        self.casual_audio_encoder = AudioEncoder(audio_dim, dim, num_audio_token)
        sizes = BlockSizes(dim, 0, self.num_heads, eps=config.get("eps", 1e-6))
        self.audio_injector = nn.ModuleDict(
            {
                "injector": nn.ModuleList(AudioAttention(sizes, given) for _ in self.injected),
                "injector_adain_layers": nn.ModuleList(AdaIn(dim) for _ in self.injected),
            }
        )
        self.ops = given.ops
        kept = given.text_kv_cache
        self._scenes = KeptByInput[_Scene](1) if kept else None
        self._sounds = KeptByInput[_Heard](2) if kept else None

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        ref_latents: list[Tensor],
        motion_latents: list[Tensor],
        cond_states: list[Tensor] | None,
        audio_input: Tensor,
        motion_frames: Sequence[int] = (MOTION_FRAMES, MOTION_LATENTS),
        add_last_motion: int = 2,
        drop_motion_frames: bool = False,
        *,
        step: StepInfo | None = None,
    ) -> list[Tensor]:
        """Velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [C, F, H, W] each.
            t: Timesteps 0..1000, [B].
            context: Text embeddings, [length <= text_len, text_dim] each.
            seq_len: Has no effect, as officially.
            ref_latents: Of the reference picture, [C, 1, H, W] each.
            motion_latents: Of the end of the clip before, [C, any, H, W] each.
            cond_states: Of the pose video, [C, F, H, W] each; None: no pose, as zeros.
            audio_input: Features of the sound, [B, 25, audio_dim, 4 F].
            motion_frames: Frames and latent frames before the clip.
            add_last_motion: Has no effect: only the official default exists.
            drop_motion_frames: The clip before is not looked at.
            step: Where in the run this call is, for attention layers and caches.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        self._check(x, t, context, 1 << 60, None, None)
        poses: Sequence[Tensor | None] = [None] * len(x) if cond_states is None else cond_states
        rows = t.expand(len(x)).split(1)
        parts = x, rows, context, ref_latents, motion_latents, poses, audio_input.split(1)
        found = []
        for i, (sample, row, text, ref, motion, pose, sound) in enumerate(zip(*parts, strict=True)):
            self._check_frames(sample, ref, motion, pose, sound)
            grid = self.grid(sample.shape[1:])
            scene = self._scene(ref, None if drop_motion_frames else motion, grid)
            # The whole of it is the key: what `split` returns is a new tensor at every call.
            heard = self._sound(audio_input, sound, i, tuple(motion_frames))
            given = self._conditioning(scene, heard, pose, grid)
            at = step and replace(step, sample=i)
            found.append(self._forward(sample[None], row, [text], None, at, given)[0])
        return found

    def behind(self, layer: int) -> Sequence[nn.Module]:
        if layer not in self.injected:
            return ()
        place = self.injected[layer]
        injector: Any = self.audio_injector
        return injector["injector_adain_layers"][place], injector["injector"][place]

    def _conditioning(
        self, scene: _Scene, heard: _Heard, pose: Tensor | None, grid: Grid
    ) -> Conditioning:
        if pose is None:  # what the convolution makes of zeros
            bias = self.cond_encoder.bias
            assert bias is not None
            video = bias.float().expand(1, 1, -1)
        else:
            patches_BSK = patches(pose[None], self.patch_size)
            own = patches_BSK[:, scene.first : scene.first + scene.own]
            video = embedded(self.cond_encoder, own)
        frames, runs = own_frames(scene.first, scene.own, math.prod(grid[1:]))

        def after(layer: int) -> After:
            return lambda x_BLC, _: self._attend_to_sound(x_BLC, layer, heard, frames, runs)

        return Conditioning(
            rope=scene.rope,
            first=scene.first,
            own=scene.own,
            video=video + self._kind("video"),
            behind=scene.behind,
            standing=scene.standing,
            after={layer: after(layer) for layer in self.injected},
        )

    def _attend_to_sound(
        self, x_BLC: Tensor, layer: int, heard: _Heard, frames: range, runs: Sequence[int]
    ) -> Tensor:
        """Adds what each token of the video hears; the others stay."""
        modules: Any = self.behind(layer)
        adain, attention = modules
        known = heard.layers.get((layer, frames))
        modulation = adain(heard.whole) if known is None else known[0]
        own = slice(frames.start, frames.stop)
        shift_BRC, scale_BRC = modulation[None, own].chunk(2, dim=-1)
        dtype = attention.q.weight.dtype
        with trace.span("sound", layer=layer):
            x_BNC = x_BLC[:, : sum(runs)]
            y_BNC = x_BNC.to(dtype)
            if runs:
                y_BNC = self.ops.modulated_norm(x_BNC, shift_BRC, scale_BRC, runs, 1e-5, dtype)
            sound_TAC = heard.local.to(dtype)
            y_BNC, kv = attention(y_BNC, sound_TAC, None if known is None else known[1], own, runs)
        if heard.keeps:
            heard.layers[layer, frames] = modulation, kv
        return added(x_BLC, y_BNC)

    def _scene(self, ref: Tensor, motion: Tensor | None, grid: Grid) -> _Scene:
        """What the picture and the clip before become; from the cache where it is on."""
        make = partial(self._made_scene, ref, motion, grid)
        if self._scenes is None or torch.is_grad_enabled():
            return make()
        return self._scenes.once([ref, motion, grid, self.tokens], make)

    def _made_scene(self, ref: Tensor, motion: Tensor | None, grid: Grid) -> _Scene:
        _, rows, columns = grid
        tokens = embedded(self.patch_embedding, patches(ref[None], self.patch_size))
        parts = [tokens + self._kind("reference")]
        angles: list[Axes] = [(range(grid[0]), range(rows), range(columns))]
        angles.append(((REFERENCE_TIME,), range(rows), range(columns)))
        if motion is not None:
            known = motion[None, :, -MOTION_LATENTS:]
            missing = MOTION_LATENTS - known.shape[2]
            left, end = F.pad(known, (0, 0, 0, 0, missing, 0)), MOTION_LATENTS
            for name, count, size, times in _PACKED:
                of_part = patches(left[:, :, end - count : end], size)
                parts.append(embedded(self.frame_packer[name], of_part) + self._kind("motion"))  # type: ignore[arg-type]
                sides = (
                    spread(n // s, span)
                    for n, s, span in zip(motion.shape[2:], size[1:], (rows, columns), strict=True)
                )
                angles.append((times, *sides))
                end -= count
        behind_BMC = torch.cat(parts, dim=1)
        behind, video = behind_BMC.shape[1], math.prod(grid)
        head_dim = self.dim // self.num_heads
        cos, sin = tabulated(torch.cat([rope_angles(axes, head_dim) for axes in angles]))
        device = ref.device
        first, more = self.tokens.first(video + behind), self.tokens.valid(video + behind)
        own = self.tokens.runs((video, behind))[0]
        cos, sin = (self.tokens.shard(x[None], grid)[0].to(device) for x in (cos, sin))
        return _Scene(
            rope=(cos, sin),
            first=first,
            own=own,
            behind=behind,
            standing=behind_BMC[:, max(first + own - video, 0) : max(first + more - video, 0)],
        )

    def _sound(
        self, whole: Tensor, sound: Tensor, sample: int, motion_frames: tuple[int, ...]
    ) -> _Heard:
        """What the sound becomes; from the cache where it is on. whole: of all samples."""
        make = partial(self.casual_audio_encoder, sound[0], motion_frames)
        if self._sounds is None or torch.is_grad_enabled():
            return _Heard(False, *make())
        return self._sounds.once([whole, sample, motion_frames], lambda: _Heard(True, *make()))

    def _kind(self, name: str) -> Tensor:
        """What tells tokens of a kind from others, float32 [C]."""
        return self.trainable_cond_mask.weight[_KINDS[name]].float()

    def _check_frames(
        self, x: Tensor, ref: Tensor, motion: Tensor, pose: Tensor | None, sound: Tensor
    ) -> None:
        """Refuses conditions that do not fit the latents."""
        frames, sides = x.shape[1], x.shape[2:]
        shapes = {
            "ref_latents": (ref, (self.in_dim, 1, *sides)),
            "motion_latents": (motion, (self.in_dim, motion.shape[1], *sides)),
            "audio_input": (sound, (1, SOUND_LAYERS, self.casual_audio_encoder.dim_in, 4 * frames)),
        }
        if pose is not None:
            shapes["cond_states"] = pose, (self.cond_encoder.in_channels, frames, *sides)
        check_shapes(x, shapes)

    def forget_text(self) -> None:
        """Frees what is kept of the text, of the sound and of the scene."""
        super().forget_text()
        for cache in (self._scenes, self._sounds):
            if cache is not None:
                cache.clear()


@dataclass(frozen=True)
class _Scene:
    """What the reference picture, the clip before and the sizes become, on this device.

    Attributes:
        rope, first, own, behind, standing: As in `Conditioning`.
    """

    rope: RopeTable
    first: int
    own: int
    behind: int
    standing: Tensor


@dataclass
class _Heard:
    """A clip's sound as the network hears it.

    Attributes:
        keeps: Whether `layers` is filled.
        local: Tokens of each latent frame, [T,A,C].
        whole: One vector of each latent frame, [T,C].
        layers: Layer and this device's frames -> shift and scale of each frame of the clip, and the
            keys and values of this device's.
    """

    keeps: bool
    local: Tensor
    whole: Tensor
    layers: dict[tuple[int, range], tuple[Tensor, tuple[Tensor, Tensor]]] = field(
        default_factory=dict
    )


class AudioAttention(WanAttention):
    """Each token attends to the sound of its own frame; it knows no positions."""

    def __init__(self, sizes: BlockSizes, given: Collaborators) -> None:
        super().__init__(sizes, given)
        self.kernel = given.kernel

    def forward(
        self,
        x_BNC: Tensor,
        sound_TAC: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        frames: slice,
        runs: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What is added to the tokens, and the keys and values of these frames.

        Args:
            x_BNC: Tokens of the frames one after the other, of which there are `runs`; the first
                and the last frame may be on other devices in part.
            sound_TAC: The sound of all frames.
            kv: Keys and values of these frames, [T,A,N,D] each; None: they are computed.
            frames: Which frames of the clip these are.
            runs: How many tokens of each frame there are.
        """
        if not runs:  # all of the video's tokens are on other devices
            return x_BNC, (x_BNC, x_BNC)
        if kv is None:
            own_TAC = sound_TAC[frames]
            kv = self.keys(own_TAC), self.values(own_TAC)
        out_BNHD = attend_in_frames(self.kernel, self.queries(x_BNC), *kv, runs)
        return self.out(out_BNHD), kv


class AdaIn(nn.Module):
    """Shift and scale of each latent frame, in float32, from the sound: [T,C] to [T,2C]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, sound_TC: Tensor) -> Tensor:
        return fp32_linear(self.linear, F.silu(sound_TC))


class AudioEncoder(nn.Module):
    """Turns the sound's features into tokens of each latent frame, in float32."""

    def __init__(self, dim_in: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.dim_in, self.tokens = dim_in, tokens
        self.weights = nn.Parameter(torch.full((1, SOUND_LAYERS, 1, 1), 0.01))
        self.encoder = nn.Module()
        self.encoder.conv1_local = CausalConv(dim_in, dim // 4 * tokens)
        self.encoder.conv1_global = CausalConv(dim_in, dim // 4)
        self.encoder.conv2 = CausalConv(dim // 4, dim // 2, 2)
        self.encoder.conv3 = CausalConv(dim // 2, dim, 2)
        self.encoder.final_linear = nn.Linear(dim, dim)
        self.encoder.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(
        self, features_SCT: Tensor, motion_frames: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Tokens [T,A,C] and one vector [T,C] of each latent frame.

        Args:
            features_SCT: Of each of wav2vec2's layers S and each video frame.
            motion_frames: Video frames before the clip, for which its first one stands, and the
                latent frames that they become, which are left out.
        """
        before, left_out = motion_frames
        repeated = features_SCT[..., :1].expand(*features_SCT.shape[:-1], before)
        share_S11 = F.silu(self.weights[0].float())
        whole_SCT = torch.cat((repeated, features_SCT), dim=-1).float()
        x_CT = (whole_SCT * share_S11).sum(0) / share_S11.sum()
        encoder: Any = self.encoder
        local_ACT = encoder.conv1_local(x_CT[None]).unflatten(1, (self.tokens, -1))[0]
        local_ATC = self._rest(local_ACT)[:, left_out:]
        whole_TC = fp32_linear(
            encoder.final_linear, self._rest(encoder.conv1_global(x_CT[None]))[0, left_out:]
        )
        padding = encoder.padding_tokens.float()[0].expand(local_ATC.shape[1], 1, -1)
        return torch.cat((local_ATC.transpose(0, 1), padding), dim=1), whole_TC

    def _rest(self, x_BCT: Tensor) -> Tensor:
        """What both paths share behind their first convolution: [B,T,C] in, and out."""
        encoder: Any = self.encoder
        x_BTC = activated(x_BCT)
        for conv in (encoder.conv2, encoder.conv3):
            x_BTC = activated(conv(x_BTC.transpose(1, 2)))
        return x_BTC


def spread(count: int, span: int) -> list[int]:
    """Positions of `count` larger patches on an axis of `span` tokens, as officially."""
    return [0] if count == 1 else [i * (span - 1) // (count - 1) for i in range(count)]
