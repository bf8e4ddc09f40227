"""The demo's clips, captions and scorer: each independent of the networks that are trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tools.demo import causal, dit, score
from tools.demo.evaluate import compute_rates, judge_shapes
from tools.demo.render import render_scene
from tools.demo.scenes import (
    COLOURS,
    MOTIONS,
    SHAPES,
    VERBS,
    Actor,
    Scene,
    is_held_out,
    make_caption,
    make_random_scene,
)
from tools.demo.text import TEXT_LEN, list_words, make_targets, make_tokenizer, tokenize_texts
from tools.run_demo import I2V_PROMPT, PROMPTS
from wan.kernels.sdpa import SdpaKernel
from wan.modules.causal import WanCausalModel
from wan.modules.kv_cache import KVCache
from wan.settings.presets import PRESETS


def make_scene(shape: str = "circle", colour: str = "red", motion: str = "left") -> Scene:
    ends = {"left": ((0.7, 0.5), (0.3, 0.5)), "up": ((0.5, 0.7), (0.5, 0.3))}
    start, end = ends.get(motion, ((0.5, 0.5), (0.5, 0.5)))
    return Scene("black", (Actor(shape, colour, "large", motion, start, end),))


def test_scenes() -> None:
    """They follow from seed and index, cover what captions can say, and hold some out."""
    scenes = [make_random_scene(0, n) for n in range(300)]
    actors = [actor for scene in scenes for actor in scene.actors]
    assert {a.colour for a in actors} == set(COLOURS)
    assert {a.shape for a in actors} == set(SHAPES)
    assert {a.motion for a in actors} == set(MOTIONS)
    assert not any(a.shape == "circle" and a.motion == "rotate" for a in actors)
    assert {len(scene.actors) for scene in scenes} == {1, 2}
    assert not any(map(is_held_out, scenes))
    assert all(is_held_out(make_random_scene(0, n, held_out=True)) for n in range(50))
    assert scenes[5] == make_random_scene(0, 5) != make_random_scene(4, 5)
    first, second = (render_scene(scenes[5], 5, 32) for _ in range(2))
    assert first.shape == (5, 32, 32, 3) and first.dtype == np.uint8
    assert np.array_equal(first, second)


def test_every_wording_is_in_the_vocabulary_and_fits() -> None:
    random = np.random.default_rng(0)
    texts = [make_caption(make_random_scene(0, n), random) for n in range(200)]
    ids = tokenize_texts(texts)
    assert ids.shape == (200, TEXT_LEN) and not (ids == 2).any()
    assert ((ids == 1).sum(1) == 1).all(), "each ends with one </s>"
    assert make_tokenizer().encode("A red Circle moves left.").tokens[1] == "▁red"
    assert make_tokenizer().encode("a zebra").ids[1] == 2 and "zebra" not in list_words()


def test_targets_of_each_word_describe_its_own_object() -> None:
    actors = (make_scene().actors[0], make_scene("star", "blue", "up").actors[0])
    scene = Scene("gray", actors)
    targets = make_targets("a red circle moves left and a blue star moves up", scene)
    left_index, up_index = MOTIONS.index("left"), MOTIONS.index("up")
    assert targets[:5, -1].tolist() == [left_index] * 5
    assert targets[6:11, -1].tolist() == [up_index] * 5
    assert targets[5, -1] == targets[11, -1] == -100
    assert targets[11, 0] == COLOURS.index("red"), "the last token is asked for everything"
    assert (targets[:, -2] == -100).all(), "a background that is not said is not asked for"


def test_the_scorer() -> None:
    """It is right on the ground truth, also with noise, and detects each wrong attribute."""
    scenes = {9: range(6), 17: range(10, 11)}
    verdicts = [
        judge_shapes(scene, score.detect_shapes(render_scene(scene, frames, 64)))
        for frames, numbers in scenes.items()
        for scene in (make_random_scene(11, n) for n in numbers)
    ]
    assert compute_rates(verdicts) == {"colour": 100.0, "shape": 100.0, "motion": 100.0}
    noise = np.random.default_rng(0).normal(0, 8, (9, 64, 64, 3))
    for shape in SHAPES:
        video = render_scene(make_scene(shape, "yellow", "left"), 9, 64) + noise
        detection = score.detect_shapes(np.clip(video, 0, 255).astype(np.uint8))[0]
        assert (detection.colour, detection.shape, detection.motion) == ("yellow", shape, "left")
    empty = np.full((9, 64, 64, 3), 10, np.uint8)
    for video in (render_scene(make_scene("square", "blue", "up"), 9, 64), empty):
        verdict = judge_shapes(make_scene("circle", "red", "left"), score.detect_shapes(video))
        assert verdict == {"colour": [False], "shape": [False], "motion": [False]}
    assert score.detect_shapes(empty) == []


def test_noise_levels_keep_to_their_side_of_the_boundary() -> None:
    for preset in (PRESETS["t2v-A14B"], PRESETS["i2v-A14B"]):
        ranges = {"high_noise": (preset.boundary, 1), "low_noise": (0, preset.boundary)}
        for part, (low, high) in ranges.items():
            sigma = dit.draw_sigmas(np.random.default_rng(0), 1000, preset, part)
            assert low <= sigma.min() < low + 0.02 and high - 0.02 < sigma.max() <= high + 1e-6


def test_training_attends_as_inference_does() -> None:
    for length in (48, 200):  # as products, and as PyTorch's attention
        q, k, v = (torch.randn(2, length, 3, 8) for _ in range(3))
        output = dit.TrainingKernel()(q, k, v)
        assert output.shape == q.shape
        torch.testing.assert_close(output, SdpaKernel()(q, k, v), atol=2e-6, rtol=1e-5)


def test_i2v_starts_as_t2v(tmp_path: Path) -> None:
    """Both are small; before the training, they predict no velocity."""
    t2v = dit.make_dit("t2v")
    x, y, context = torch.randn(16, 3, 8, 8), torch.randn(20, 3, 8, 8), [torch.randn(5, 64)]
    with torch.no_grad():
        assert not t2v([x], torch.tensor([500.0]), context, 48)[0].any()
        torch.nn.init.normal_(t2v.head.head.weight)
        torch.save({"averaged": t2v.state_dict()}, tmp_path / "t2v_low_noise.pt")
        i2v = dit.make_initial_dit("i2v", "low_noise", tmp_path)
        expected = t2v([x], torch.tensor([500.0]), context, 48)
        output = i2v([x], torch.tensor([500.0]), context, 48, [y])
    torch.testing.assert_close(output, expected)
    assert all(sum(p.numel() for p in model.parameters()) < 2.25e6 for model in (t2v, i2v))


def test_the_demo_prompts_are_held_out() -> None:
    motions = {verbs[0]: motion for motion, verbs in VERBS.items()}
    for prompt in (*PROMPTS, I2V_PROMPT):
        text, background = prompt.removesuffix(" background").split(" on a ")
        actors = []
        for phrase in text.split(" and "):
            _, size, colour, shape, verb = phrase.split(" ", 4)
            actors.append(Actor(shape, colour, size, motions[verb], (0.5, 0.5), (0.5, 0.5)))
        scene = Scene(background, tuple(actors))
        assert make_caption(scene) == prompt and is_held_out(scene), prompt


def test_the_causal_student_sees_in_training_what_it_sees_in_a_video() -> None:
    """Noisy blocks beside clean ones against the cache's clean passes, which have their oracle."""
    torch.manual_seed(0)
    training, network = causal.TeacherForcedModel().eval(), WanCausalModel(in_dim=16, **dit.CONFIG)
    torch.nn.init.normal_(training.head.head.weight)
    network.eval().load_state_dict(training.state_dict())
    clean, noisy = torch.randn(2, 2, 16, 12, 8, 8)
    sigma, texts = torch.tensor([1.0, 0.5, 0.5, 0.25]), [torch.randn(n, 64) for n in (5, 9)]
    with torch.no_grad():
        velocities = training.predict(clean, noisy, sigma, texts)
        first = training.predict(None, noisy[:, :, :3], sigma[:1].expand(2), texts)
        for n in range(2):
            cache = KVCache(9)
            for block in range(4):
                frames = slice(3 * block, 3 * block + 3)
                further = {"kv_cache": cache, "start_frame": frames.start}
                (expected,) = network(
                    [noisy[n][:, frames]], 1000 * sigma[[block]], [texts[n]], 48, **further
                )
                torch.testing.assert_close(velocities[n][:, frames], expected, atol=1e-4, rtol=1e-4)
                network([clean[n][:, frames]], torch.zeros(1), [texts[n]], 48, **further)
    torch.testing.assert_close(first, velocities[:, :, :3], atol=1e-4, rtol=1e-4)
