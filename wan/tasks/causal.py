"""Text, or text and a first image, to video by a causal student, block by block.

The latent frames of a video are generated in blocks: a few steps for each, and a last forward pass
that keeps the keys and values of the clean block (`wan.pipeline.block_loop`). The first frames are
there after one block, and a video may be as long as the network has positions.

Legend: Z latent channels, h w latent height/width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wan.media import images
from wan.settings.errors import InputError
from wan.settings.presets import MAX_POSITIONS, Preset
from wan.settings.rules import Values
from wan.tasks.base import DenoiseInputs, Encoders, Inputs, VideoParams
from wan.tasks.textimage2video import TextImageToVideo

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "causal-1.3B": {  # gdhe17/Self-Forcing
        "sample_solver": "dmd",
        "num_frame_per_block": 3,
        "local_attn_size": 21,
        "sink_size": 0,
    },
    "causal-5B": {  # Efficient-Large-Model/LongLive-2.0-5B
        "sample_solver": "unipc",
        "num_frame_per_block": 8,
        "local_attn_size": 32,
        "sink_size": 8,
    },
}


@dataclass(frozen=True, kw_only=True)
class CausalInputs(DenoiseInputs):
    """The inputs of the loop over blocks.

    Attributes:
        contexts: Text embeddings of the prompt of each block, [length, text_dim].
        finished_latents: Latents of the blocks that an earlier run has generated, [Z,f,h,w].
        callback_on_block_end: As in `Inputs`.
    """

    contexts: list[Tensor]
    finished_latents: Tensor | None = None
    callback_on_block_end: Callable[[int, Tensor], None] | None = None


class CausalVideo(TextImageToVideo):
    kind = "causal"
    network = "wan.modules.causal:WanCausalModel"
    loop = "wan.pipeline.block_loop:BlockLoop"
    runs_in_lockstep = False
    diffusers_classes = None

    def read_inputs(self, preset: Preset, values: Values) -> Inputs:
        return Inputs(image=images.read_image_setting(values, "image"))

    def complete_params(self, preset: Preset, chosen: dict[str, Any], values: Values) -> None:
        chosen.update({**_DEFAULTS[preset.task], **chosen})
        _check_block_settings(preset, chosen)
        if prompts := chosen.get("clip_prompts"):
            num_blocks = _count_latents(preset, chosen) // chosen["num_frame_per_block"]
            if len(prompts) > num_blocks:
                why = f"are {len(prompts)}, and the video has {num_blocks} block(s)"
                raise InputError("`clip_prompts`", None, why, "give fewer, or a larger `frame_num`")
            chosen["prompt"] = prompts[0]

    def count_clips(self, params: VideoParams) -> int:
        return params.num_blocks

    def make_clip_params(self, params: VideoParams, clip: int) -> VideoParams:
        prompts = params.clip_prompts or (params.prompt,)
        return replace(params, prompt=prompts[clip * len(prompts) // self.count_clips(params)])

    def make_forward_params(self, params: VideoParams) -> VideoParams:
        stride, size = params.preset.vae_stride[0], params.num_frame_per_block or 1
        return replace(params, frame_num=(size - 1) * stride + 1, clip_prompts=None)

    def count_kept_latents(self, params: VideoParams) -> int:
        least = (params.sink_size or 0) + (params.num_frame_per_block or 1)
        return min(params.local_attn_size or 0, max(params.latent_shape[1], least))

    def list_notices(self, params: VideoParams) -> tuple[str, ...]:
        size, steps = params.num_frame_per_block or 1, params.num_forwards
        num_blocks, stride = params.num_blocks, params.preset.vae_stride[0]
        return (
            f"Causal: {num_blocks} block(s) of {size} latent frames, {steps + 1} forward passes "
            f"each; the first {(size - 1) * stride + 1} of {params.frame_num} frames need "
            f"{steps}. Keys and values of {self.count_kept_latents(params)} latent frames are kept "
            f"(`local_attn_size`), {params.sink_size} of them to the end (`sink_size`).",
        )

    def make_denoise_inputs(
        self, params: VideoParams, base: DenoiseInputs, inputs: Inputs, encoders: Encoders
    ) -> DenoiseInputs:
        contexts = {params.prompt: base.context}
        for prompt in params.clip_prompts or ():
            if prompt not in contexts:
                contexts[prompt], _ = encoders.encode_prompt(replace(params, prompt=prompt))
        return CausalInputs(
            **vars(super().make_denoise_inputs(params, base, inputs, encoders)),
            contexts=[
                contexts[params.make_clip_params(block).prompt]
                for block in range(self.count_clips(params))
            ],
            finished_latents=inputs.clip_state,
            callback_on_block_end=inputs.callback_on_block_end,
        )

    def make_model_kwargs(
        self, params: VideoParams, config: Mapping[str, Any], make: Callable[..., Tensor]
    ) -> dict[str, Any]:
        return {
            "kv_cache": partial(_make_cache, self.count_kept_latents(params), params.sink_size or 0)
        }


TASK = CausalVideo()


def _make_cache(window: int, sink: int, network: Any) -> Any:
    from wan.modules.kv_cache import KVCache

    return KVCache(window, sink)


def _count_latents(preset: Preset, chosen: Mapping[str, Any]) -> int:
    latents: int = (chosen["frame_num"] - 1) // preset.vae_stride[0] + 1
    return latents


def _check_block_settings(preset: Preset, chosen: Mapping[str, Any]) -> None:
    """Refuses partial blocks, a window without room for a block, and guidance of any kind."""
    size, stride = chosen["num_frame_per_block"], preset.vae_stride[0]
    latents = _count_latents(preset, chosen)
    if latents % size:
        counts = [n * size for n in (latents // size, latents // size + 1)]
        lengths = [(n - 1) * stride + 1 for n in counts if 0 < n <= MAX_POSITIONS]
        why = f"makes {latents} latent frames, which are no blocks of {size}"
        remedy = f"use {' or '.join(map(str, lengths))}"
        raise InputError("`frame_num`", chosen["frame_num"], why, remedy)
    window, sink = chosen["local_attn_size"], chosen["sink_size"]
    if window - sink < size:
        why = f"has no room for `sink_size={sink}` and a block of {size} latent frames"
        raise InputError("`local_attn_size`", window, why, f"give at least {sink + size}")
    if any(scale != 1 for scale in chosen["sample_guide_scale"]):
        why = f"is guidance, which {preset.task} has no second branch for"
        scale = ",".join(map("{:g}".format, dict.fromkeys(chosen["sample_guide_scale"])))
        raise InputError("`sample_guide_scale`", scale, why, "use 1, or drop it")
    if chosen.get("nag_scale") is not None:
        why = f"guides each forward pass, and {preset.task} keeps keys of passes without it"
        raise InputError("`nag_scale`", None, why, "drop it")
