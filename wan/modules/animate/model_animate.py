"""The network of Wan2.2 Animate, with the official names and forward signature.

It is `WanModel` with CLIP image tokens, a pose embedding that is added to the video tokens, and
face attention after every fifth block: each token attends to the five face tokens of its latent
frame, which needs no communication between ranks. The first latent frame is the reference image,
whose face tokens are zeros. Face features and their keys and values are computed once per clip if
`text_kv_cache` is on.

Legend: B batch (always 1), C channels, F H W latent frames/height/width, N the video's tokens on
this rank, L all tokens on this rank, H heads, D head size, P face images, T latent frames, A tokens
of a face.
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
from wan.modules.text_kv_cache import InputCache
from wan.settings.attention_modes import Grid
from wan.settings.presets import FACE_BLOCK_INTERVAL, FACE_SIZE
from wan.utils import trace

_BLUR = (1.0, 3.0, 3.0, 1.0)  # separable kernel of the motion encoder's blurs, times 8
_MOTION_DIM = 20  # motion directions of a face
_MOTION_WIDTHS = (32, 64, 128, 256, 512, 512, 512, 512)  # channels of the motion encoder's levels
_FACE_DIM, _FACE_TOKENS = 1024, 4  # channels and number of face tokens
_IMAGE_DIM = 1280  # channels of CLIP features


class WanAnimateModel(WanModel):
    """Predicts the flow velocity of noisy video latents from a reference image, poses and faces.

    The arguments are those of the official config.json.

    Args:
        motion_encoder_dim: Channels of the motion features of a face.

    Raises:
        ValueError: The configuration is not that of a published network.
    """

    def __init__(
        self,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        text_len: int = 512,
        in_dim: int = 36,
        *,
        motion_encoder_dim: int = 512,
        use_context_parallel: bool = False,
        use_img_emb: bool = True,
        model_type: str = "animate",
        image_dim: int = _IMAGE_DIM,
        components: ModelComponents | None = None,
        **config: Any,
    ) -> None:
        """Builds the network. use_context_parallel: ignored; `components` defines the ranks."""
        if not use_img_emb:
            raise ValueError(
                "use_img_emb is False; only networks with an image embedding are supported."
            )
        components = ModelComponents() if components is None else components
        super().__init__(
            model_type,
            patch_size,
            text_len,
            in_dim,
            **config,
            image_dim=image_dim,
            components=components,
        )
        if self.num_layers % FACE_BLOCK_INTERVAL:
            raise ValueError(
                f"num_layers is {self.num_layers}; it must be a multiple of {FACE_BLOCK_INTERVAL}."
            )
        dim = self.dim
        self.pose_patch_embedding = nn.Conv3d(16, dim, self.patch_size, self.patch_size)
        self.motion_encoder = MotionEncoder(motion_encoder_dim)
        self.face_encoder = FaceEncoder(motion_encoder_dim, dim)
        self.face_adapter = nn.Module()
        self.face_adapter.fuser_blocks = nn.ModuleList(
            FaceAttention(dim, self.num_heads, components)
            for _ in range(self.num_layers // FACE_BLOCK_INTERVAL)
        )
        self._face_cache = InputCache[_FaceFeatures](components.text_kv_cache)

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        clip_fea: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor],
        pose_latents: Tensor | Sequence[Tensor],
        face_pixel_values: Tensor | Sequence[Tensor],
        *,
        step: StepInfo | Sequence[StepInfo] | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [16, F, H, W] each; the first frame is the reference image.
            t: Timesteps 0..1000, [B].
            clip_fea: CLIP features of the reference image, [1, tokens, 1280].
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            y: Masks and conditioning latents, [20, F, H, W] each.
            pose_latents: Latents of the pose video, [B, 16, F - 1, H, W], or [1, ...] of each
                sample.
            face_pixel_values: Face images in [-1, 1], [B, 3, 4 F - 7, 512, 512], or [1, ...] of
                each sample.
            step: Sampling step, expert and branch, for attention layers and caches, of all samples
                or of each one.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        x = [torch.cat(pair, dim=0) for pair in zip(x, y, strict=True)]
        self._check_inputs(x, t, context, seq_len, y, clip_fea)
        poses, all_faces = split_samples(pose_latents), split_samples(face_pixel_values)
        samples = [*zip(x, poses, all_faces, strict=True)]

        def make_conditioning(i: int) -> StreamConditioning:
            sample, pose, faces = samples[i]
            self._check_conditions(sample, pose, faces)
            # The unsplit tensor is the cache key, because `split` returns a new tensor each time.
            key = face_pixel_values if isinstance(face_pixel_values, Tensor) else faces
            face_features = self._encode_faces(key, faces, i)
            return self._make_conditioning(face_features, pose, self.token_grid(sample.shape[1:]))

        return self._run_samples(x, t.expand(len(x)), context, clip_fea, step, make_conditioning)

    def adapter_modules(self, layer: int) -> Sequence[nn.Module]:
        blocks: Any = self.face_adapter.fuser_blocks
        return () if layer % FACE_BLOCK_INTERVAL else (blocks[layer // FACE_BLOCK_INTERVAL],)

    def _make_conditioning(
        self, face_features: _FaceFeatures, pose: Tensor, grid: Grid
    ) -> StreamConditioning:
        frame_size, stream = math.prod(grid[1:]), self._make_stream(grid, pose.device)
        offset, num_local = stream.token_offset, stream.num_local_video_tokens
        # The first frame, the reference image, has no pose.
        begin, end = (max(token - frame_size, 0) for token in (offset, offset + num_local))
        pose_patches_BSK = extract_patches(pose, self.patch_size)[:, begin:end]
        pose_embedding = embed_patches(self.pose_patch_embedding, pose_patches_BSK)
        pose_embedding = F.pad(pose_embedding, (0, 0, num_local - pose_embedding.shape[1], 0))
        frames, tokens_per_frame = find_local_frames(offset, num_local, frame_size)

        attend = partial(self._attend_to_face, face_features, frames, tokens_per_frame)
        layers = range(0, self.num_layers, FACE_BLOCK_INTERVAL)
        hooks = {layer: partial(attend, layer) for layer in layers}
        return replace(stream, video_embedding=pose_embedding, after_block=hooks)

    def _attend_to_face(
        self,
        face_features: _FaceFeatures,
        frames: range,
        tokens_per_frame: Sequence[int],
        layer: int,
        x_BLC: Tensor,
        _: BlockInputs,
    ) -> Tensor:
        """Adds the face attention of a layer to the video tokens; padding is not changed."""
        adapter: Any
        (adapter,) = self.adapter_modules(layer)
        with trace.span("face", layer=layer):
            x_BNC = x_BLC[:, : sum(tokens_per_frame)]
            cached_kv = face_features.kv_cache.get((layer, frames))
            y_BNC, kv = adapter(
                x_BNC, face_features.tokens[frames.start : frames.stop], cached_kv, tokens_per_frame
            )
        if self._face_cache.is_active:
            face_features.kv_cache[layer, frames] = kv
        return add_to_video_tokens(x_BLC, y_BNC)

    def _encode_faces(self, all_faces: Tensor, faces: Tensor, sample: int) -> _FaceFeatures:
        """Encodes the faces of a sample, or returns the cached features.

        all_faces: the faces of all samples, which are the cache key.
        """

        def encode() -> _FaceFeatures:
            is_constant = faces.stride(2) == 0  # one image repeated, as in the uncond branch
            distinct_faces = faces[:, :, :1] if is_constant else faces
            motion_PC = self.motion_encoder(distinct_faces[0].transpose(0, 1))
            return _FaceFeatures(self.face_encoder(motion_PC.expand(faces.shape[2], -1)))

        return self._face_cache.get_or_compute([all_faces, sample], encode)

    def _check_conditions(self, x: Tensor, pose: Tensor, faces: Tensor) -> None:
        """Raises ValueError if poses or faces do not fit the latents."""
        num_frames, sides = x.shape[1], x.shape[2:]
        num_faces = 4 * (num_frames - 2) + 1
        shapes = {
            "pose_latents": (pose, (1, 16, num_frames - 1, *sides)),
            "face_pixel_values": (faces, (1, 3, num_faces, FACE_SIZE, FACE_SIZE)),
        }
        check_shapes(x, shapes)


@dataclass
class _FaceFeatures:
    """Face tokens of a clip and the cached keys and values of the face attention.

    Attributes:
        tokens: [T,A,C]; those of the reference image are zeros.
        kv_cache: (layer, this rank's frames) -> keys and values of these frames.
    """

    tokens: Tensor
    kv_cache: dict[tuple[int, range], tuple[Tensor, Tensor]] = field(default_factory=dict)


class FaceAttention(nn.Module):
    """Cross-attention of each token to the face of its frame, without positions or modulation."""

    def __init__(self, dim: int, heads: int, components: ModelComponents) -> None:
        super().__init__()
        self.heads, self.kernel = heads, components.cross_attention_kernel
        self.linear1_kv, self.linear1_q = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.linear2 = nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads, 1e-6) for _ in range(2))

    def forward(
        self,
        x_BNC: Tensor,
        face_TAC: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        tokens_per_frame: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the attention output, and the keys and values of the frames.

        Args:
            x_BNC: Video tokens on this rank, frame by frame, float32.
            face_TAC: Face tokens of these frames.
            kv: Cached keys and values, [T,A,H,D] each; None: they are computed.
            tokens_per_frame: Number of tokens of each frame on this rank.
        """
        if not tokens_per_frame:  # this rank has only padding
            return x_BNC, (x_BNC, x_BNC)
        dtype = self.linear2.weight.dtype
        if kv is None:
            k_TAC, v_TAC = self.linear1_kv(_normalize_channels(face_TAC).to(dtype)).chunk(2, dim=-1)
            kv = self._split_heads(k_TAC, self.k_norm), v_TAC.unflatten(-1, (self.heads, -1))
        q_BNHD = self._split_heads(
            self.linear1_q(_normalize_channels(x_BNC).to(dtype)), self.q_norm
        )
        out_BNHD = attend_in_frames(self.kernel, q_BNHD, *kv, tokens_per_frame)
        return self.linear2(out_BNHD.flatten(2)), kv

    def _split_heads(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Splits the channels into heads and normalizes each head in float32."""
        x = x.unflatten(-1, (self.heads, -1))
        normed = F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps)
        return normed.to(x.dtype)


def _normalize_channels(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class FaceEncoder(nn.Module):
    """Encodes the motion features of face images as tokens of each latent frame, in float32."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.conv1_local = CausalConv1d(dim_in, _FACE_DIM * _FACE_TOKENS)
        self.conv2, self.conv3 = (CausalConv1d(_FACE_DIM, _FACE_DIM, 2) for _ in range(2))
        self.out_proj = nn.Linear(_FACE_DIM, dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, motion_PC: Tensor) -> Tensor:
        """Encodes [P,C] as [T,A,C]; the first frame, the reference image, is zeros."""
        local = self.conv1_local(motion_PC.T[None]).unflatten(1, (_FACE_TOKENS, -1))[0]
        x_ATC = apply_norm_silu(local)
        for conv in (self.conv2, self.conv3):
            x_ATC = apply_norm_silu(conv(x_ATC.transpose(1, 2)))
        proj = self.out_proj
        faces_TAC = F.linear(x_ATC, proj.weight.float(), proj.bias.float()).transpose(0, 1)
        padding = self.padding_tokens.float()[0].expand(len(faces_TAC), 1, -1)
        tokens_TAC = torch.cat((faces_TAC, padding), dim=1)
        return F.pad(tokens_TAC, (0, 0, 0, 0, 1, 0))


class MotionEncoder(nn.Module):
    """Encodes the motion of each face image, in float32 (LIA, arXiv:2203.09043)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        first = nn.Sequential(
            _EqualConv2d(3, _MOTION_WIDTHS[0], 1), _FusedLeakyReLU(_MOTION_WIDTHS[0])
        )
        pairs = zip(_MOTION_WIDTHS, _MOTION_WIDTHS[1:], strict=False)
        self.enc = nn.Module()
        self.enc.net_app = nn.Module()
        self.enc.net_app.convs = nn.ModuleList(
            [first, *(_ResBlock(i, o) for i, o in pairs), _EqualConv2d(_MOTION_WIDTHS[-1], dim, 4)]
        )
        self.enc.fc = nn.Sequential(
            *(_EqualLinear(dim, dim) for _ in range(4)), _EqualLinear(dim, _MOTION_DIM)
        )
        self.dec = nn.Module()
        self.dec.direction = nn.Module()
        self.dec.direction.weight = nn.Parameter(torch.randn(dim, _MOTION_DIM))

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        """Encodes face images as [P,C], one at a time: a whole video would take gigabytes."""
        enc: Any = self.enc
        directions = self.compute_directions()
        motions = []
        for face in faces_P3HW.split(1):
            x = face.float()
            for conv in enc.net_app.convs:
                x = conv(x)
            motions.append(enc.fc(x.flatten(1)) @ directions.T.to(x.device))
        return torch.cat(motions)

    def compute_directions(self) -> Tensor:
        """Computes orthonormal motion directions [C,20], float32.

        The QR decomposition runs on the CPU, because its signs are those of LAPACK.
        """
        decoder: Any = self.dec
        weight = decoder.direction.weight.detach().float()
        if not weight.is_meta:  # on the meta device only the shape is needed
            weight = weight.cpu()
        return torch.linalg.qr(weight + 1e-8)[0]


class _EqualConv2d(nn.Module):
    """A convolution without bias, with weights divided by the square root of the fan-in."""

    def __init__(self, dim_in: int, dim_out: int, side: int, stride: int = 1, pad: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim_out, dim_in, side, side))
        self.stride, self.pad, self.scale = stride, pad, (dim_in * side * side) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.float() * self.scale, None, self.stride, self.pad)


class _EqualLinear(nn.Linear):
    """A linear layer in float32, with weights divided by the square root of the fan-in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.in_features**-0.5, self.bias.float())


class _FusedLeakyReLU(nn.Module):
    """Adds a bias and applies a leaky ReLU scaled by sqrt(2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x + self.bias.float(), 0.2) * 2**0.5


class _Blur(nn.Module):
    """Blurs each channel before downsampling.

    Official checkpoints also contain the kernel, which is constant.
    """

    def __init__(self, pad: int) -> None:
        super().__init__()
        self.pad = pad

    def kernel(self, device: torch.device) -> Tensor:
        row = torch.tensor(_BLUR, device=device)
        return torch.outer(row, row) / 64

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}kernel"] = self.kernel(torch.device("cpu"))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}kernel", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        kernel, channels = self.kernel(x.device), x.shape[1]
        weight = kernel.expand(channels, 1, *kernel.shape)
        return F.conv2d(x, weight, None, 1, self.pad, 1, channels)


class _ResBlock(nn.Module):
    """A residual block that halves height and width."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(_EqualConv2d(dim_in, dim_in, 3, pad=1), _FusedLeakyReLU(dim_in))
        self.conv2 = nn.Sequential(
            _Blur(2), _EqualConv2d(dim_in, dim_out, 3, 2), _FusedLeakyReLU(dim_out)
        )
        self.skip = nn.Sequential(_Blur(1), _EqualConv2d(dim_in, dim_out, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv2(self.conv1(x)) + self.skip(x)) * 2**-0.5
