"""The official configuration objects, built from the presets; user scripts may edit them."""

from __future__ import annotations

import torch
from easydict import EasyDict

from wan.settings.presets import PRESETS, SIZES, TRAIN_TIMESTEPS, Preset


def _make_task_config(preset: Preset) -> EasyDict:
    has_two_experts = preset.boundary is not None
    config = EasyDict(
        __name__=f"Config: Wan {preset.task}",
        t5_model="umt5_xxl",
        t5_dtype=torch.bfloat16,
        t5_checkpoint="models_t5_umt5-xxl-enc-bf16.pth",
        t5_tokenizer="google/umt5-xxl",
        text_len=512,
        param_dtype=torch.bfloat16,
        num_train_timesteps=TRAIN_TIMESTEPS,
        sample_fps=preset.fps,
        sample_neg_prompt=preset.negative_prompt,
        frame_num=preset.frame_num,
        vae_checkpoint=f"Wan{preset.vae}_VAE.pth",
        vae_stride=preset.vae_stride,
        patch_size=preset.patch_size,
        dim=preset.dim,
        ffn_dim=preset.ffn_dim,
        freq_dim=256,
        num_heads=preset.num_heads,
        num_layers=preset.num_layers,
        window_size=(-1, -1),
        qk_norm=True,
        cross_attn_norm=True,
        eps=1e-6,
        sample_shift=preset.sample_shift,
        sample_steps=preset.sample_steps,
        sample_guide_scale=preset.sample_guide_scale
        if has_two_experts
        else preset.sample_guide_scale[0],
    )
    if has_two_experts:
        config.low_noise_checkpoint = "low_noise_model"
        config.high_noise_checkpoint = "high_noise_model"
        config.boundary = preset.boundary
    return config


WAN_CONFIGS: dict[str, EasyDict] = {
    task: _make_task_config(preset) for task, preset in PRESETS.items()
}
SIZE_CONFIGS: dict[str, tuple[int, int]] = dict(SIZES)
MAX_AREA_CONFIGS: dict[str, int] = {name: w * h for name, (w, h) in SIZES.items()}
SUPPORTED_SIZES: dict[str, tuple[str, ...]] = {t: p.trained_sizes for t, p in PRESETS.items()}
