"""S2V's network against a plain float64 implementation, without official tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tests.numerics.plain import Plain, attention, normed, raster, silu, tiny
from tests.numerics.recorded import STEP, Samples
from wan.modules.interfaces import ModelComponents
from wan.modules.s2v import WanModel_S2V

HEADS, TEXT_LEN, FREQ = 4, 6, 16
SIZES = {"dim": 48, "ffn_dim": 40, "freq_dim": FREQ, "num_heads": HEADS, "num_layers": 3}
TEXT = {"text_dim": 8, "text_len": TEXT_LEN}
LAYERS = (2, 0)  # audio is injected after them; weights are in the order of the network


def network(**components: Any) -> Any:
    given = {"audio_dim": 6, "num_audio_token": 2, "audio_inject_layers": LAYERS}
    found = ModelComponents(**components)
    return tiny(lambda: WanModel_S2V(**SIZES, **TEXT, **given, components=found))


class PlainS2V(Plain):
    """The official forward, sections 3.1 to 3.5 of its description."""

    def __init__(self, model: Any = None) -> None:
        super().__init__(model or network(), HEADS, TEXT_LEN)

    def sound(self, features_SCT: Tensor) -> tuple[Tensor, Tensor]:
        """Return audio tokens [F,3,C] and a global vector [F,C] of each latent frame."""
        w, prefix = self.weights, "casual_audio_encoder"
        share = silu(w[f"{prefix}.weights"].flatten())
        mean = sum(s * x for s, x in zip(share, features_SCT.double(), strict=True)) / share.sum()
        rows = torch.cat([mean.T[:1]] * 73 + [mean.T])
        name = f"{prefix}.encoder"

        def rest(x: Tensor) -> Tensor:
            x = silu(normed(x))
            for conv in ("conv2", "conv3"):
                x = silu(normed(w.causal(f"{name}.{conv}", x, stride=2)))
            return x[19:]

        local = w.causal(f"{name}.conv1_local", rows).unflatten(1, (2, -1)).unbind(1)
        parts = [rest(one) for one in local]
        whole = w.linear(f"{name}.final_linear", rest(w.causal(f"{name}.conv1_global", rows)))
        padding = w[f"{name}.padding_tokens"].reshape(1, -1).expand(len(whole), -1)
        return torch.stack((*parts, padding), dim=1), whole

    def behind(self, ref: Tensor, motion: Tensor | None, grid: Any) -> tuple[Tensor, list[Any]]:
        """Return the extra tokens (reference and motion frames) and their positions."""
        _, rows, columns = grid
        kinds, w = self.weights["trainable_cond_mask.weight"], self.weights
        tokens = [w.conv("patch_embedding", ref) + kinds[1]]
        places = raster([30], range(rows), range(columns))
        if motion is None:
            return tokens[0], places
        buffer = torch.zeros(16, 19, *motion.shape[2:])
        count = min(19, motion.shape[1])
        buffer[:, 19 - count :] = motion[:, motion.shape[1] - count :]

        def spread(number: int, span: int) -> list[int]:
            return [int(i * (span - 1) / max(1, number - 1)) for i in range(number)]

        for name, part, times, side in (
            ("proj", buffer[:, 18:], [-1], 1),
            ("proj_2x", buffer[:, 16:18], [-3], 2),
            ("proj_4x", buffer[:, :16], [-19, -14, -9, -4], 4),
        ):
            tokens.append(w.conv(f"frame_packer.{name}", part) + kinds[2])
            sides = (spread(n // (2 * side), n // 2) for n in motion.shape[2:])
            places += raster(times, *sides)
        return torch.cat(tokens), places

    def hear(self, number: int, x: Tensor, local: Tensor, whole: Tensor) -> Tensor:
        """Return the output of an audio injection for the video tokens, frame by frame."""
        w, name = self.weights, f"audio_injector.injector.{number}"
        adain, found = f"audio_injector.injector_adain_layers.{number}.linear", []
        for tokens, heard, one in zip(x.chunk(len(whole)), local, whole, strict=True):
            shift, scale = w.linear(adain, silu(one)).chunk(2)
            q, k, v = self.qkv(name, normed(tokens, 1e-5) * (1 + scale) + shift, heard)
            found.append(w.linear(f"{name}.o", attention(q, k, v, HEADS)))
        return torch.cat(found)

    def __call__(self, x: Tensor, t: float, text: Tensor, given: dict[str, Any]) -> Tensor:
        grid = x.shape[1], x.shape[2] // 2, x.shape[3] // 2
        pose = given["cond_states"]
        pose = torch.zeros_like(x) if pose is None else pose[0]
        w, video = self.weights, x.shape[1] * grid[1] * grid[2]
        own = w.conv("patch_embedding", x) + w.conv("cond_encoder", pose)
        own = own + w["trainable_cond_mask.weight"][0]
        motion = None if given["drop_motion_frames"] else given["motion_latents"][0]
        behind, places = self.behind(given["ref_latents"][0], motion, grid)
        places = raster(*map(range, grid)) + places
        (e, e0), (_, still) = self.time(t, FREQ), self.time(0, FREQ)
        modulation = torch.stack([e0] * video + [still] * len(behind))
        local, whole = self.sound(given["audio_input"][0])
        stream, context = torch.cat((own, behind)), self.text(text)
        for layer in range(3):
            stream = self.block(layer, stream, modulation, places, context)
            if layer in LAYERS:
                number = sorted(LAYERS).index(layer)
                heard = self.hear(number, stream[:video], local, whole)
                stream = torch.cat((stream[:video] + heard, stream[video:]))
        return self.velocity(stream[:video], e, grid)


def scene(
    frames: int, sides: tuple[int, int], known: int, pose: bool, dropped: bool, seed: int = 0
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Make latents, a text and the other inputs of a forward."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    x, text = noise(16, frames, *sides), noise(4, 8)
    return (
        x,
        text,
        {
            "ref_latents": [noise(16, 1, *sides)],
            "motion_latents": [noise(16, known, *sides)],
            "cond_states": [noise(16, frames, *sides)] if pose else None,
            "audio_input": noise(1, 25, 6, 4 * frames),
            "drop_motion_frames": dropped,
        },
    )


CASES = {
    "first clip": scene(2, (8, 12), 19, False, True),
    "later clip": scene(2, (24, 16), 19, True, False),
    "short history": scene(1, (8, 8), 5, False, False),
    "long history": scene(1, (10, 14), 21, True, False),
}


@torch.no_grad()
def test_network() -> None:
    """Kinds of clips in turn, twice each: cached features are never mixed up."""
    plain, t = PlainS2V(), torch.tensor([700])
    models = [network(text_kv_cache=kept) for kept in (False, True)]
    for name, (x, text, given) in CASES.items():
        expected = plain(x, 700, text, given)
        for model in (models[0], models[1], models[1]):
            assert (model([x], t, [text], 0, **given)[0] - expected).abs().max() <= 2e-5, name


@torch.no_grad()
def test_one_input_changes() -> None:
    """Inputs change one by one, as between clips, where some tensors stay the same object."""
    model, plain = network(text_kv_cache=True), PlainS2V()
    x, text, given = scene(1, (8, 8), 19, True, False)
    others, cases = scene(1, (8, 8), 19, True, False, seed=9)[2], [given]
    cases += [{**given, name: others[name]} for name in given]
    cases += [{**given, "drop_motion_frames": True}, {**given, "cond_states": None}, given]
    for case in cases:
        found = model([x], torch.tensor([500]), [text], 0, **case)[0]
        assert (found - plain(x, 500, text, case)).abs().max() <= 2e-5


@torch.no_grad()
def test_two_samples_of_one_forward() -> None:
    """Two samples with different inputs, with and without cached features."""
    samples, plain, t = Samples(), PlainS2V(), torch.tensor([300, 900])
    model = network(text_kv_cache=True, attention=samples)
    pair = [scene(1, (8, 8), 19, True, False, seed) for seed in (3, 4)]
    lists = ("ref_latents", "motion_latents", "cond_states")
    given: dict[str, Any] = {name: [one[2][name][0] for one in pair] for name in lists}
    given["audio_input"] = torch.cat([one[2]["audio_input"] for one in pair])
    for _ in range(2):
        found = model([one[0] for one in pair], t, [one[1] for one in pair], 0, **given, step=STEP)
        for ours, (x, text, own), when in zip(found, pair, t.tolist(), strict=True):
            assert (ours - plain(x, when, text, own)).abs().max() <= 2e-5
    assert samples.seen == [0, 0, 0, 1, 1, 1] * 2


@torch.no_grad()
def test_other_weights_for_the_same_inputs() -> None:
    """`clear_caches` drops the cached features of clip and text."""
    model = network(text_kv_cache=True)
    x, text, given = scene(1, (8, 8), 19, True, False)
    model([x], torch.tensor([500]), [text], 0, **given)
    for weight in model.parameters():
        weight.mul_(0.8)
    model.clear_caches()
    found = model([x], torch.tensor([500]), [text], 0, **given)[0]
    assert (found - PlainS2V(model)(x, 500, text, given)).abs().max() <= 2e-5


@torch.no_grad()
def test_what_depends_on_the_clip_is_computed_once() -> None:
    """Audio encoder, audio keys and values, and AdaIN run in the first forward only."""
    model, calls = network(text_kv_cache=True), Counter[str]()
    parts = {"encoder": model.casual_audio_encoder}
    for index in range(len(LAYERS)):
        attention = model.audio_injector["injector"][index]
        parts |= {f"k{index}": attention.k, f"v{index}": attention.v, f"q{index}": attention.q}
        parts[f"adain{index}"] = model.audio_injector["injector_adain_layers"][index]
    for name, module in parts.items():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    x, text, given = scene(1, (8, 8), 19, True, False)
    for _ in range(3):
        model([x], torch.tensor([500]), [text], 0, **given)
    assert calls == {name: 3 if name.startswith("q") else 1 for name in parts}
    given["audio_input"].mul_(0.5)  # changed in place: it is another audio input
    model([x], torch.tensor([500]), [text], 0, **given)
    assert calls["k0"] == calls["encoder"] == 2


@torch.no_grad()
def test_a_step_cache_looks_at_the_video_alone() -> None:
    """Extra tokens have the same modulation in every step, so the cache ignores them."""
    seen: list[tuple[int, int]] = []

    def cache(x: Tensor, blocks: Any, _: object, valid: int, __: object) -> Tensor:
        seen.append((x.shape[1], valid))
        return blocks(x, 0, None)

    model = network(step_cache=cache)
    for frames, known, dropped in ((2, 19, True), (2, 19, False)):
        x, text, given = scene(frames, (8, 8), known, False, dropped)
        model([x], torch.tensor([500]), [text], 0, **given)
    assert seen == [(32 + 16, 32), (32 + 16 + 16 + 4 + 4, 32)]
