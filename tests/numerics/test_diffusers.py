"""`wan`'s networks and complete runs against diffusers with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.hooks import FirstBlockCacheConfig
from PIL import Image

import wan
from tests.conftest import slow
from tests.numerics.recorded import make_diffusers_call, make_prompt_embeds
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers
from wan.configs import WAN_CONFIGS
from wan.modules.model import WanModel
from wan.pipeline.scheduler import make_solver
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS
from wan.tasks.base import make_video_params

# diffusers' timestep sinusoid is float32: up to 4e-5 off, which moves the output by 2.5e-5.
TOLERANCE = 1e-4
HEADS = [(12, 24), (40, 12), (24, 24), (2, 128), (3, 48)]  # (heads, size of a head)


def make_model_pair(in_dim: int, out_dim: int, heads: int, head_dim: int, model_type: str) -> Any:
    torch.manual_seed(0)
    dim = heads * head_dim
    wan_model = WanModel(
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
    diffusers_model = WanTransformer3DModel(
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
    state = {
        rename_dit_to_diffusers(name): tensor for name, tensor in wan_model.state_dict().items()
    }
    diffusers_model.load_state_dict(state, strict=True)
    return wan_model, diffusers_model


FAST_CASES = {("t2v", 12, 24), ("t2v", 40, 12), ("i2v", 3, 48), ("ti2v", 2, 128), ("ti2v", 24, 24)}
ALL_CASES = {(kind, *sizes) for kind in ("t2v", "i2v", "ti2v") for sizes in HEADS}


@pytest.mark.parametrize(
    ("kind", "heads", "head_dim"),
    [*sorted(FAST_CASES), *(slow(*sizes) for sizes in sorted(ALL_CASES - FAST_CASES))],
)
@torch.no_grad()
def test_dit(kind: str, heads: int, head_dim: int) -> None:
    in_dim, out_dim = {"t2v": (16, 16), "i2v": (36, 16), "ti2v": (48, 48)}[kind]
    wan_model, diffusers_model = make_model_pair(in_dim, out_dim, heads, head_dim, kind)
    x = torch.randn(out_dim, 3, 10, 14)
    y = torch.randn(20, 3, 10, 14) if kind == "i2v" else None
    context, tokens = torch.randn(7, 48), 3 * 5 * 7
    t = torch.tensor([917])
    if kind == "ti2v":
        t = torch.cat((torch.zeros(35), torch.full((70,), 917.0)))[None]
    actual = wan_model([x], t, [context], tokens, None if y is None else [y])[0]
    expected = diffusers_model(
        hidden_states=(x if y is None else torch.cat((x, y)))[None],
        timestep=t,
        encoder_hidden_states=F.pad(context, (0, 0, 0, 25))[None],
        return_dict=False,
    )[0][0]
    assert (actual - expected).abs().max() <= TOLERANCE


def make_official_scheduler(solver: str, shift: float, begin_index: int | None = 0) -> Any:
    """Make diffusers' solver with the official sigmas and timesteps.

    begin_index: Of the first step; None: the solver searches its timestep.
    """

    def make_levels(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = {"sample_solver": solver, "sample_steps": steps, "sample_shift": shift}
        request = make_video_params(PRESETS["t2v-A14B"], {"prompt": "", **values})
        schedule = make_noise_schedule(request)
        return torch.tensor(schedule.sigmas), make_solver(request, schedule)[1]

    if solver == "euler":

        class Euler(FlowMatchEulerDiscreteScheduler):
            def set_timesteps(self, steps: int, device: Any = None, **_: Any) -> None:
                super().set_timesteps(sigmas=make_levels(steps)[0][:-1].tolist())

        return Euler()
    base = UniPCMultistepScheduler if solver == "unipc" else DPMSolverMultistepScheduler

    class Official(base):
        def set_timesteps(self, steps: int, device: Any = None, **_: Any) -> None:
            super().set_timesteps(steps)
            self.sigmas, self.timesteps = make_levels(steps)
            self.set_begin_index(begin_index)

    return Official(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)


@pytest.mark.parametrize(
    ("task", "images", "solver"),
    [
        ("t2v-A14B", 0, "unipc"),
        ("t2v-A14B", 0, "euler"),
        slow("i2v-A14B", 1, "unipc"),
        slow("i2v-14B", 1, "unipc"),
        ("flf2v-14B", 2, "euler"),
        slow("ti2v-5B", 0, "unipc"),
        ("ti2v-5B", 1, "dpm++"),
    ],
)
def test_whole_run(tiny, image_path: Path, task: str, images: int, solver: str) -> None:
    """Latents of a complete run with experts, guidance, conditioning and solver."""
    has_two_experts = task.endswith("A14B")
    facade = {"t2v": wan.WanT2V, "ti2v": wan.WanTI2V}.get(task.split("-")[0], wan.WanI2V)
    image = Image.open(image_path).convert("RGB")
    input_images = [image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)][:images]
    size_kwargs = {"img": image, "max_area": 96 * 64} if images else {"size": (96, 64)}
    size_kwargs |= {"last_image": input_images[1]} if images == 2 else {}
    actual = facade(WAN_CONFIGS[task], tiny(task)).generate(
        "",
        **size_kwargs,
        frame_num=9,
        sample_solver=solver,
        sampling_steps=4,
        shift=5.0,
        guide_scale=(3.0, 4.0) if has_two_experts else 5.0,
        seed=3,
        **make_prompt_embeds(),
        output_type="latent",
    )
    folder = tiny(task, "diffusers")
    expected = make_diffusers_latents(folder, input_images, solver, has_two_experts, 4)
    assert (actual - expected).abs().max() <= TOLERANCE


def test_first_block_cache(tiny) -> None:
    """Both experts compute the steps of diffusers' first-block cache, with the same latents."""
    model = wan.WanT2V(
        WAN_CONFIGS["t2v-A14B"],
        tiny("t2v-A14B"),
        step_cache="first_block:threshold=0.5,warmup=0",
    )
    actual = model.generate(
        "",
        size=(96, 64),
        frame_num=9,
        sampling_steps=20,
        guide_scale=(3.0, 4.0),
        seed=3,
        **make_prompt_embeds(),
        output_type="latent",
    )
    computed_blocks: list[int] = []

    def enable_cache(pipe: Any) -> None:
        for network in (pipe.transformer, pipe.transformer_2):
            network.enable_cache(FirstBlockCacheConfig(threshold=0.5))
            inner = network.blocks[-1].attn1  # its hooks see a block that is skipped, too
            inner.register_forward_hook(lambda *_: computed_blocks.append(0))

    folder = tiny("t2v-A14B", "diffusers")
    expected = make_diffusers_latents(folder, [], "unipc", True, 20, enable_cache)
    steps = model.step_cache["computed"]
    assert 4 < len(computed_blocks) == sum(map(len, steps.values())) < 40
    assert (actual - expected).abs().max() <= TOLERANCE


