"""Animate's network against a plain float64 implementation, without official tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.plain import (
    PlainNetwork,
    Weights,
    attention,
    normalize,
    raster,
    rms,
    silu,
    tiny,
)
from tests.refusals import check_refusals, get_refusal
from wan.modules.animate.model_animate import MotionEncoder, WanAnimateModel
from wan.modules.interfaces import ModelComponents

HEADS, TEXT_LEN, FREQ, LAYERS = 4, 6, 16, 10
SIZES = {"dim": 48, "ffn_dim": 40, "freq_dim": FREQ, "num_heads": HEADS, "num_layers": LAYERS}
TEXT = {"text_dim": 8, "text_len": TEXT_LEN, "image_dim": 10}


class PoolingMotionEncoder(nn.Module):
    """Replaces the motion encoder, which takes a second for each image."""

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(faces_P3HW, (1, 171)).flatten(1)[:, :512]


def make_network(**components: Any) -> Any:
    model_components = ModelComponents(**components)
    with mock.patch(
        "wan.modules.animate.model_animate.MotionEncoder", lambda _: PoolingMotionEncoder()
    ):
        return tiny(lambda: WanAnimateModel(**SIZES, **TEXT, components=model_components))


class PlainAnimate(PlainNetwork):
    """The official forward, sections 3 and 4 of its description."""

    def __init__(self, model: Any = None) -> None:
        super().__init__(model or make_network(), HEADS, TEXT_LEN)

    def image(self, features: Tensor) -> Tensor:
        w, name = self.weights, "img_emb.proj"
        x = normalize(features.double(), 1e-5) * w[f"{name}.0.weight"] + w[f"{name}.0.bias"]
        x = w.linear(f"{name}.3", F.gelu(w.linear(f"{name}.1", x)))
        return normalize(x, 1e-5) * w[f"{name}.4.weight"] + w[f"{name}.4.bias"]

    def faces(self, motion_PC: Tensor) -> Tensor:
        """Return five face tokens of each latent frame, [F,5,C]; zeros for the reference frame."""
        w, tokens_by_head = self.weights, []
        for group in w.causal("face_encoder.conv1_local", motion_PC.double()).chunk(4, dim=1):
            x = silu(normalize(group))
            for conv in ("conv2", "conv3"):
                x = silu(normalize(w.causal(f"face_encoder.{conv}", x, stride=2)))
            tokens_by_head.append(w.linear("face_encoder.out_proj", x))
        tokens_by_head.append(
            w["face_encoder.padding_tokens"].reshape(1, -1).expand_as(tokens_by_head[0])
        )
        tokens = torch.stack(tokens_by_head, dim=1)
        return torch.cat((torch.zeros_like(tokens[:1]), tokens))

    def adapter(self, number: int, x: Tensor, faces: Tensor) -> Tensor:
        """Return each frame's cross-attention to the face tokens of the same frame."""
        w, name, outputs = self.weights, f"face_adapter.fuser_blocks.{number}", []

        def each_head(x: Tensor, norm: str) -> Tensor:
            parts = x.unflatten(-1, (HEADS, -1))
            return rms(parts, w[f"{name}.{norm}.weight"]).flatten(-2)

        for tokens, face in zip(x.chunk(len(faces)), faces, strict=True):
            k, v = w.linear(f"{name}.linear1_kv", normalize(face)).chunk(2, dim=-1)
            q = w.linear(f"{name}.linear1_q", normalize(tokens))
            attended = attention(each_head(q, "q_norm"), each_head(k, "k_norm"), v, HEADS)
            outputs.append(w.linear(f"{name}.linear2", attended))
        return torch.cat(outputs)

    def __call__(self, x: Tensor, t: float, text: Tensor, inputs: dict[str, Any]) -> Tensor:
        grid, w = (x.shape[1], x.shape[2] // 2, x.shape[3] // 2), self.weights
        stream = w.conv("patch_embedding", torch.cat((x, inputs["y"][0])))
        frame = grid[1] * grid[2]
        pose = w.conv("pose_patch_embedding", inputs["pose_latents"][0])
        stream = torch.cat((stream[:frame], stream[frame:] + pose))
        e, e0 = self.time(t, FREQ)
        context, image = self.text(text), self.image(inputs["clip_fea"][0])
        faces = self.faces(PoolingMotionEncoder()(inputs["face_pixel_values"][0].transpose(0, 1)))
        positions = raster(*map(range, grid))
        modulation = e0.expand(len(positions), -1, -1)
        for layer in range(LAYERS):
            stream = self.block(layer, stream, modulation, positions, context, image)
            if layer % 5 == 0:
                stream = stream + self.adapter(layer // 5, stream, faces)
        return self.velocity(stream, e, grid)


def make_scene(frames: int, sides: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Any]:
    """Make latents, a text and the other inputs of a forward."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    faces = noise(1, 3, 4 * frames - 7, 1, 512).expand(-1, -1, -1, 512, -1)
    x, text, y = noise(16, frames, *sides), noise(4, 8), noise(20, frames, *sides)
    pose = noise(1, 16, frames - 1, *sides)
    face_inputs = {"pose_latents": pose, "face_pixel_values": faces}
    return x, text, {"clip_fea": noise(1, 5, 10), "y": [y], **face_inputs}


def with_black_face(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the unconditional branch, with an expanded black face."""
    faces = torch.full((1, 3, 1, 1, 1), -1.0).expand_as(inputs["face_pixel_values"])
    return {**inputs, "face_pixel_values": faces}


@torch.no_grad()
def test_network() -> None:
    """Clips and branches in turn, twice each: cached features are never mixed up."""
    plain, t = PlainAnimate(), torch.tensor([700])
    models = [make_network(text_kv_cache=is_cached) for is_cached in (False, True)]
    for x, text, inputs in (make_scene(3, (4, 6)), make_scene(2, (4, 4), 1)):
        for branch_inputs in (inputs, with_black_face(inputs)):
            expected = plain(x, 700, text, branch_inputs)
            for model in (models[0], models[1], models[1]):
                actual = model([x], t, context=[text], seq_len=99, **branch_inputs)[0]
                assert (actual - expected).abs().max() <= 2e-5


def test_networks_that_were_not_published() -> None:
    changes: dict[str, dict[str, Any]] = {
        "layers": {"num_layers": 4},
        "no picture": {"use_img_emb": False},
    }
    with torch.device("meta"):
        messages = {
            name: get_refusal(
                lambda c=change: WanAnimateModel(**{**SIZES, **TEXT, **c}), kind=ValueError
            )
            for name, change in changes.items()
        }
    check_refusals("animate: networks", {name: f"{x.rstrip('.')}." for name, x in messages.items()})


def convolve_scaled(w: Weights, name: str, x: Tensor, stride: int = 1, pad: int = 0) -> Tensor:
    """Apply a convolution whose weights are divided by the square root of their fan-in."""
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight / weight[0].numel() ** 0.5, None, stride, pad)


def apply_leaky_relu(w: Weights, name: str, x: Tensor) -> Tensor:
    x = x + w[f"{name}.bias"]
    return torch.where(x > 0, x, 0.2 * x) * 2**0.5


def blur(x: Tensor, pad: int) -> Tensor:
    """Blur each channel with the weights 1 3 3 1 along rows and columns."""
    row = torch.tensor([1.0, 3.0, 3.0, 1.0]).double() / 8
    x = F.pad(x, [pad] * 4).unfold(3, 4, 1) @ row
    return (x.transpose(2, 3).unfold(3, 4, 1) @ row).transpose(2, 3)


def apply_residual_block(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a residual block of the motion encoder, which halves the sides."""
    y = apply_leaky_relu(w, f"{name}.conv1.1", convolve_scaled(w, f"{name}.conv1.0", x, pad=1))
    y = apply_leaky_relu(
        w, f"{name}.conv2.2", convolve_scaled(w, f"{name}.conv2.1", blur(y, 2), stride=2)
    )
    skip = convolve_scaled(w, f"{name}.skip.1", blur(x, 1), stride=2)
    return (y + skip) / 2**0.5


@torch.no_grad()
def test_motion_encoder() -> None:
    """The first layers on a small image, and the last two blocks up to the motion."""
    torch.manual_seed(0)
    encoder: Any = MotionEncoder(512)
    for name, weight in encoder.named_parameters():
        if name.endswith("bias"):
            weight.normal_()
    w, convs, face = Weights(encoder), encoder.enc.net_app.convs, torch.rand(1, 3, 16, 16) * 2 - 1
    name = "enc.net_app.convs"
    expected = apply_leaky_relu(w, f"{name}.0.1", convolve_scaled(w, f"{name}.0.0", face.double()))
    assert (convs[0](face) - expected).abs().max() <= 1e-5
    expected = apply_residual_block(w, f"{name}.1", expected)
    assert expected.shape == (1, 64, 8, 8)
    assert (convs[1](convs[0](face)) - expected).abs().max() <= 1e-5
    features = torch.randn(2, 512, 16, 16)
    expected = apply_residual_block(
        w, f"{name}.7", apply_residual_block(w, f"{name}.6", features.double())
    )
    expected = convolve_scaled(w, f"{name}.8", expected).flatten(1)
    for layer in range(5):
        weight = w[f"enc.fc.{layer}.weight"]
        expected = expected @ weight.T / weight.shape[1] ** 0.5 + w[f"enc.fc.{layer}.bias"]
    directions = torch.linalg.qr(encoder.dec.direction.weight + 1e-8)[0]
    encoder.enc.net_app.convs = convs[6:]  # from here on pictures of 16 x 16 suffice
    motion = encoder(features)
    assert (motion - expected @ directions.double().T).abs().max() <= 1e-4
    assert motion.std() > 0.1
