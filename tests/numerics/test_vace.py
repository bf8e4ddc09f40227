"""VACE's network, conditioning and whole runs against diffusers, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanVACETransformer3DModel

from tests.conftest import slow
from wan.checkpoint.keymaps import dit_diffusers_name, dit_official_name
from wan.modules.interfaces import Collaborators
from wan.modules.vace import VaceWanModel

CONFIG = {"num_layers": 6, "text_dim": 48, "ffn_dim": 96}
TEXT_LEN = 32


def twins(layers: Sequence[int], heads: int, head_dim: int, **collaborators: Any) -> Any:
    """Our network and diffusers' with the same random weights."""
    torch.manual_seed(0)
    ours = VaceWanModel(
        vace_layers=layers,
        dim=heads * head_dim,
        num_heads=heads,
        freq_dim=256,
        text_len=TEXT_LEN,
        **CONFIG,
        collaborators=Collaborators(**collaborators),
    )
    theirs = WanVACETransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        vace_layers=list(layers),
        **CONFIG,
    )
    state = {dit_diffusers_name(name): tensor for name, tensor in ours.state_dict().items()}
    assert [dit_official_name(name) for name in state] == [*ours.state_dict()]
    theirs.load_state_dict(state, strict=True)
    return ours, theirs


@pytest.mark.parametrize(
    ("layers", "scales"),
    [
        ([0], 1.0),
        ([0, 2, 4], [1.0, 0.5, 0.25]),
        slow([0, 5], 0.7),
        slow([0, 1, 2, 3, 4, 5], 1.0),
    ],
)
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 8), slow(40, 6), slow(2, 128)])
@torch.no_grad()
def test_network(layers: list[int], scales: Any, heads: int, head_dim: int) -> None:
    """The second forward has the text's keys and values of the first one."""
    ours, theirs = twins(layers, heads, head_dim, text_kv_cache=True)
    x, control, context = torch.randn(16, 3, 10, 14), torch.randn(96, 3, 10, 14), torch.randn(7, 48)
    # Of this timestep diffusers' sinusoid, which is float32, is that of float64.
    t, factors = torch.tensor([1.0]), torch.ones(len(layers)) * torch.tensor(scales)
    expected = theirs(
        hidden_states=x[None],
        timestep=t,
        encoder_hidden_states=F.pad(context, (0, 0, 0, TEXT_LEN - 7))[None],
        control_hidden_states=control[None],
        control_hidden_states_scale=factors,
        return_dict=False,
    )[0][0]
    for _ in range(2):
        found = ours([x], t, [control], [context], 105, scales)[0]
        assert (found - expected).abs().max() <= 2e-5
    without = ours([x], t, [control], [context], 105, 0.0)[0]
    assert (without - expected).abs().max() > 1e-2, "the control changes nothing"
    both = ours([x, -x], t, [control, control], [context, context], 105, scales)
    assert (both[0] - expected).abs().max() <= 2e-5


def test_networks_and_calls_that_do_not_fit() -> None:
    config = {**CONFIG, "dim": 96, "num_heads": 12, "text_len": TEXT_LEN}
    for layers in ([1, 2], [0, 6]):
        with pytest.raises(ValueError, match="must begin with 0 and stay below the 6 layers"):
            VaceWanModel(vace_layers=layers, **config)
    model = VaceWanModel(**config)
    assert [*model.injected] == [0, 2, 4]
    x, context, t = torch.zeros(16, 1, 4, 4), torch.zeros(3, 48), torch.tensor([1.0])
    with pytest.raises(ValueError, match="vace_context of shape"):
        model([x], t, [torch.zeros(96, 2, 4, 4)], [context], 4)
    with pytest.raises(ValueError, match="has 2 numbers; give one, or one for each of the 3"):
        model([x], t, [torch.zeros(96, 1, 4, 4)], [context], 4, [1.0, 1.0])