def compute_clip_features(encoder: Any, images: list[Image.Image]) -> torch.Tensor:
    """Run transformers' CLIP with the official preprocessing."""
    pictures = [torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1 for image in images]
    resized = [F.interpolate(x[None].float(), size=(224, 224), mode="bicubic") for x in pictures]
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    pixel_values = (torch.cat(resized) * 0.5 + 0.5 - mean) / std
    with torch.no_grad():
        return encoder(pixel_values=pixel_values, output_hidden_states=True).hidden_states[-2]


def make_diffusers_latents(
    folder: Path,
    images: list[Image.Image],
    solver: str,
    has_two_experts: bool,
    steps: int,
    prepare: Callable[[Any], object] = lambda pipe: None,
    size: tuple[int, int] = (96, 64),
) -> torch.Tensor:
    """Make latents with diffusers. prepare: changes the pipeline before the call."""
    kind = WanImageToVideoPipeline if images else WanPipeline
    pipe = kind.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.scheduler = make_official_scheduler(solver, 5.0)
    prepare(pipe)
    small = pipe.transformer.config.out_channels == 16
    channels, stride = (16, 8) if small else (48, 16)
    image_kwargs = dict(zip(("image", "last_image"), images, strict=False))
    if getattr(pipe, "image_encoder", None) is not None:
        pipe.encode_image = lambda *_: compute_clip_features(pipe.image_encoder, images)
    width, height = size
    shape = (1, channels, 3, height // stride, width // stride)
    return pipe(
        **image_kwargs,
        **make_diffusers_call(has_two_experts),
        width=width,
        height=height,
        num_inference_steps=steps,
        latents=torch.randn(shape, generator=torch.Generator().manual_seed(3)),
    ).frames[0]
