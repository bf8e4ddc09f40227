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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan import trace
from wan.kernels.base import StepInfo
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
from wan.modules.textcache import KeptByInput
from wan.settings.presets import FACE_EVERY, FACE_SIDE
from wan.settings.schedule import Grid

_BLUR = (1.0, 3.0, 3.0, 1.0)  # separable kernel of the motion encoder's blurs, times 8
_MOTIONS = 20  # motion directions of a face
_WIDTHS = (32, 64, 128, 256, 512, 512, 512, 512)  # channels of the motion encoder's levels
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
        collaborators: Collaborators | None = None,
        **config: Any,
    ) -> None:
        """Builds the network. use_context_parallel: ignored; `components` defines the ranks."""
        if not use_img_emb:
            raise ValueError(
                "use_img_emb is False; only networks with an image embedding are supported."
            )
        given = Collaborators() if collaborators is None else collaborators
        super().__init__(
            model_type,
            patch_size,
            text_len,
            in_dim,
            **config,
            image_dim=image_dim,
            collaborators=given,
        )
        if self.num_layers % FACE_EVERY:
            raise ValueError(
                f"num_layers is {self.num_layers}; it must be a multiple of {FACE_EVERY}."
            )
        dim = self.dim
        self.pose_patch_embedding = nn.Conv3d(16, dim, self.patch_size, self.patch_size)
        self.motion_encoder = MotionEncoder(motion_encoder_dim)
        self.face_encoder = FaceEncoder(motion_encoder_dim, dim)
        self.face_adapter = nn.Module()
        self.face_adapter.fuser_blocks = nn.ModuleList(
            FaceAttention(dim, self.num_heads, given) for _ in range(self.num_layers // FACE_EVERY)
        )
        self._faces = KeptByInput[_Seen](2) if given.text_kv_cache else None

    def forward(  # type: ignore[override]
        self,
        x: list[Tensor],
        t: Tensor,
        clip_fea: Tensor,
        context: list[Tensor],
        seq_len: int,
        y: list[Tensor],
        pose_latents: Tensor,
        face_pixel_values: Tensor,
        *,
        step: StepInfo | None = None,
    ) -> list[Tensor]:
        """Predicts velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [16, F, H, W] each; the first frame is the reference image.
            t: Timesteps 0..1000, [B].
            clip_fea: CLIP features of the reference image, [1, tokens, 1280].
            context: Prompt embeddings, [length <= text_len, text_dim] each.
            seq_len: Upper limit of the number of tokens; sequences are not padded to it.
            y: Masks and conditioning latents, [20, F, H, W] each.
            pose_latents: Latents of the pose video, [B, 16, F - 1, H, W].
            face_pixel_values: Face images in [-1, 1], [B, 3, 4 F - 7, 512, 512].
            step: Sampling step, expert and branch, for attention layers and caches.

        Raises:
            ValueError: The arguments do not fit each other or the network.
        """
        x = [torch.cat(pair, dim=0) for pair in zip(x, y, strict=True)]
        self._check(x, t, context, seq_len, y, clip_fea)
        rows, found = t.expand(len(x)).split(1), []
        parts = x, rows, context, pose_latents.split(1), face_pixel_values.split(1)
        for i, (sample, row, text, pose, faces) in enumerate(zip(*parts, strict=True)):
            self._check_frames(sample, pose, faces)
            grid = self.grid(sample.shape[1:])
            # The unsplit tensor is the cache key, because `split` returns a new tensor each time.
            seen = self._seen(face_pixel_values, faces, i)
            given, at = self._conditioning(seen, pose, grid), step and replace(step, sample=i)
            found.append(self._forward(sample[None], row, [text], clip_fea, at, given)[0])
        return found

    def behind(self, layer: int) -> Sequence[nn.Module]:
        blocks: Any = self.face_adapter.fuser_blocks
        return () if layer % FACE_EVERY else (blocks[layer // FACE_EVERY],)

    def _conditioning(self, seen: _Seen, pose: Tensor, grid: Grid) -> Conditioning:
        tokens, frame = math.prod(grid), math.prod(grid[1:])
        first, own = self.tokens.first(tokens), self.tokens.valid(tokens)
        rope = self.rope.get(grid, pose.device, self.tokens.shard)
        # The first frame, the reference image, has no pose.
        begin, end = (max(place - frame, 0) for place in (first, first + own))
        posed = patches(pose, self.patch_size)[:, begin:end]
        video = embedded(self.pose_patch_embedding, posed)
        video = F.pad(video, (0, 0, own - video.shape[1], 0))
        frames, runs = own_frames(first, own, frame)

        def after(layer: int) -> After:
            return lambda x_BLC, _: self._attend_to_face(x_BLC, layer, seen, frames, runs)

        layers = range(0, self.num_layers, FACE_EVERY)
        return Conditioning(
            rope, first, own, video, after={layer: after(layer) for layer in layers}
        )

    def _attend_to_face(
        self, x_BLC: Tensor, layer: int, seen: _Seen, frames: range, runs: Sequence[int]
    ) -> Tensor:
        """Adds the face attention of a layer to the video tokens; padding is not changed."""
        adapter: Any
        (adapter,) = self.behind(layer)
        with trace.span("face", layer=layer):
            x_BNC = x_BLC[:, : sum(runs)]
            known = seen.layers.get((layer, frames))
            y_BNC, kv = adapter(x_BNC, seen.tokens[frames.start : frames.stop], known, runs)
        if seen.keeps:
            seen.layers[layer, frames] = kv
        return added(x_BLC, y_BNC)

    def _seen(self, whole: Tensor, faces: Tensor, sample: int) -> _Seen:
        """Encodes the faces of a sample, or returns the cached features.

        all_faces: the faces of all samples, which are the cache key.
        """

        def make() -> Tensor:
            alike = faces.stride(2) == 0  # one image repeated, as in the uncond branch
            each = faces[:, :, :1] if alike else faces
            motion_PC = self.motion_encoder(each[0].transpose(0, 1))
            return self.face_encoder(motion_PC.expand(faces.shape[2], -1))

        if self._faces is None or torch.is_grad_enabled():
            return _Seen(False, make())
        return self._faces.once([whole, sample], lambda: _Seen(True, make()))

    def _check_frames(self, x: Tensor, pose: Tensor, faces: Tensor) -> None:
        """Raises ValueError if poses or faces do not fit the latents."""
        frames, sides = x.shape[1], x.shape[2:]
        pictures = 4 * (frames - 2) + 1
        shapes = {
            "pose_latents": (pose, (1, 16, frames - 1, *sides)),
            "face_pixel_values": (faces, (1, 3, pictures, FACE_SIDE, FACE_SIDE)),
        }
        check_shapes(x, shapes)

    def forget_text(self) -> None:
        """Frees the caches of the text and of the faces."""
        super().forget_text()
        if self._faces is not None:
            self._faces.clear()


@dataclass
class _Seen:
    """Face tokens of a clip and the cached keys and values of the face attention.

    Attributes:
        is_cacheable: Store keys and values in `kv_cache`.
        tokens: [T,A,C]; those of the reference image are zeros.
        kv_cache: (layer, this rank's frames) -> keys and values of these frames.
    """

    keeps: bool
    tokens: Tensor
    layers: dict[tuple[int, range], tuple[Tensor, Tensor]] = field(default_factory=dict)


class FaceAttention(nn.Module):
    """Cross-attention of each token to the face of its frame, without positions or modulation."""

    def __init__(self, dim: int, heads: int, given: Collaborators) -> None:
        super().__init__()
        self.heads, self.kernel = heads, given.kernel
        self.linear1_kv, self.linear1_q = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.linear2 = nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads, 1e-6) for _ in range(2))

    def forward(
        self,
        x_BNC: Tensor,
        face_TAC: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        runs: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the attention output, and the keys and values of the frames.

        Args:
            x_BNC: Video tokens on this rank, frame by frame, float32.
            face_TAC: Face tokens of these frames.
            kv: Cached keys and values, [T,A,H,D] each; None: they are computed.
            tokens_per_frame: Number of tokens of each frame on this rank.
        """
        if not runs:  # this rank has only padding
            return x_BNC, (x_BNC, x_BNC)
        dtype = self.linear2.weight.dtype
        if kv is None:
            k_TAC, v_TAC = self.linear1_kv(_normed(face_TAC).to(dtype)).chunk(2, dim=-1)
            kv = self._heads(k_TAC, self.k_norm), v_TAC.unflatten(-1, (self.heads, -1))
        q_BNHD = self._heads(self.linear1_q(_normed(x_BNC).to(dtype)), self.q_norm)
        out_BNHD = attend_in_frames(self.kernel, q_BNHD, *kv, runs)
        return self.linear2(out_BNHD.flatten(2)), kv

    def _heads(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Splits the channels into heads and normalizes each head in float32."""
        x = x.unflatten(-1, (self.heads, -1))
        normed = F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps)
        return normed.to(x.dtype)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class FaceEncoder(nn.Module):
    """Encodes the motion features of face images as tokens of each latent frame, in float32."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.conv1_local = CausalConv(dim_in, _FACE_DIM * _FACE_TOKENS)
        self.conv2, self.conv3 = (CausalConv(_FACE_DIM, _FACE_DIM, 2) for _ in range(2))
        self.out_proj = nn.Linear(_FACE_DIM, dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, motion_PC: Tensor) -> Tensor:
        """Encodes [P,C] as [T,A,C]; the first frame, the reference image, is zeros."""
        local = self.conv1_local(motion_PC.T[None]).unflatten(1, (_FACE_TOKENS, -1))[0]
        x_ATC = activated(local)
        for conv in (self.conv2, self.conv3):
            x_ATC = activated(conv(x_ATC.transpose(1, 2)))
        proj = self.out_proj
        faces_TAC = F.linear(x_ATC, proj.weight.float(), proj.bias.float()).transpose(0, 1)
        padding = self.padding_tokens.float()[0].expand(len(faces_TAC), 1, -1)
        whole_TAC = torch.cat((faces_TAC, padding), dim=1)
        return F.pad(whole_TAC, (0, 0, 0, 0, 1, 0))


class MotionEncoder(nn.Module):
    """Encodes the motion of each face image, in float32 (LIA, arXiv:2203.09043)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        first = nn.Sequential(_Scaled(3, _WIDTHS[0], 1), _Bias(_WIDTHS[0]))
        pairs = zip(_WIDTHS, _WIDTHS[1:], strict=False)
        self.enc = nn.Module()
        self.enc.net_app = nn.Module()
        self.enc.net_app.convs = nn.ModuleList(
            [first, *(_Half(i, o) for i, o in pairs), _Scaled(_WIDTHS[-1], dim, 4)]
        )
        self.enc.fc = nn.Sequential(
            *(_ScaledLinear(dim, dim) for _ in range(4)), _ScaledLinear(dim, _MOTIONS)
        )
        self.dec = nn.Module()
        self.dec.direction = nn.Module()
        self.dec.direction.weight = nn.Parameter(torch.randn(dim, _MOTIONS))

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        """Encodes face images as [P,C], one at a time: a whole video would take gigabytes."""
        enc: Any = self.enc
        directions = self.directions()
        found = []
        for face in faces_P3HW.split(1):
            x = face.float()
            for conv in enc.net_app.convs:
                x = conv(x)
            found.append(enc.fc(x.flatten(1)) @ directions.T.to(x.device))
        return torch.cat(found)

    def directions(self) -> Tensor:
        """Computes orthonormal motion directions [C,20], float32.

        The QR decomposition runs on the CPU, because its signs are those of LAPACK.
        """
        decoder: Any = self.dec
        weight = decoder.direction.weight.detach().float()
        if not weight.is_meta:  # on the meta device only the shape is needed
            weight = weight.cpu()
        return torch.linalg.qr(weight + 1e-8)[0]


class _Scaled(nn.Module):
    """A convolution without bias, with weights divided by the square root of the fan-in."""

    def __init__(self, dim_in: int, dim_out: int, side: int, stride: int = 1, pad: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim_out, dim_in, side, side))
        self.stride, self.pad, self.scale = stride, pad, (dim_in * side * side) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.float() * self.scale, None, self.stride, self.pad)


class _ScaledLinear(nn.Linear):
    """A linear layer in float32, with weights divided by the square root of the fan-in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.in_features**-0.5, self.bias.float())


class _Bias(nn.Module):
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

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict.pop(f"{prefix}kernel", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        kernel, channels = self.kernel(x.device), x.shape[1]
        each = kernel.expand(channels, 1, *kernel.shape)
        return F.conv2d(x, each, None, 1, self.pad, 1, channels)


class _Half(nn.Module):
    """A residual block that halves height and width."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(_Scaled(dim_in, dim_in, 3, pad=1), _Bias(dim_in))
        self.conv2 = nn.Sequential(_Blur(2), _Scaled(dim_in, dim_out, 3, 2), _Bias(dim_out))
        self.skip = nn.Sequential(_Blur(1), _Scaled(dim_in, dim_out, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv2(self.conv1(x)) + self.skip(x)) * 2**-0.5
