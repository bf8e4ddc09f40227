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

from wan.kernels.forward_context import StepInfo
from wan.modules.blocks import BlockSizes, WanAttention, fp32_linear
from wan.modules.frame_attention import (
    CausalConv1d,
    add_to_video_tokens,
    apply_norm_silu,
    attend_in_frames,
    check_shapes,
    find_local_frames,
)
from wan.modules.interfaces import ModelComponents
from wan.modules.model import (
    BlockInputs,
    StreamConditioning,
    WanModel,
    embed_patches,
    extract_patches,
    split_samples,
)
from wan.modules.rope import GridPositions, compute_rope_angles, tabulate_rope_angles
from wan.modules.text_kv_cache import InputCache
from wan.settings.attention_modes import Grid
from wan.settings.sound import (
    AUDIO_LAYERS,
    FIXED_CONFIG,
    INJECT_LAYERS,
    MOTION_FRAMES,
    MOTION_LATENTS,
)
from wan.utils import trace

REFERENCE_POSITION = 30  # position of the reference image on the time axis
_TOKEN_TYPES = {"video": 0, "reference": 1, "motion": 2}  # rows of `trainable_cond_mask`
# Of motion latents, newest first: frames, patch size, positions on the time axis.
_MOTION_BUCKETS = (
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
        components: ModelComponents | None = None,
        **config: Any,
    ) -> None:
        """Builds the network. zero_init, motion_token_num: ignored."""
        fixed_config = {name: config.pop(name, value) for name, value in FIXED_CONFIG.items()} | {
            "cond_dim": cond_dim
        }
        for name, value in fixed_config.items():
            if value != FIXED_CONFIG[name]:
                raise ValueError(f"{name} is {value!r}; only {FIXED_CONFIG[name]!r} is supported.")
        components = ModelComponents() if components is None else components
        super().__init__(model_type, **config, components=components)
        self.injected = {layer: i for i, layer in enumerate(sorted(audio_inject_layers))}
        if max(self.injected, default=0) >= self.num_layers:
            raise ValueError(
                f"audio_inject_layers names layer {max(self.injected)}; the network has "
                f"{self.num_layers}."
            )
        dim, patch = self.dim, self.patch_size
        self.cond_encoder = nn.Conv3d(cond_dim, dim, patch, patch)
        self.trainable_cond_mask = nn.Embedding(len(_TOKEN_TYPES), dim)
        self.frame_packer = nn.ModuleDict(
            {name: nn.Conv3d(self.in_dim, dim, size, size) for name, _, size, _ in _MOTION_BUCKETS}
        )
        self.casual_audio_encoder = AudioEncoder(audio_dim, dim, num_audio_token)
        sizes = BlockSizes(dim, 0, self.num_heads, eps=config.get("eps", 1e-6))
        self.audio_injector = nn.ModuleDict(
            {
                "injector": nn.ModuleList(AudioAttention(sizes, components) for _ in self.injected),
                "injector_adain_layers": nn.ModuleList(AdaIn(dim) for _ in self.injected),
            }
        )
        self.ops = components.ops
        is_cached = components.text_kv_cache
        self._reference_cache = InputCache[StreamConditioning](is_cached, capacity=1)
        self._audio_cache = InputCache[_AudioTokens](is_cached)

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        context: list[Tensor],
        seq_len: int,
        ref_latents: list[Tensor],
        motion_latents: list[Tensor],
        cond_states: list[Tensor] | None,
        audio_input: Tensor | Sequence[Tensor],
        motion_frames: Sequence[int] = (MOTION_FRAMES, MOTION_LATENTS),
        add_last_motion: int = 2,
        drop_motion_frames: bool = False,
        *,
        step: StepInfo | Sequence[StepInfo] | None = None,
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
            audio_input: Audio features, [B, 25, audio_dim, 4 F], or [1, ...] of each sample.
            motion_frames: Number of video frames and of latent frames before the clip.
            add_last_motion: Ignored; only the official default is supported.
            drop_motion_frames: Do not use `motion_latents`.
            step: Sampling step, expert and branch, for attention layers and caches, of all samples
                or of each one.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        self._check_inputs(x, t, context, 1 << 60, None, None)
        poses: Sequence[Tensor | None] = [None] * len(x) if cond_states is None else cond_states
        audios = split_samples(audio_input)
        samples = [*zip(x, ref_latents, motion_latents, poses, audios, strict=True)]

        def make_conditioning(i: int) -> StreamConditioning:
            sample, ref, motion, pose, audio = samples[i]
            self._check_conditions(sample, ref, motion, pose, audio)
            grid = self.token_grid(sample.shape[1:])
            reference = self._get_reference_tokens(
                ref, None if drop_motion_frames else motion, grid
            )
            # The unsplit tensor is the cache key, because `split` returns a new tensor each time.
            key = audio_input if isinstance(audio_input, Tensor) else audio
            cache_key = key, i, tuple(motion_frames), grid, reference.num_extra_tokens
            audio_tokens = self._encode_audio(audio, cache_key)
            return self._make_conditioning(reference, audio_tokens, pose, grid)

        return self._run_samples(x, t.expand(len(x)), context, None, step, make_conditioning)

    def adapter_modules(self, layer: int) -> Sequence[nn.Module]:
        if layer not in self.injected:
            return ()
        index = self.injected[layer]
        injector: Any = self.audio_injector
        return injector["injector_adain_layers"][index], injector["injector"][index]

    def _make_conditioning(
        self,
        reference: StreamConditioning,
        audio_tokens: _AudioTokens,
        pose: Tensor | None,
        grid: Grid,
    ) -> StreamConditioning:
        if pose is None:  # the output of the convolution for zeros
            bias = self.cond_encoder.bias
            assert bias is not None
            pose_embedding = bias.float().expand(1, 1, -1)
        else:
            patches_BSK = extract_patches(pose[None], self.patch_size)
            pose_embedding = embed_patches(
                self.cond_encoder, patches_BSK[:, reference.local_video_tokens]
            )
        frames, tokens_per_frame = find_local_frames(
            reference.token_offset, reference.num_local_video_tokens, math.prod(grid[1:])
        )

        attend = partial(self._attend_to_audio, audio_tokens, frames, tokens_per_frame)
        return replace(
            reference,
            video_embedding=pose_embedding + self._token_type_embedding("video"),
            after_block={layer: partial(attend, layer) for layer in self.injected},
        )

    def _attend_to_audio(
        self,
        audio_tokens: _AudioTokens,
        frames: range,
        tokens_per_frame: Sequence[int],
        layer: int,
        x_BLC: Tensor,
        _: BlockInputs,
    ) -> Tensor:
        """Adds the audio attention of a layer to the video tokens; others are not changed."""
        modules: Any = self.adapter_modules(layer)
        adain, attention = modules
        cached = audio_tokens.kv_cache.get((layer, frames))
        modulation = adain(audio_tokens.audio_emb_global) if cached is None else cached[0]
        local_frames = slice(frames.start, frames.stop)
        shift_BRC, scale_BRC = modulation[None, local_frames].chunk(2, dim=-1)
        dtype = attention.q.weight.dtype
        with trace.span("sound", layer=layer):
            x_BNC = x_BLC[:, : sum(tokens_per_frame)]
            y_BNC = x_BNC.to(dtype)
            if tokens_per_frame:
                y_BNC = self.ops.modulated_norm(
                    x_BNC, shift_BRC, scale_BRC, tokens_per_frame, 1e-5, dtype
                )
            audio_TAC = audio_tokens.audio_emb.to(dtype)
            y_BNC, kv = attention(
                y_BNC,
                audio_TAC,
                None if cached is None else cached[1],
                local_frames,
                tokens_per_frame,
            )
        if self._audio_cache.is_active:
            audio_tokens.kv_cache[layer, frames] = modulation, kv
        return add_to_video_tokens(x_BLC, y_BNC)

    def _get_reference_tokens(
        self, ref: Tensor, motion: Tensor | None, grid: Grid
    ) -> StreamConditioning:
        """Returns the reference and motion tokens, computed once per clip if caching is on."""
        compute = partial(self._compute_reference_tokens, ref, motion, grid)
        return self._reference_cache.get_or_compute(
            [ref, motion, grid, self.sequence_shard], compute
        )

    def _compute_reference_tokens(
        self, ref: Tensor, motion: Tensor | None, grid: Grid
    ) -> StreamConditioning:
        _, rows, columns = grid
        tokens = embed_patches(self.patch_embedding, extract_patches(ref[None], self.patch_size))
        token_groups = [tokens + self._token_type_embedding("reference")]
        angles: list[GridPositions] = [(range(grid[0]), range(rows), range(columns))]
        angles.append(((REFERENCE_POSITION,), range(rows), range(columns)))
        if motion is not None:
            motion_BCFHW = motion[None, :, -MOTION_LATENTS:]
            num_missing = MOTION_LATENTS - motion_BCFHW.shape[2]
            padded_BCFHW, end = F.pad(motion_BCFHW, (0, 0, 0, 0, num_missing, 0)), MOTION_LATENTS
            for name, count, size, times in _MOTION_BUCKETS:
                bucket_patches_BSK = extract_patches(padded_BCFHW[:, :, end - count : end], size)
                token_groups.append(
                    embed_patches(self.frame_packer[name], bucket_patches_BSK)  # type: ignore[arg-type]
                    + self._token_type_embedding("motion")
                )
                positions = (
                    spread_positions(n // s, span)
                    for n, s, span in zip(motion.shape[2:], size[1:], (rows, columns), strict=True)
                )
                angles.append((times, *positions))
                end -= count
        extra_BMC = torch.cat(token_groups, dim=1)
        num_extra_tokens, num_video = extra_BMC.shape[1], math.prod(grid)
        head_dim = self.dim // self.num_heads
        cos, sin = tabulate_rope_angles(
            torch.cat([compute_rope_angles(axes, head_dim) for axes in angles])
        )
        device = ref.device
        offset = self.sequence_shard.get_local_offset(num_video + num_extra_tokens)
        num_valid = self.sequence_shard.count_valid_tokens(num_video + num_extra_tokens)
        num_local = self.sequence_shard.get_local_segment_lengths((num_video, num_extra_tokens))[0]
        cos, sin = (self.sequence_shard.shard(x[None], grid)[0].to(device) for x in (cos, sin))
        return StreamConditioning(
            rope=(cos, sin),
            token_offset=offset,
            num_local_video_tokens=num_local,
            num_extra_tokens=num_extra_tokens,
            extra_tokens=extra_BMC[
                :, max(offset + num_local - num_video, 0) : max(offset + num_valid - num_video, 0)
            ],
        )

    def _encode_audio(self, audio: Tensor, cache_key: tuple[Any, ...]) -> _AudioTokens:
        """Encodes the audio of a sample, or returns the cached tokens.

        cache_key: Equal on all ranks, and decides which frames each rank has: all ranks must find
            cached values, or none, as FSDP gathers the weights of a layer that computes them.
        """
        motion_frames = cache_key[2]

        def encode() -> _AudioTokens:
            return _AudioTokens(*self.casual_audio_encoder(audio[0], motion_frames))

        return self._audio_cache.get_or_compute(cache_key, encode)

    def _token_type_embedding(self, token_type: str) -> Tensor:
        """Learned embedding of a token type, float32 [C]."""
        return self.trainable_cond_mask.weight[_TOKEN_TYPES[token_type]].float()

    def _check_conditions(
        self, x: Tensor, ref: Tensor, motion: Tensor, pose: Tensor | None, audio: Tensor
    ) -> None:
        """Raises ValueError if images, poses or audio do not fit the latents."""
        num_frames, sides = x.shape[1], x.shape[2:]
        shapes = {
            "ref_latents": (ref, (self.in_dim, 1, *sides)),
            "motion_latents": (motion, (self.in_dim, motion.shape[1], *sides)),
            "audio_input": (
                audio,
                (1, AUDIO_LAYERS, self.casual_audio_encoder.dim_in, 4 * num_frames),
            ),
        }
        if pose is not None:
            shapes["cond_states"] = pose, (self.cond_encoder.in_channels, num_frames, *sides)
        check_shapes(x, shapes)


@dataclass
class _AudioTokens:
    """Audio tokens of a clip and the cached values of the audio attention.

    Attributes:
        audio_emb: Tokens of each latent frame, [T,A,C].
        audio_emb_global: One vector of each latent frame, [T,C].
        kv_cache: (layer, this rank's frames) -> shift and scale of all frames, and keys and values
            of this rank's frames.
    """

    audio_emb: Tensor
    audio_emb_global: Tensor
    kv_cache: dict[tuple[int, range], tuple[Tensor, tuple[Tensor, Tensor]]] = field(
        default_factory=dict
    )


class AudioAttention(WanAttention):
    """Cross-attention of each token to the audio of its frame, without positions."""

    def __init__(self, sizes: BlockSizes, components: ModelComponents) -> None:
        super().__init__(sizes, components)
        self.kernel = components.cross_attention_kernel

    def forward(
        self,
        x_BNC: Tensor,
        audio_TAC: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        frames: slice,
        tokens_per_frame: Sequence[int],
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
        if not tokens_per_frame:  # this rank has no video tokens
            return x_BNC, (x_BNC, x_BNC)
        if kv is None:
            local_TAC = audio_TAC[frames]
            kv = self.project_k(local_TAC), self.project_v(local_TAC)
        out_BNHD = attend_in_frames(self.kernel, self.project_q(x_BNC), *kv, tokens_per_frame)
        return self.project_out(out_BNHD), kv


class AdaIn(nn.Module):
    """Computes shift and scale of each latent frame from the audio, [T,C] to [T,2C], in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, audio_TC: Tensor) -> Tensor:
        return fp32_linear(self.linear, F.silu(audio_TC))


class AudioEncoder(nn.Module):
    """Encodes audio features as tokens of each latent frame, in float32."""

    def __init__(self, dim_in: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.dim_in, self.tokens = dim_in, tokens
        self.weights = nn.Parameter(torch.full((1, AUDIO_LAYERS, 1, 1), 0.01))
        self.encoder = nn.Module()
        self.encoder.conv1_local = CausalConv1d(dim_in, dim // 4 * tokens)
        self.encoder.conv1_global = CausalConv1d(dim_in, dim // 4)
        self.encoder.conv2 = CausalConv1d(dim // 4, dim // 2, 2)
        self.encoder.conv3 = CausalConv1d(dim // 2, dim, 2)
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
        num_motion_frames, num_motion_latents = motion_frames
        repeated = features_SCT[..., :1].expand(*features_SCT.shape[:-1], num_motion_frames)
        weights_S11 = F.silu(self.weights[0].float())
        padded_SCT = torch.cat((repeated, features_SCT), dim=-1).float()
        x_CT = (padded_SCT * weights_S11).sum(0) / weights_S11.sum()
        encoder: Any = self.encoder
        local_ACT = encoder.conv1_local(x_CT[None]).unflatten(1, (self.tokens, -1))[0]
        local_ATC = self._apply_shared_convs(local_ACT)[:, num_motion_latents:]
        global_TC = fp32_linear(
            encoder.final_linear,
            self._apply_shared_convs(encoder.conv1_global(x_CT[None]))[0, num_motion_latents:],
        )
        padding = encoder.padding_tokens.float()[0].expand(local_ATC.shape[1], 1, -1)
        return torch.cat((local_ATC.transpose(0, 1), padding), dim=1), global_TC

    def _apply_shared_convs(self, x_BCT: Tensor) -> Tensor:
        """Applies the norms and convolutions after the first one; [B,C,T] to [B,T/4,C]."""
        encoder: Any = self.encoder
        x_BTC = apply_norm_silu(x_BCT)
        for conv in (encoder.conv2, encoder.conv3):
            x_BTC = apply_norm_silu(conv(x_BTC.transpose(1, 2)))
        return x_BTC


def spread_positions(count: int, span: int) -> list[int]:
    """Spreads `count` larger patches over an axis of `span` tokens as the official code does."""
    return [0] if count == 1 else [i * (span - 1) // (count - 1) for i in range(count)]
