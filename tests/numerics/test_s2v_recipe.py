"""S2V's network against a plain float64 implementation, without official tensors."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.numerics.plain import PlainNetwork, attention, normalize, raster, silu, tiny
from wan.modules.interfaces import ModelComponents
from wan.modules.s2v import WanModel_S2V

HEADS, TEXT_LEN, FREQ = 4, 6, 16
SIZES = {"dim": 48, "ffn_dim": 40, "freq_dim": FREQ, "num_heads": HEADS, "num_layers": 3}
TEXT = {"text_dim": 8, "text_len": TEXT_LEN}
LAYERS = (2, 0)  # audio is injected after them; weights are in the order of the network


def make_network(**components: Any) -> Any:
    audio_sizes = {"audio_dim": 6, "num_audio_token": 2, "audio_inject_layers": LAYERS}
    model_components = ModelComponents(**components)
    return tiny(lambda: WanModel_S2V(**SIZES, **TEXT, **audio_sizes, components=model_components))


class PlainS2V(PlainNetwork):
    """The official forward, sections 3.1 to 3.5 of its description."""

    def __init__(self, model: Any = None) -> None:
        super().__init__(model or make_network(), HEADS, TEXT_LEN)

    def encode_audio(self, features_SCT: Tensor) -> tuple[Tensor, Tensor]:
        """Return audio tokens [F,3,C] and a global vector [F,C] of each latent frame."""
        w, prefix = self.weights, "casual_audio_encoder"
        layer_weights = silu(w[f"{prefix}.weights"].flatten())
        mean = (
            sum(s * x for s, x in zip(layer_weights, features_SCT.double(), strict=True))
            / layer_weights.sum()
        )
        rows = torch.cat([mean.T[:1]] * 73 + [mean.T])
        name = f"{prefix}.encoder"

        def run_later_convs(x: Tensor) -> Tensor:
            x = silu(normalize(x))
            for conv in ("conv2", "conv3"):
                x = silu(normalize(w.causal(f"{name}.{conv}", x, stride=2)))
            return x[19:]

        local = w.causal(f"{name}.conv1_local", rows).unflatten(1, (2, -1)).unbind(1)
        parts = [run_later_convs(head_features) for head_features in local]
        global_features = w.linear(
            f"{name}.final_linear", run_later_convs(w.causal(f"{name}.conv1_global", rows))
        )
        padding = w[f"{name}.padding_tokens"].reshape(1, -1).expand(len(global_features), -1)
        return torch.stack((*parts, padding), dim=1), global_features

    def make_extra_tokens(
        self, ref: Tensor, motion: Tensor | None, grid: Any
    ) -> tuple[Tensor, list[Any]]:
        """Return the extra tokens (reference and motion frames) and their positions."""
        _, rows, columns = grid
        kinds, w = self.weights["trainable_cond_mask.weight"], self.weights
        tokens = [w.conv("patch_embedding", ref) + kinds[1]]
        positions = raster([30], range(rows), range(columns))
        if motion is None:
            return tokens[0], positions
        buffer = torch.zeros(16, 19, *motion.shape[2:])
        count = min(19, motion.shape[1])
        buffer[:, 19 - count :] = motion[:, motion.shape[1] - count :]

        def spread_indices(number: int, span: int) -> list[int]:
            return [int(i * (span - 1) / max(1, number - 1)) for i in range(number)]

        for name, part, times, side in (
            ("proj", buffer[:, 18:], [-1], 1),
            ("proj_2x", buffer[:, 16:18], [-3], 2),
            ("proj_4x", buffer[:, :16], [-19, -14, -9, -4], 4),
        ):
            tokens.append(w.conv(f"frame_packer.{name}", part) + kinds[2])
            sides = (spread_indices(n // (2 * side), n // 2) for n in motion.shape[2:])
            positions += raster(times, *sides)
        return torch.cat(tokens), positions

    def inject_audio(
        self, number: int, x: Tensor, local: Tensor, global_features: Tensor
    ) -> Tensor:
        """Return the output of an audio injection for the video tokens, frame by frame."""
        w, name = self.weights, f"audio_injector.injector.{number}"
        adain, outputs = f"audio_injector.injector_adain_layers.{number}.linear", []
        for tokens, audio_tokens, audio_vector in zip(
            x.chunk(len(global_features)), local, global_features, strict=True
        ):
            shift, scale = w.linear(adain, silu(audio_vector)).chunk(2)
            q, k, v = self.qkv(name, normalize(tokens, 1e-5) * (1 + scale) + shift, audio_tokens)
            outputs.append(w.linear(f"{name}.o", attention(q, k, v, HEADS)))
        return torch.cat(outputs)

    def __call__(self, x: Tensor, t: float, text: Tensor, inputs: dict[str, Any]) -> Tensor:
        grid = x.shape[1], x.shape[2] // 2, x.shape[3] // 2
        pose = inputs["cond_states"]
        pose = torch.zeros_like(x) if pose is None else pose[0]
        w, video = self.weights, x.shape[1] * grid[1] * grid[2]
        video_tokens = w.conv("patch_embedding", x) + w.conv("cond_encoder", pose)
        video_tokens = video_tokens + w["trainable_cond_mask.weight"][0]
        motion = None if inputs["drop_motion_frames"] else inputs["motion_latents"][0]
        extra_tokens, positions = self.make_extra_tokens(inputs["ref_latents"][0], motion, grid)
        positions = raster(*map(range, grid)) + positions
        (e, e0), (_, still_modulation) = self.time(t, FREQ), self.time(0, FREQ)
        modulation = torch.stack([e0] * video + [still_modulation] * len(extra_tokens))
        local, global_features = self.encode_audio(inputs["audio_input"][0])
        stream, context = torch.cat((video_tokens, extra_tokens)), self.text(text)
        for layer in range(3):
            stream = self.block(layer, stream, modulation, positions, context)
            if layer in LAYERS:
                number = sorted(LAYERS).index(layer)
                injected = self.inject_audio(number, stream[:video], local, global_features)
                stream = torch.cat((stream[:video] + injected, stream[video:]))
        return self.velocity(stream[:video], e, grid)


def make_scene(
    frames: int,
    sides: tuple[int, int],
    motion_frames: int,
    pose: bool,
    dropped: bool,
    seed: int = 0,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Make latents, a text and the other inputs of a forward."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, text = noise(16, frames, *sides), noise(4, 8)
    return (
        x,
        text,
        {
            "ref_latents": [noise(16, 1, *sides)],
            "motion_latents": [noise(16, motion_frames, *sides)],
            "cond_states": [noise(16, frames, *sides)] if pose else None,
            "audio_input": noise(1, 25, 6, 4 * frames),
            "drop_motion_frames": dropped,
        },
    )


CASES = {
    "first clip": make_scene(2, (8, 12), 19, False, True),
    "later clip": make_scene(2, (24, 16), 19, True, False),
    "short history": make_scene(1, (8, 8), 5, False, False),
    "long history": make_scene(1, (10, 14), 21, True, False),
}


@torch.no_grad()
def test_network() -> None:
    """Kinds of clips in turn, twice each: cached features are never mixed up."""
    plain, t = PlainS2V(), torch.tensor([700])
    models = [make_network(text_kv_cache=is_cached) for is_cached in (False, True)]
    for name, (x, text, inputs) in CASES.items():
        expected = plain(x, 700, text, inputs)
        for model in (models[0], models[1], models[1]):
            assert (model([x], t, [text], 0, **inputs)[0] - expected).abs().max() <= 2e-5, name


@torch.no_grad()
def test_what_depends_on_the_clip_is_computed_once() -> None:
    """Audio encoder, audio keys and values, and AdaIN run in the first forward only."""
    model, calls = make_network(text_kv_cache=True), Counter[str]()
    parts = {"encoder": model.casual_audio_encoder}
    for index in range(len(LAYERS)):
        attention = model.audio_injector["injector"][index]
        parts |= {f"k{index}": attention.k, f"v{index}": attention.v, f"q{index}": attention.q}
        parts[f"adain{index}"] = model.audio_injector["injector_adain_layers"][index]
    for name, module in parts.items():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    x, text, inputs = make_scene(1, (8, 8), 19, True, False)
    for _ in range(3):
        model([x], torch.tensor([500]), [text], 0, **inputs)
    assert calls == {name: 3 if name.startswith("q") else 1 for name in parts}
    inputs["audio_input"].mul_(0.5)  # changed in place: it is another audio input
    model([x], torch.tensor([500]), [text], 0, **inputs)
    assert calls["k0"] == calls["encoder"] == 2


@torch.no_grad()
def test_a_step_cache_gets_only_the_video_tokens() -> None:
    """Extra tokens have the same modulation in every step, so the cache ignores them."""
    token_counts: list[tuple[int, int]] = []

    def iterate(x: Tensor, blocks: Any, _: object, valid: int, __: object) -> Any:
        token_counts.append((x.shape[1], valid))
        return blocks(x, 0, None)

    model = make_network(step_cache=SimpleNamespace(iterate=iterate))
    for frames, motion_frames, dropped in ((2, 19, True), (2, 19, False)):
        x, text, inputs = make_scene(frames, (8, 8), motion_frames, False, dropped)
        model([x], torch.tensor([500]), [text], 0, **inputs)
    assert token_counts == [(32 + 16, 32), (32 + 16 + 16 + 4 + 4, 32)]
