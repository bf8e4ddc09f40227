"""A diffusers pipeline on an NPU: its self-attention uses the operators of `wan`'s model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline

from tests.npu_sim import checkpoint
from tests.npu_sim.oracles import make_random, relative_rms_error
from wan.diffusers import deparallelize, parallelize_pipe

RAIN = {"use_rainfusion": True, "sparse_start_step": 1, "sparsity": 0.5}
DENSE, SPARSE = "npu_fusion_attention", "mindiesd.rainfusionattention"
FP8 = ["npu_dynamic_block_quant"] * 3 + ["mindiesd.fused_infer_attention_score_v2"]
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {  # chip, settings, operators
    "dense": ("A2", {}, [DENSE] * 4),
    "FP8": ("A5", {"fa_quant": "fp8"}, FP8 * 4),
    "RainFusion v2": ("A2", RAIN, [DENSE, DENSE, SPARSE, SPARSE]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diffusers") / "checkpoint"
    return checkpoint.make_rig_checkpoint(out, "t2v-1.3B", heads=2, layout="diffusers")


@pytest.mark.parametrize("name", CASES)
def test_operators_of_two_steps(
    folder: Path, chip: Callable[[str], None], calls: list[Any], name: str
) -> None:
    """Operators of two steps and branches; latents are close to the unmodified pipeline's."""
    model, settings, operators = CASES[name]
    chip(model)
    pipe = WanPipeline.from_pretrained(
        folder, torch_dtype=torch.bfloat16, text_encoder=None, tokenizer=None
    )
    prompts = make_random(2, 1, 512, 64)

    def make_latents() -> torch.Tensor:
        return pipe(
            prompt_embeds=prompts[0],
            negative_prompt_embeds=prompts[1],
            width=208,
            height=176,
            num_frames=9,
            num_inference_steps=2,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        ).frames

    expected = make_latents()
    parallelize_pipe(pipe, device="npu", **settings)
    actual = make_latents()
    deparallelize(pipe)
    assert [call.name for call in calls] == operators
    assert relative_rms_error(actual, expected) < 0.05
