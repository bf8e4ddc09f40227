"""The network of Wan2.2 Animate, with the official names and forward signature: a moved character.

It is `WanModel` with image tokens, poses added to the video's tokens, and a second attention behind
every fifth block: each token attends to five tokens of the face of its own latent frame, so this
needs no exchange between devices. The first latent frame is the reference picture, whose face is
zeros. What depends on the clip alone is computed once where the text's keys and values are kept.

Legend: B batch (always 1), C channels, F H W latent frames/height/width, N the video's tokens on
this device, L all of this device, P pictures of a face, T latent frames, A tokens of a face.
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

_BLUR = (1.0, 3.0, 3.0, 1.0)  # rows and columns of the motion encoder's blurs, times 8
_MOTIONS = 20  # directions that a face's motion is made of
_WIDTHS = (32, 64, 128, 256, 512, 512, 512, 512)  # channels of the motion encoder, by halvings
_FACE_DIM, _FACE_TOKENS = 1024, 4  # channels of a face's tokens, and tokens of a latent frame
_IMAGE_DIM = 1280  # channels of CLIP's features


class WanAnimateModel(WanModel):
    """Predicts the flow velocity of noisy video latents, given a picture, poses and faces.

    The arguments are the official ones (config.json); ValueError for what no published network
    has. motion_encoder_dim: channels of a face's motion.
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
        """Builds the network. use_context_parallel: it has no effect; the ranks are given."""
        if not use_img_emb:
            raise ValueError(
                "use_img_emb is False; only networks that see a picture are supported."
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
        """Velocities, float32 [out_dim, F, H, W] for each sample.

        Args:
            x: Noisy latents, [16, F, H, W] each; the first frame is that of the reference.
            t: Timesteps 0..1000, [B].
            clip_fea: CLIP's features of the reference, [1, tokens, 1280].
            context: Text embeddings, [length <= text_len, text_dim] each.
            seq_len: The official padded length; it must hold the tokens; padding is not computed.
            y: Masks and known frames, [20, F, H, W] each.
            pose_latents: Of the pose video, [B, 16, F - 1, H, W].
            face_pixel_values: Faces in [-1, 1], [B, 3, 4 F - 7, 512, 512].
            step: Where in the run this call is, for attention layers and caches.

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
            # The whole of it is the key: what `split` returns is a new tensor at every call.
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
        # The reference picture, in front, has no pose.
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
        """Adds what each token sees of the face; padding stays."""
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
        """What the faces become; from the cache where it is on. whole: of all samples."""

        def make() -> Tensor:
            alike = faces.stride(2) == 0  # one picture all the time, as the second branch sees
            each = faces[:, :, :1] if alike else faces
            motion_PC = self.motion_encoder(each[0].transpose(0, 1))
            return self.face_encoder(motion_PC.expand(faces.shape[2], -1))

        if self._faces is None or torch.is_grad_enabled():
            return _Seen(False, make())
        return self._faces.once([whole, sample], lambda: _Seen(True, make()))

    def _check_frames(self, x: Tensor, pose: Tensor, faces: Tensor) -> None:
        """Refuses conditions that do not fit the latents."""
        frames, sides = x.shape[1], x.shape[2:]
        pictures = 4 * (frames - 2) + 1
        shapes = {
            "pose_latents": (pose, (1, 16, frames - 1, *sides)),
            "face_pixel_values": (faces, (1, 3, pictures, FACE_SIDE, FACE_SIDE)),
        }
        check_shapes(x, shapes)

    def forget_text(self) -> None:
        """Frees what is kept of the text and of the faces."""
        super().forget_text()
        if self._faces is not None:
            self._faces.clear()


@dataclass
class _Seen:
    """A clip's faces as the network sees them.

    Attributes:
        keeps: Whether `layers` is filled.
        tokens: Of each latent frame, [T,A,C]; those of the reference are zeros.
        layers: Layer and this device's frames -> the keys and values of these frames.
    """

    keeps: bool
    tokens: Tensor
    layers: dict[tuple[int, range], tuple[Tensor, Tensor]] = field(default_factory=dict)


class FaceAttention(nn.Module):
    """Each token attends to the face of its own frame; it knows no positions and no timestep."""

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
        """What is added to the tokens, and the keys and values of their frames.

        Args:
            x_BNC: Tokens of the frames one after the other, of which there are `runs`, float32.
            face_TAC: The face in these frames.
            kv: Its keys and values, [T,A,H,D] each; None: they are computed.
            runs: How many tokens of each frame there are.
        """
        if not runs:  # there is nothing but padding here
            return x_BNC, (x_BNC, x_BNC)
        dtype = self.linear2.weight.dtype
        if kv is None:
            k_TAC, v_TAC = self.linear1_kv(_normed(face_TAC).to(dtype)).chunk(2, dim=-1)
            kv = self._heads(k_TAC, self.k_norm), v_TAC.unflatten(-1, (self.heads, -1))
        q_BNHD = self._heads(self.linear1_q(_normed(x_BNC).to(dtype)), self.q_norm)
        out_BNHD = attend_in_frames(self.kernel, q_BNHD, *kv, runs)
        return self.linear2(out_BNHD.flatten(2)), kv

    def _heads(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Each head by itself, normalised in float32."""
        x = x.unflatten(-1, (self.heads, -1))
        normed = F.rms_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.eps)
        return normed.to(x.dtype)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class FaceEncoder(nn.Module):
    """Turns the motion of a face into tokens of each latent frame, in float32."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.conv1_local = CausalConv(dim_in, _FACE_DIM * _FACE_TOKENS)
        self.conv2, self.conv3 = (CausalConv(_FACE_DIM, _FACE_DIM, 2) for _ in range(2))
        self.out_proj = nn.Linear(_FACE_DIM, dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, motion_PC: Tensor) -> Tensor:
        """[T,A,C] of pictures [P,C]; the reference, zeros, stands in front."""
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
    """Tells the motion of each face from its picture, in float32 (LIA, arXiv:2203.09043)."""

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
        """[P,C], one picture at a time: a whole video would take gigabytes."""
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
        """[C,20] float32, orthonormal, with the signs of LAPACK's factorisation on the CPU."""
        decoder: Any = self.dec
        weight = decoder.direction.weight.detach().float()
        if not weight.is_meta:  # whose shapes alone are asked for
            weight = weight.cpu()
        return torch.linalg.qr(weight + 1e-8)[0]


class _Scaled(nn.Module):
    """A convolution without bias whose weights are divided by the root of their inputs."""

    def __init__(self, dim_in: int, dim_out: int, side: int, stride: int = 1, pad: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim_out, dim_in, side, side))
        self.stride, self.pad, self.scale = stride, pad, (dim_in * side * side) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.float() * self.scale, None, self.stride, self.pad)


class _ScaledLinear(nn.Linear):
    """A linear layer whose weights are divided by the root of their inputs, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.in_features**-0.5, self.bias.float())


class _Bias(nn.Module):
    """Adds a bias, and is then a leaky ReLU that keeps the variance."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x + self.bias.float(), 0.2) * 2**0.5


class _Blur(nn.Module):
    """A blur of each channel, before every second pixel is left out.

    Official files also hold its kernel, which is the same everywhere.
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
    """A residual block that halves the sides."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(_Scaled(dim_in, dim_in, 3, pad=1), _Bias(dim_in))
        self.conv2 = nn.Sequential(_Blur(2), _Scaled(dim_in, dim_out, 3, 2), _Bias(dim_out))
        self.skip = nn.Sequential(_Blur(1), _Scaled(dim_in, dim_out, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv2(self.conv1(x)) + self.skip(x)) * 2**-0.5
