"""Animate's network against a plain float64 implementation, without official tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.plain import Plain, Weights, attention, normed, raster, rms, silu, tiny
from tests.numerics.recorded import STEP, Samples
from tests.refusals import check_refusals, get_refusal
from wan.modules.animate import MotionEncoder, WanAnimateModel
from wan.modules.interfaces import ModelComponents

HEADS, TEXT_LEN, FREQ, LAYERS = 4, 6, 16, 10
SIZES = {"dim": 48, "ffn_dim": 40, "freq_dim": FREQ, "num_heads": HEADS, "num_layers": LAYERS}
TEXT = {"text_dim": 8, "text_len": TEXT_LEN, "image_dim": 10}


class Pooled(nn.Module):
    """Replaces the motion encoder, which takes a second for each image."""

    def forward(self, faces_P3HW: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(faces_P3HW, (1, 171)).flatten(1)[:, :512]


def network(**components: Any) -> Any:
    given = ModelComponents(**components)
    with mock.patch("wan.modules.animate.MotionEncoder", lambda _: Pooled()):
        return tiny(lambda: WanAnimateModel(**SIZES, **TEXT, components=given))


class PlainAnimate(Plain):
    """The official forward, sections 3 and 4 of its description."""

    def __init__(self, model: Any = None) -> None:
        super().__init__(model or network(), HEADS, TEXT_LEN)

    def image(self, features: Tensor) -> Tensor:
        w, name = self.weights, "img_emb.proj"
        x = normed(features.double(), 1e-5) * w[f"{name}.0.weight"] + w[f"{name}.0.bias"]
        x = w.linear(f"{name}.3", F.gelu(w.linear(f"{name}.1", x)))
        return normed(x, 1e-5) * w[f"{name}.4.weight"] + w[f"{name}.4.bias"]

    def faces(self, motion_PC: Tensor) -> Tensor:
        """Return five face tokens of each latent frame, [F,5,C]; zeros for the reference frame."""
        w, found = self.weights, []
        for group in w.causal("face_encoder.conv1_local", motion_PC.double()).chunk(4, dim=1):
            x = silu(normed(group))
            for conv in ("conv2", "conv3"):
                x = silu(normed(w.causal(f"face_encoder.{conv}", x, stride=2)))
            found.append(w.linear("face_encoder.out_proj", x))
        found.append(w["face_encoder.padding_tokens"].reshape(1, -1).expand_as(found[0]))
        tokens = torch.stack(found, dim=1)
        return torch.cat((torch.zeros_like(tokens[:1]), tokens))

    def adapter(self, number: int, x: Tensor, faces: Tensor) -> Tensor:
        """Return each frame's cross-attention to the face tokens of the same frame."""
        w, name, found = self.weights, f"face_adapter.fuser_blocks.{number}", []

        def each_head(x: Tensor, norm: str) -> Tensor:
            parts = x.unflatten(-1, (HEADS, -1))
            return rms(parts, w[f"{name}.{norm}.weight"]).flatten(-2)

        for tokens, face in zip(x.chunk(len(faces)), faces, strict=True):
            k, v = w.linear(f"{name}.linear1_kv", normed(face)).chunk(2, dim=-1)
            q = w.linear(f"{name}.linear1_q", normed(tokens))
            seen = attention(each_head(q, "q_norm"), each_head(k, "k_norm"), v, HEADS)
            found.append(w.linear(f"{name}.linear2", seen))
        return torch.cat(found)

    def __call__(self, x: Tensor, t: float, text: Tensor, given: dict[str, Any]) -> Tensor:
        grid, w = (x.shape[1], x.shape[2] // 2, x.shape[3] // 2), self.weights
        stream = w.conv("patch_embedding", torch.cat((x, given["y"][0])))
        frame = grid[1] * grid[2]
        pose = w.conv("pose_patch_embedding", given["pose_latents"][0])
        stream = torch.cat((stream[:frame], stream[frame:] + pose))
        e, e0 = self.time(t, FREQ)
        context, image = self.text(text), self.image(given["clip_fea"][0])
        faces = self.faces(Pooled()(given["face_pixel_values"][0].transpose(0, 1)))
        places = raster(*map(range, grid))
        modulation = e0.expand(len(places), -1, -1)
        for layer in range(LAYERS):
            stream = self.block(layer, stream, modulation, places, context, image)
            if layer % 5 == 0:
                stream = stream + self.adapter(layer // 5, stream, faces)
        return self.velocity(stream, e, grid)


def scene(frames: int, sides: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Any]:
    """Make latents, a text and the other inputs of a forward."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    faces = noise(1, 3, 4 * frames - 7, 1, 512).expand(-1, -1, -1, 512, -1)
    x, text, y = noise(16, frames, *sides), noise(4, 8), noise(20, frames, *sides)
    pose = noise(1, 16, frames - 1, *sides)
    seen = {"pose_latents": pose, "face_pixel_values": faces}
    return x, text, {"clip_fea": noise(1, 5, 10), "y": [y], **seen}


def black(given: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the unconditional branch, with an expanded black face."""
    faces = torch.full((1, 3, 1, 1, 1), -1.0).expand_as(given["face_pixel_values"])
    return {**given, "face_pixel_values": faces}


@torch.no_grad()
def test_network() -> None:
    """Clips and branches in turn, twice each: cached features are never mixed up."""
    plain, t = PlainAnimate(), torch.tensor([700])
    models = [network(text_kv_cache=kept) for kept in (False, True)]
    for x, text, given in (scene(3, (4, 6)), scene(2, (4, 4), 1)):
        for seen in (given, black(given)):
            expected = plain(x, 700, text, seen)
            for model in (models[0], models[1], models[1]):
                found = model([x], t, context=[text], seq_len=99, **seen)[0]
                assert (found - expected).abs().max() <= 2e-5


@torch.no_grad()
def test_one_input_changes() -> None:
    """Inputs change one by one, as between clips, where some tensors stay the same object."""
    model, plain = network(text_kv_cache=True), PlainAnimate()
    x, text, given = scene(2, (4, 4))
    others = scene(2, (4, 4), seed=9)[2]
    for case in (given, *({**given, name: others[name]} for name in given), given):
        found = model([x], torch.tensor([500]), context=[text], seq_len=99, **case)[0]
        assert (found - plain(x, 500, text, case)).abs().max() <= 2e-5


@torch.no_grad()
def test_two_samples_of_one_forward() -> None:
    """Two samples with different poses and faces, with and without cached features."""
    samples, plain, t = Samples(), PlainAnimate(), torch.tensor([300, 900])
    model = network(text_kv_cache=True, attention=samples)
    pair = [scene(2, (4, 4), seed) for seed in (3, 4)]
    pair[1][2]["clip_fea"] = pair[0][2]["clip_fea"]
    given = {"clip_fea": pair[0][2]["clip_fea"], "y": [one[2]["y"][0] for one in pair]}
    for name in ("pose_latents", "face_pixel_values"):
        given[name] = torch.cat([one[2][name] for one in pair])
    x, texts = [one[0] for one in pair], [one[1] for one in pair]
    for _ in range(2):
        found = model(x, t, context=texts, seq_len=99, **given, step=STEP)
        for ours, (latents, text, own), when in zip(found, pair, t.tolist(), strict=True):
            assert (ours - plain(latents, when, text, own)).abs().max() <= 2e-5
    assert samples.seen == [*[0] * LAYERS, *[1] * LAYERS] * 2


@torch.no_grad()
def test_other_weights_for_the_same_inputs() -> None:
    """`clear_caches` drops the cached features of clip and text."""
    model = network(text_kv_cache=True)
    x, text, given = scene(2, (4, 4))
    model([x], torch.tensor([500]), context=[text], seq_len=99, **given)
    for weight in model.parameters():
        weight.mul_(0.8)
    model.clear_caches()
    found = model([x], torch.tensor([500]), context=[text], seq_len=99, **given)[0]
    assert (found - PlainAnimate(model)(x, 500, text, given)).abs().max() <= 2e-5


def test_networks_that_were_not_published() -> None:
    changes: dict[str, dict[str, Any]] = {
        "layers": {"num_layers": 4},
        "no picture": {"use_img_emb": False},
    }
    with torch.device("meta"):
        found = {
            name: get_refusal(
                lambda c=change: WanAnimateModel(**{**SIZES, **TEXT, **c}), kind=ValueError
            )
            for name, change in changes.items()
        }
    check_refusals("animate: networks", {name: f"{x.rstrip('.')}." for name, x in found.items()})


def scaled(w: Weights, name: str, x: Tensor, stride: int = 1, pad: int = 0) -> Tensor:
    """Apply a convolution whose weights are divided by the square root of their fan-in."""
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight / weight[0].numel() ** 0.5, None, stride, pad)


def leaky(w: Weights, name: str, x: Tensor) -> Tensor:
    x = x + w[f"{name}.bias"]
    return torch.where(x > 0, x, 0.2 * x) * 2**0.5


def blurred(x: Tensor, pad: int) -> Tensor:
    """Blur each channel with the weights 1 3 3 1 along rows and columns."""
    row = torch.tensor([1.0, 3.0, 3.0, 1.0]).double() / 8
    x = F.pad(x, [pad] * 4).unfold(3, 4, 1) @ row
    return (x.transpose(2, 3).unfold(3, 4, 1) @ row).transpose(2, 3)


def halved(w: Weights, name: str, x: Tensor) -> Tensor:
    """Apply a residual block of the motion encoder, which halves the sides."""
    y = leaky(w, f"{name}.conv1.1", scaled(w, f"{name}.conv1.0", x, pad=1))
    y = leaky(w, f"{name}.conv2.2", scaled(w, f"{name}.conv2.1", blurred(y, 2), stride=2))
    skip = scaled(w, f"{name}.skip.1", blurred(x, 1), stride=2)
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
    expected = leaky(w, f"{name}.0.1", scaled(w, f"{name}.0.0", face.double()))
    assert (convs[0](face) - expected).abs().max() <= 1e-5
    expected = halved(w, f"{name}.1", expected)
    assert expected.shape == (1, 64, 8, 8)
    assert (convs[1](convs[0](face)) - expected).abs().max() <= 1e-5
    seen = torch.randn(2, 512, 16, 16)
    expected = halved(w, f"{name}.7", halved(w, f"{name}.6", seen.double()))
    expected = scaled(w, f"{name}.8", expected).flatten(1)
    for layer in range(5):
        weight = w[f"enc.fc.{layer}.weight"]
        expected = expected @ weight.T / weight.shape[1] ** 0.5 + w[f"enc.fc.{layer}.bias"]
    directions = torch.linalg.qr(encoder.dec.direction.weight + 1e-8)[0]
    encoder.enc.net_app.convs = convs[6:]  # from here on pictures of 16 x 16 suffice
    found = encoder(seen)
    assert (found - expected @ directions.double().T).abs().max() <= 1e-4
    assert found.std() > 0.1
