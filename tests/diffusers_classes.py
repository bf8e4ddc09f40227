"""Pipelines of diffusers' other Wan classes with tiny random networks, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from diffusers.utils import logging
from PIL import Image
from torch import Tensor

WIDTH, HEIGHT, FRAMES, FACE = 48, 32, 9, 16
_SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 32,
    "ffn_dim": 32,
    "num_layers": 4,
    "rope_max_seq_len": 32,
}
_FACES = {
    "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
    "motion_encoder_size": FACE,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}


def make_network(name: str = "WanTransformer3DModel", seed: int = 0, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    network = getattr(diffusers, name)(**_SIZES, **sizes).eval()
    for parameter in network.parameters():  # larger than diffusers' initial values
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network


def make_vae() -> Any:
    torch.manual_seed(1)
    return AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()


def make_scheduler() -> Any:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def make_images(count: int, width: int = WIDTH, height: int = HEIGHT) -> list[Any]:
    shape = (count, height, width, 3)
    pixels = np.random.default_rng(count + width).integers(0, 255, shape, dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


def make_texts(steps: int = 3) -> dict[str, Any]:
    """Returns the arguments that all pipelines have."""
    cond, uncond = torch.randn(2, 1, 512, 32, generator=torch.Generator().manual_seed(5))
    return {
        "prompt_embeds": cond,
        "negative_prompt_embeds": uncond,
        "generator": torch.Generator().manual_seed(3),
        "width": WIDTH,
        "height": HEIGHT,
        "num_inference_steps": steps,
    }


class Case:
    """A pipeline and its call; `make_latents(steps)` calls it.

    Args:
        name: The class of the pipeline.
        make_call: Returns the arguments besides `make_texts`.
        components: Networks and settings of the constructor.
    """

    def __init__(self, name: str, make_call: Callable[[], dict[str, Any]], **components: Any):
        logging.set_verbosity_error()
        self.make_call = make_call
        encoders = {"tokenizer": None, "text_encoder": None}
        if name == "WanAnimatePipeline":
            encoders |= {"image_processor": None, "image_encoder": None}
        common = {"vae": make_vae(), "scheduler": make_scheduler()}
        self.pipe = getattr(diffusers, name)(**encoders, **common, **components)
        self.pipe.set_progress_bar_config(disable=True)

    def make_latents(self, steps: int = 3) -> Tensor:
        """Calls the pipeline, which computes this number of steps."""
        call = make_texts(steps) | self.make_call()
        call["num_inference_steps"] = round(steps / call.get("strength", 1))
        return self.pipe(**call, output_type="latent").frames


def make_features() -> Tensor:
    """Returns CLIP features."""
    return torch.randn(1, 257, 4, generator=torch.Generator().manual_seed(6))


def make_video_call() -> dict[str, Any]:
    return {"video": make_images(FRAMES), "guidance_scale": 4.0, "strength": 0.5}


def make_animate_call(mode: str = "animate") -> dict[str, Any]:
    """Two segments; in the mode "replace" with guidance."""
    scene = {
        "background_video": make_images(FRAMES),
        "mask_video": [image.convert("L") for image in make_images(FRAMES)],
    }
    return {
        "image": make_images(1)[0],
        "pose_video": make_images(FRAMES),
        "face_video": make_images(FRAMES, FACE, FACE),
        "segment_frame_length": 5,
        "prev_segment_conditioning_frames": 1,
        "mode": mode,
        **(scene | {"guidance_scale": 3.0} if mode == "replace" else {}),
    }


def make_control_call() -> dict[str, Any]:
    frames = {"video": make_images(FRAMES), "num_frames": FRAMES}
    return {**frames, "guidance_scale": 4.0, "conditioning_scale": [0.9, 0.6]}


def make_animate_case(mode: str) -> Case:
    network = make_network("WanAnimateTransformer3DModel", image_dim=4, **_FACES)
    case = Case("WanAnimatePipeline", partial(make_animate_call, mode), transformer=network)
    case.pipe.encode_image = lambda *_: make_features()
    return case


def make_vace_case(boundary: float) -> Case:
    """One network of two: the high-noise one with boundary 0, the low-noise one with 1."""
    network = make_network("WanVACETransformer3DModel", vace_layers=[0, 2], vace_in_channels=96)
    names = ("transformer", "transformer_2") if boundary == 0 else ("transformer_2", "transformer")
    networks = dict(zip(names, (network, None), strict=True))
    return Case("WanVACEPipeline", make_control_call, boundary_ratio=boundary, **networks)


class ModularCase(Case):
    """A modular pipeline without the blocks that encode texts and images and decode latents."""

    def __init__(self, name: str, make_call: Callable[[], dict[str, Any]], **components: Any):
        logging.set_verbosity_error()
        self.make_call = make_call
        blocks = getattr(diffusers, getattr(diffusers, name).default_blocks_name)()
        for block in {*blocks.sub_blocks} - {"vace_encoder", "denoise"}:
            blocks.sub_blocks.pop(block)
        self.pipe = blocks.init_pipeline()
        self.pipe.set_progress_bar_config(disable=True)
        parts = {"vae": make_vae(), "scheduler": make_scheduler()} | components
        parts |= {"guider": diffusers.ClassifierFreeGuidance(guidance_scale=4.0)}
        if "transformer_2" in components:
            parts |= {"guider_2": diffusers.ClassifierFreeGuidance(guidance_scale=3.0)}
        self.pipe.update_components(**parts)

    def make_latents(self, steps: int = 3) -> Tensor:
        return self.pipe(**make_texts(steps), **self.make_call(), output="latents")


def make_modular_image_call() -> dict[str, Any]:
    condition = torch.randn(1, 20, 3, 4, 6, generator=torch.Generator().manual_seed(7))
    return {"num_frames": FRAMES, "image_condition_latents": condition}


def make_two_networks(name: str = "WanTransformer3DModel", **sizes: Any) -> dict[str, Any]:
    return {
        "transformer": make_network(name, **sizes),
        "transformer_2": make_network(name, seed=2, **sizes),
    }


CASES: dict[str, Callable[[], Case]] = {
    "video": lambda: Case("WanVideoToVideoPipeline", make_video_call, transformer=make_network()),
    "animate": partial(make_animate_case, "animate"),
    "animate, replace": partial(make_animate_case, "replace"),
    "control, high noise": partial(make_vace_case, 0.0),
    "control, low noise": partial(make_vace_case, 1.0),
    "modular": lambda: ModularCase(
        "WanModularPipeline", lambda: {"num_frames": FRAMES}, transformer=make_network()
    ),
    "modular 2.2": lambda: ModularCase(
        "Wan22ModularPipeline", lambda: {"num_frames": FRAMES}, **make_two_networks()
    ),
    "modular image": lambda: ModularCase(
        "WanImage2VideoModularPipeline",
        lambda: {**make_modular_image_call(), "image_embeds": make_features()},
        transformer=make_network(in_channels=36, image_dim=4, added_kv_proj_dim=24),
    ),
    "modular 2.2 image": lambda: ModularCase(
        "Wan22Image2VideoModularPipeline",
        make_modular_image_call,
        **make_two_networks(in_channels=36),
    ),
}
if hasattr(diffusers, "Wan22VaceModularPipeline"):  # since 0.42
    CASES["modular 2.2 control"] = lambda: ModularCase(
        "Wan22VaceModularPipeline",
        lambda: {"num_frames": FRAMES, "video": make_images(FRAMES)},
        **make_two_networks("WanVACETransformer3DModel", vace_layers=[0, 2], vace_in_channels=96),
    )
