"""The network of Wan2.2 S2V, with the official names and forward signature.

It is `WanModel` with extra tokens and audio attention. The tokens of the reference image and of the
last frames of the previous clip (motion tokens) are appended to the video tokens, at timestep 0 and
with separate rotary positions. After some blocks each video token attends to the audio of its
latent frame, which needs no communication between ranks. A pose video is embedded and added to the
video tokens. Extra tokens, audio tokens and their keys and values are computed once per clip if
`text_kv_cache` is on.

Legend: B batch (always 1), C channels, F H W latent frames/height/width, N the video's tokens on
this rank, M extra tokens, L all tokens on this rank, S layers of wav2vec2, T audio steps or latent
frames, A audio tokens of a latent frame, R latent frames with tokens on this rank.
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

REFERENCE_TIME = 30  # position of the reference image on the time axis
_KINDS = {"video": 0, "reference": 1, "motion": 2}  # rows of `trainable_cond_mask`
_PACKED = (  # of motion latents, newest first: frames, patch size, positions on the time axis
    ("proj", 1, (1, 2, 2), (-1,)),
    ("proj_2x", 2, (2, 4, 4), (-3,)),
    ("proj_4x", 16, (4, 8, 8), (-19, -14, -9, -4)),
)


class WanModel_S2V(WanModel):  # noqa: N801 (the official name)
    """Predicts the flow velocity of noisy video latents from audio, a reference image and poses.

    The arguments are those of the official config.json.

    Args:
        audio_dim: Channels of the audio features.
        num_audio_token: Audio tokens of a latent frame, without the learned padding token.
        audio_inject_layers: Layers after which video tokens attend to the audio.

    Raises:
        ValueError: The configuration is not that of a published network.
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
        """Builds the network. zero_init, motion_token_num: ignored."""
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
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [C, F, H, W] each.
            t: Timesteps 0..1000, [B].
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Ignored, as in the official model.
            ref_latents: Latents of the reference image, [C, 1, H, W] each.
            motion_latents: Latents of the last frames of the previous clip, [C, any, H, W] each.
            cond_states: Latents of the pose video, [C, F, H, W] each; None: zeros.
            audio_input: Audio features, [B, 25, audio_dim, 4 F].
            motion_frames: Number of video frames and of latent frames before the clip.
            add_last_motion: Ignored; only the official default is supported.
            drop_motion_frames: Do not use `motion_latents`.
            step: Sampling step, expert and branch, for attention layers and caches.

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
            # The unsplit tensor is the cache key, because `split` returns a new tensor each time.
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
        if pose is None:  # the output of the convolution for zeros
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
        """Adds the audio attention of a layer to the video tokens; others are not changed."""
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
        """Returns the reference and motion tokens, computed once per clip if caching is on."""
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
        """Encodes the audio of a sample, or returns the cached tokens.

        all_audio: the audio of all samples, which is the cache key.
        """
        make = partial(self.casual_audio_encoder, sound[0], motion_frames)
        if self._sounds is None or torch.is_grad_enabled():
            return _Heard(False, *make())
        return self._sounds.once([whole, sample, motion_frames], lambda: _Heard(True, *make()))

    def _kind(self, name: str) -> Tensor:
        """Learned embedding of a token type, float32 [C]."""
        return self.trainable_cond_mask.weight[_KINDS[name]].float()

    def _check_frames(
        self, x: Tensor, ref: Tensor, motion: Tensor, pose: Tensor | None, sound: Tensor
    ) -> None:
        """Raises ValueError if images, poses or audio do not fit the latents."""
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
        """Frees the caches of the text, the audio, and the reference and motion tokens."""
        super().forget_text()
        for cache in (self._scenes, self._sounds):
            if cache is not None:
                cache.clear()


@dataclass(frozen=True)
class _Scene:
    """This rank's reference and motion tokens, and its RoPE table; see `StreamConditioning`."""

    rope: RopeTable
    first: int
    own: int
    behind: int
    standing: Tensor


@dataclass
class _Heard:
    """Audio tokens of a clip and the cached values of the audio attention.

    Attributes:
        is_cacheable: Store values in `kv_cache`.
        audio_emb: Tokens of each latent frame, [T,A,C].
        audio_emb_global: One vector of each latent frame, [T,C].
        kv_cache: (layer, this rank's frames) -> shift and scale of all frames, and keys and values
            of this rank's frames.
    """

    keeps: bool
    local: Tensor
    whole: Tensor
    layers: dict[tuple[int, range], tuple[Tensor, tuple[Tensor, Tensor]]] = field(
        default_factory=dict
    )


class AudioAttention(WanAttention):
    """Cross-attention of each token to the audio of its frame, without positions."""

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
        """Returns the attention output, and the keys and values of this rank's frames.

        Args:
            x_BNC: Video tokens on this rank, frame by frame; the first and the last frame may be
                partly on other ranks.
            audio_TAC: Audio tokens of all frames.
            kv: Cached keys and values of this rank's frames, [T,A,heads,D] each; None: they are
                computed.
            frames: This rank's frames.
            tokens_per_frame: Number of tokens of each frame on this rank.
        """
        if not runs:  # this rank has no video tokens
            return x_BNC, (x_BNC, x_BNC)
        if kv is None:
            own_TAC = sound_TAC[frames]
            kv = self.keys(own_TAC), self.values(own_TAC)
        out_BNHD = attend_in_frames(self.kernel, self.queries(x_BNC), *kv, runs)
        return self.out(out_BNHD), kv


class AdaIn(nn.Module):
    """Computes shift and scale of each latent frame from the audio, [T,C] to [T,2C], in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, sound_TC: Tensor) -> Tensor:
        return fp32_linear(self.linear, F.silu(sound_TC))


class AudioEncoder(nn.Module):
    """Encodes audio features as tokens of each latent frame, in float32."""

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
        """Returns tokens [T,A,C] and one vector [T,C] of each latent frame.

        Args:
            features_SCT: Features of each wav2vec2 layer and video frame.
            motion_frames: Number of video frames before the clip, for which the features of its
                first frame are repeated, and of their latent frames, which are dropped.
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
        """Applies the norms and convolutions after the first one; [B,C,T] to [B,T/4,C]."""
        encoder: Any = self.encoder
        x_BTC = activated(x_BCT)
        for conv in (encoder.conv2, encoder.conv3):
            x_BTC = activated(conv(x_BTC.transpose(1, 2)))
        return x_BTC


def spread(count: int, span: int) -> list[int]:
    """Spreads `count` larger patches over an axis of `span` tokens as the official code does."""
    return [0] if count == 1 else [i * (span - 1) // (count - 1) for i in range(count)]
