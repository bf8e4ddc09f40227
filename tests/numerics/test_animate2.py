"""Animate-2's network against that of diffusers, whose FlexAttention also computes on a CPU.

diffusers has no additive bias on the keys of frame 1; its mask is compared with it by
`tests/unit/test_reference_kv.py`.
"""

from __future__ import annotations

import pytest
import torch
from diffusers import WanAnimate2Transformer3DModel
from diffusers.models.transformers import transformer_wan_animate_2
from torch import Tensor

from tests.animate2_network import (
    CASES,
    SIZES,
    Case,
    compute_velocity,
    make_inputs,
    make_network,
    make_weights,
)
from tests.numerics.recorded import STEP, SampleRecorder
from wan.checkpoint.names.keymaps import rename_dit_to_official

LAYERS = 10  # diffusers' unconditional branch skips block 9


@pytest.fixture(scope="module")
def oracle() -> WanAnimate2Transformer3DModel:
    with torch.device("meta"):
        model = WanAnimate2Transformer3DModel(**SIZES | {"num_layers": LAYERS})
    weights = make_weights(LAYERS)
    state = {name: weights[rename_dit_to_official(name)] for name in model.state_dict()}
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def compute_with_diffusers(
    model: WanAnimate2Transformer3DModel, case: Case, unconditional: bool
) -> Tensor:
    inputs = make_inputs(case)
    cache = transformer_wan_animate_2.WanAnimate2KVCache(LAYERS)
    grid = torch.tensor([case.reference])
    model(
        [inputs.reference[:16]],
        inputs.t,
        [inputs.reference_text],
        [inputs.reference[16:]],
        cache,
        "extract",
        int(grid.prod()),
        inputs.reference_clip,
        offset_grid_sizes=grid,
    )
    slots = max(case.frame[0] * case.frame[1], case.reference[1] * case.reference[2])
    return model(
        [inputs.x],
        inputs.t,
        [inputs.text],
        [inputs.y],
        cache,
        "cached",
        inputs.x[0].numel() // 4,
        inputs.clip,
        reference_grid_sizes=grid,
        origin_len=4 * (case.full_frames - 2) + 1,
        origin_area=[16, 16 * slots],
        is_uncondtion=unconditional,
    ).sample[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("eager_masks")
def test_velocity(oracle: WanAnimate2Transformer3DModel, name: str) -> None:
    case, model = CASES[name], make_network(LAYERS)
    for unconditional in (False, True):
        expected = compute_with_diffusers(oracle, case, unconditional)
        actual = compute_velocity(
            model,
            case,
            skip_blocks=(9,) if unconditional else (),
            first_column=case.reference[2],  # diffusers takes the reference's width for both
        )
        assert expected.std() > 0.3
        assert (actual - expected).abs().max() <= 2e-5


def test_samples_are_computed_one_after_the_other() -> None:
    """Each attends to the same reference tokens; the step has its index."""
    case, recorder = CASES["smaller reference"], SampleRecorder()
    inputs = make_inputs(case)
    reference_kv = make_network().compute_reference_kv(
        inputs.reference, inputs.reference_text, inputs.reference_clip, inputs.x.shape[1:]
    )
    network, t = make_network(attention=recorder), torch.tensor([537.0, 100.0])
    shared = {"clip_fea": inputs.clip, "reference_kv": reference_kv, "step": STEP}
    samples = [
        ([x], t[i : i + 1], [text], 99, [inputs.y])
        for i, (x, text) in enumerate(((inputs.x, inputs.text), (-inputs.x, -inputs.text)))
    ]
    expected = [network(*sample, **shared)[0] for sample in samples]
    recorder.samples.clear()
    (x0, _, text0, *_), (x1, _, text1, *_) = samples
    both = network(x0 + x1, t, text0 + text1, 99, [inputs.y] * 2, **shared)
    assert all(map(torch.equal, both, expected))
    assert recorder.samples == [0, 0, 0, 1, 1, 1]
