"""What the networks of S2V and Animate cache of a clip, against the plain implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics import test_animate_recipe as animate
from tests.numerics import test_s2v_recipe as s2v
from tests.numerics.plain import PlainNetwork
from tests.numerics.recorded import STEP, SampleRecorder

Scene = tuple[Tensor, Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of network: the plain implementation and the scenes of a seed.

    changes: Of the inputs, in addition to those of another scene.
    """

    make_network: Callable[..., Any]
    plain: Callable[..., Any]
    make_scene: Callable[..., Scene]
    num_layers: int
    changes: tuple[dict[str, Any], ...] = ()

    def assert_equal(self, model: Any, case: Scene, plain: PlainNetwork | None = None) -> None:
        x, text, inputs = case
        t = torch.tensor([500])
        actual = model([x], t, context=[text], seq_len=99, **inputs)[0]
        assert (actual - (plain or self.plain(model))(x, 500, text, inputs)).abs().max() <= 2e-5


KINDS = {
    "s2v": Kind(
        *(s2v.make_network, s2v.PlainS2V, partial(s2v.make_scene, 1, (8, 8), 19, True, False), 3),
        changes=({"drop_motion_frames": True}, {"cond_states": None}),
    ),
    "animate": Kind(
        *(animate.make_network, animate.PlainAnimate, partial(animate.make_scene, 2, (4, 4))),
        num_layers=animate.LAYERS,
    ),
}
pytestmark = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@torch.no_grad()
def test_one_input_changes(kind: Kind) -> None:
    """As between clips, where some tensors stay the same object."""
    model = kind.make_network(text_kv_cache=True)
    plain = kind.plain(model)
    x, text, inputs = kind.make_scene()
    other_inputs = kind.make_scene(seed=9)[2]
    changes = ({}, *({name: other_inputs[name]} for name in inputs), *kind.changes, {})
    for change in changes:
        kind.assert_equal(model, (x, text, inputs | change), plain)


@torch.no_grad()
def test_other_weights_for_the_same_inputs(kind: Kind) -> None:
    """`clear_caches` drops the cached features of clip and text."""
    model, scene = kind.make_network(text_kv_cache=True), kind.make_scene()
    kind.assert_equal(model, scene)
    for weight in model.parameters():
        weight.mul_(0.8)
    model.clear_caches()
    kind.assert_equal(model, scene)


def join(first: Any, second: Any) -> Any:
    """Returns an input of two samples."""
    if isinstance(first, list):
        return first + second
    return first if first is second else torch.cat((first, second))


@torch.no_grad()
def test_two_samples_of_one_forward(kind: Kind) -> None:
    """Two samples with different inputs, with and without cached features."""
    recorder, t = SampleRecorder(), torch.tensor([300, 900])
    model = kind.make_network(text_kv_cache=True, attention=recorder)
    plain, pair = kind.plain(model), [kind.make_scene(seed=seed) for seed in (3, 4)]
    if kind is KINDS["animate"]:
        pair[1][2]["clip_fea"] = pair[0][2]["clip_fea"]  # samples share the image
    inputs = {name: join(*(sample[2][name] for sample in pair)) for name in pair[0][2]}
    x, texts = [sample[0] for sample in pair], [sample[1] for sample in pair]
    for _ in range(2):
        outputs = model(x, t, context=texts, seq_len=99, **inputs, step=STEP)
        for output, sample, timestep in zip(outputs, pair, t.tolist(), strict=True):
            latents, text, sample_inputs = sample
            expected = plain(latents, timestep, text, sample_inputs)
            assert (output - expected).abs().max() <= 2e-5
    assert recorder.samples == [*[0] * kind.num_layers, *[1] * kind.num_layers] * 2
