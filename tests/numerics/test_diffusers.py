"""Our networks and whole runs against diffusers, a second implementation with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    DPMSolverMultistepScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.hooks import FirstBlockCacheConfig
from PIL import Image

import wan
from wan.checkpoint.keymaps import dit_diffusers_name
from wan.configs import WAN_CONFIGS
from wan.modules.model import WanModel
from wan.pipeline.solvers import sigma_table

# diffusers' timestep sinusoid is float32: up to 4e-5 off, which moves the output by 2.5e-5.
TOLERANCE = 1e-4


def twins(in_dim: int, out_dim: int, heads: int, head_dim: int, model_type: str) -> Any:
    torch.manual_seed(0)
    dim = heads * head_dim
    ours = WanModel(
        model_type=model_type,
        in_dim=in_dim,
        out_dim=out_dim,
        dim=dim,
        ffn_dim=2 * dim,
        num_heads=heads,
        num_layers=2,
        text_dim=48,
        text_len=32,
    )
    theirs = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=in_dim,
        out_channels=out_dim,
        text_dim=48,
        freq_dim=256,
        ffn_dim=2 * dim,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        rope_max_seq_len=1024,
    )
    state = {dit_diffusers_name(name): tensor for name, tensor in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    return ours, theirs


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 24), (40, 12), (24, 24), (2, 128), (3, 48)])
@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v"])
@torch.no_grad()
def test_dit(kind: str, heads: int, head_dim: int) -> None:
    in_dim, out_dim = {"t2v": (16, 16), "i2v": (36, 16), "ti2v": (48, 48)}[kind]
    ours, theirs = twins(in_dim, out_dim, heads, head_dim, kind)
    x = torch.randn(out_dim, 3, 10, 14)
    y = torch.randn(20, 3, 10, 14) if kind == "i2v" else None
    context, tokens = torch.randn(7, 48), 3 * 5 * 7
    t = torch.tensor([917])
    if kind == "ti2v":
        t = torch.cat((torch.zeros(35), torch.full((70,), 917.0)))[None]
    found = ours([x], t, [context], tokens, None if y is None else [y])[0]
    expected = theirs(
        hidden_states=(x if y is None else torch.cat((x, y)))[None],
        timestep=t,
        encoder_hidden_states=F.pad(context, (0, 0, 0, 25))[None],
        return_dict=False,
    )[0][0]
    assert (found - expected).abs().max() <= TOLERANCE


def official_scheduler(solver: str, shift: float) -> Any:
    """diffusers' solver whose set_timesteps, called by its pipelines, takes the official table."""
    base = UniPCMultistepScheduler if solver == "unipc" else DPMSolverMultistepScheduler

    class Official(base):
        def set_timesteps(self, steps: int, device: Any = None, **_: Any) -> None:
            super().set_timesteps(steps)
            self.sigmas, self.timesteps = sigma_table(solver, steps, shift)
            self.set_begin_index(0)

    return Official(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)


@pytest.mark.parametrize(
    ("task", "with_image", "solver"),
    [
        ("t2v-A14B", False, "unipc"),
        ("t2v-A14B", False, "dpm++"),
        ("i2v-A14B", True, "unipc"),
        ("ti2v-5B", False, "unipc"),
        ("ti2v-5B", True, "dpm++"),
    ],
)
def test_whole_run(tiny, image_path: Path, task: str, with_image: bool, solver: str) -> None:
    """Latents of a whole run, experts, guidance pair, conditioning and solver included."""
    two = task != "ti2v-5B"
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    facade = {"t2v": wan.WanT2V, "i2v": wan.WanI2V, "ti2v": wan.WanTI2V}[task.split("-")[0]]
    image = Image.open(image_path).convert("RGB") if with_image else None
    where = {"img": image, "max_area": 96 * 64} if with_image else {"size": (96, 64)}
    ours = facade(WAN_CONFIGS[task], tiny(task)).generate(
        "",
        **where,
        frame_num=9,
        sample_solver=solver,
        sampling_steps=6,
        guide_scale=(3.0, 4.0) if two else 5.0,
        seed=3,
        prompt_embeds=context,
        negative_prompt_embeds=negative,
        output_type="latent",
    )
    theirs = diffusers_latents(tiny(task, "diffusers"), image, solver, two, context, negative)
    assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_first_block_cache(tiny, threshold: float) -> None:
    """diffusers' own: the same steps computed by both experts, the same latents."""
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    model = wan.WanT2V(
        WAN_CONFIGS["t2v-A14B"],
        tiny("t2v-A14B"),
        step_cache="first_block",
        step_cache_threshold=threshold,
        step_cache_warmup=0,
    )
    ours = model.generate(
        "",
        size=(96, 64),
        frame_num=9,
        sampling_steps=20,
        guide_scale=(3.0, 4.0),
        seed=3,
        prompt_embeds=context,
        negative_prompt_embeds=negative,
        output_type="latent",
    )
    computed: list[str] = []

    def cached(network: Any, name: str) -> None:
        network.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        inner = network.blocks[-1].attn1  # its hooks see a block that is skipped, too
        inner.register_forward_hook(lambda *_: computed.append(name))

    theirs = diffusers_latents(
        tiny("t2v-A14B", "diffusers"), None, "unipc", True, context, negative, 20, cached
    )
    steps = model.step_cache["computed"]
    assert 4 < len(computed) == sum(map(len, steps.values())) < 40
    assert (ours - theirs).abs().max() <= TOLERANCE


def diffusers_latents(
    folder: Path,
    image: Image.Image | None,
    solver: str,
    two: bool,
    context: torch.Tensor,
    negative: torch.Tensor,
    steps: int = 6,
    cached: Callable[[Any, str], None] | None = None,
) -> torch.Tensor:
    """cached: gives a network its cache."""
    kind = WanPipeline if image is None else WanImageToVideoPipeline
    pipe = kind.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.scheduler = official_scheduler(solver, 5.0)
    if cached is not None:
        cached(pipe.transformer, "high_noise"), cached(pipe.transformer_2, "low_noise")
    channels, stride = (16, 8) if two else (48, 16)
    shape = (1, channels, 3, 64 // stride, 96 // stride)
    return pipe(
        **({} if image is None else {"image": image}),
        **({"guidance_scale": 4.0, "guidance_scale_2": 3.0} if two else {"guidance_scale": 5.0}),
        prompt_embeds=F.pad(context, (0, 0, 0, 512 - len(context)))[None],
        negative_prompt_embeds=F.pad(negative, (0, 0, 0, 512 - len(negative)))[None],
        width=96,
        height=64,
        num_frames=9,
        num_inference_steps=steps,
        latents=torch.randn(shape, generator=torch.Generator().manual_seed(3)),
        output_type="latent",
    ).frames[0]
