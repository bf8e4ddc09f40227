"""The causal network against diffusers' SkyReels-V2: block-causal mask, a timestep per frame."""

from __future__ import annotations

import torch
from diffusers import SkyReelsV2Transformer3DModel

from tests.causal_network import HEADS, SIZES, TEXT_LEN, make_network, make_weights
from wan.checkpoint.names.keymaps import rename_dit_to_official
from wan.modules.kv_cache import KVCache

BLOCK, NUM_FRAMES = 3, 9


@torch.inference_mode()
def test_blocks_are_those_of_skyreels() -> None:
    oracle = SkyReelsV2Transformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=SIZES["dim"] // HEADS,
        text_dim=SIZES["text_dim"],
        freq_dim=SIZES["freq_dim"],
        ffn_dim=SIZES["ffn_dim"],
        num_layers=SIZES["num_layers"],
        inject_sample_info=False,
        num_frame_per_block=BLOCK,
    ).eval()
    weights = make_weights()
    state = {name: weights[rename_dit_to_official(name)] for name in oracle.state_dict()}
    oracle.load_state_dict(state, strict=True)
    generator = torch.Generator().manual_seed(4)
    video = torch.randn(16, NUM_FRAMES, 4, 6, generator=generator)
    text = torch.randn(TEXT_LEN, SIZES["text_dim"], generator=generator)
    times = torch.tensor([0.0, 625, 625, 937, 937, 937, 1000, 250, 3])
    (expected,) = oracle(
        video[None], times[None], text[None], enable_diffusion_forcing=True, return_dict=False
    )
    model, cache, velocities = make_network(), KVCache(NUM_FRAMES), []
    for start in range(0, NUM_FRAMES, BLOCK):
        frames = slice(start, start + BLOCK)
        t = times[frames].repeat_interleave(6)[None]
        kwargs = {"kv_cache": cache, "start_frame": start}
        velocities += model([video[:, frames]], t, [text], 18, **kwargs)
    difference = torch.cat(velocities, dim=1) - expected[0]
    assert expected.square().mean() > 0.1
    assert difference.abs().max() <= 1e-5
