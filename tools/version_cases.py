"""Cases of compare_versions.py: requests that differ in one or two settings, and their fixtures.

A case is a small video of a tiny checkpoint, so that it takes seconds; together the cases should
reach every branch that can change a result.
"""

from __future__ import annotations

import shlex
from typing import Any

from tools.make_cases import (
    NPU,
    Case,
    clips,
    diffusers,
    lines,
    npu,
    python,
    quick,
    recipe,
    resumed,
    served,
    tiny,
)

A2, A5 = "220", "260"
MAY_DIFFER: dict[str, str] = {}
"""Name of a case -> why its result is not the base's. The base is 0d6978b7: versions before it lack
some tasks."""

LARGE = "width=144, height=144, num_frames=13"
NINE, CACHE = "num_inference_steps=9", "'first_block', threshold=0.6"
FIVE_B = "width=224, height=160"
T2V = "--ckpt_dir $made/t2v"
I2V = "--task i2v-A14B --ckpt_dir $made/i2v --image $base/examples/star.png"
TI2V = "--task ti2v-5B --ckpt_dir $made/ti2v --size 128*96"
TI2V_IMAGE = f"{TI2V} --image $base/examples/star.png"
DENSE = "--task t2v-1.3B --ckpt_dir $made/dense"
DEMO = "--ckpt_dir $base/examples/demo/t2v-A14B --size 64*64"
INT8 = f"{T2V} --quant_dit_path $made/int8"
ODD = "--size 48*48 --frame_num 9"  # 27 tokens
LONG = "--size 64*64 --frame_num 45"  # 192: two query blocks
SPARSE = "--size 144*144 --frame_num 13 --use_rainfusion --sparsity 0.7 --sparse_start_step 1"
V2, V3 = (f"{SPARSE} --rainfusion_type {version}" for version in ("v2", "v3"))  # 324 tokens
FP8 = f"{DEMO} {LONG} --fa_quant fp8"  # needs heads of a power of two
V3_FP8 = f"{DEMO} {V3} --fa_quant fp8"
BOTH_WAYS = "--ring_type bidirectional"
CACHED = f"{T2V} --sample_steps 9"
FIRST_BLOCK = f"{CACHED} --step_cache first_block:threshold=0.6"
MAG = f"{TI2V} --sample_steps 9 --step_cache mag:threshold=1,retention=0"
TEA = f"{TI2V} --sample_steps 9 --step_cache tea:threshold=1,coefficients=1,0"
ATTENTION = f"{CACHED} --use_attentioncache --start_step 1 --end_step 7 --attentioncache_interval 3"
LORA = f"{T2V} --lora_dir $made/lora"
I2V21 = "--task i2v-14B --ckpt_dir $made/wan21-i2v --image $base/examples/star.png"
FLF2V = "--task flf2v-14B --ckpt_dir $made/wan21-flf2v --image $base/examples/star.png"
FLF2V += " --last_image $base/examples/star_end.png"
LONG_I2V = f"{I2V} --size 64*32 --frame_num 9 --num_clip 2"
SOUND, STAR_FILE = "$made/sound/tones.wav", "$base/examples/star.png"
S2V = "--task s2v-14B --ckpt_dir $made/s2v --size 96*64 --infer_frames 12"
S2V += f" --image {STAR_FILE} --audio {SOUND}"  # 21 frames: two clips, the second one cut
POSED = f"{S2V} --pose_video $made/moves/files/src_pose.mp4"
MOVES, TEN_MOVES = "$made/moves/files", "$made/ten-moves/files"
ANIMATE = f"--task animate-14B --ckpt_dir $made/animate --src_root_path {MOVES} --frame_num 5"
REFERT = f"--src_root_path {TEN_MOVES} --frame_num 9 --refert_num 5"
SOURCE, MASK = (f"$base/examples/control/{name}.mp4" for name in ("source", "mask"))
VACE = "--task vace-1.3B --ckpt_dir $made/vace"
VACE += f" --src_video {SOURCE} --src_mask {MASK} --src_ref_images {STAR_FILE}"
SPEECH = {"size": "96*64", "infer_frames": 12}
CONTROL = {"src_video": SOURCE, "src_mask": MASK, "src_ref_images": STAR_FILE}
FILE = "--prompt_file $made/prompts/lines.txt --save_file $out"  # a folder
FOX, STAR = "'a fox', (64, 32)", "Image.open('$base/examples/star.png')"
FEW = "sampling_steps=2, seed=7, output_type='latent'"
CALL = "frame_num=5, sampling_steps=4, seed=7, output_type='latent'"
LONG_CALL = f"WanI2V('i2v-A14B', '$made/i2v').generate('a star', {STAR}, 2048, 9, {FEW}"
NO_PROMPT = LONG_CALL.replace("'a star'", "''")
QUANTIZE = "tools/quantize_dit.py"
NPU_FILES = """
from pathlib import Path
from tests.npu_sim import checkpoint
checkpoint.make_rig_checkpoint(Path("$made/npu"))
"""

LORA_FILES = """
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
for seed, expert in enumerate(("high_noise", "low_noise")):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for file in sorted(Path(f"$made/t2v/{expert}_model").glob("*.safetensors")):
        for name, weight in sorted(load_file(file).items()):
            layer = name.removesuffix(".weight")
            if layer != name and name.startswith("blocks.") and weight.dim() == 2:
                key = f"diffusion_model.{layer}"
                down = torch.randn(4, weight.shape[1], generator=generator) / 30
                up = torch.randn(weight.shape[0], 4, generator=generator) / 30
                tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
                tensors[f"{key}.alpha"] = torch.tensor(2.0)
    save_file(tensors, f"$made/lora/{expert}_model.safetensors")
"""
FP8_FILES = """
import shutil, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
folder = shutil.copytree("$made/t2v", "$made/fp8-files", dirs_exist_ok=True)
shutil.copy(f"{folder}/high_noise_model/config.json", folder)
for expert in ("high_noise", "low_noise"):
    stored = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for file in sorted(Path(f"$made/t2v/{expert}_model").glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            key, value = f"model.diffusion_model.{name}", tensor.float()
            if name.startswith("blocks.") and tensor.dim() == 2 and "weight" in name:
                layer, scale = key.removesuffix(".weight"), value.abs().max() / 448
                value = (value / scale).to(torch.float8_e4m3fn)
                stored |= {f"{layer}.scale_weight": scale, f"{layer}.scale_input": scale.clone()}
            stored[key] = value
    shutil.rmtree(f"{folder}/{expert}_model")
    save_file(stored, f"{folder}/wan2.2_t2v_{expert}_14B_fp8_scaled.safetensors")
"""
PROMPT_FILE = """
import json
from pathlib import Path
lines = [
    "a red fox",
    {"prompt": "a whale", "base_seed": 5, "sample_steps": 3},
    {"prompt": "named", "save_file": "own.mp4", "negative_prompt": "red", "frame_num": 9},
]
lines = [one if isinstance(one, str) else json.dumps(one) for one in lines]
Path("$made/prompts/lines.txt").write_text("\\n".join(lines))
"""
SHORT = {"base_seed": 7, "sample_steps": 2}
FOX_LINE = SHORT | {"prompt": "a fox", "size": "64*32", "frame_num": 5}
STAR_LINE = FOX_LINE | {"prompt": "a star", "image": STAR_FILE}
CLIP = STAR_LINE | {"frame_num": 9, "num_clip": 2}
REQUESTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "t2v": ("t2v-A14B", [FOX_LINE, FOX_LINE | {"negative_prompt": "red", "frame_num": 9}]),
    "i2v": (
        "i2v-A14B",
        [
            STAR_LINE,
            CLIP | {"chain": "latent"},
            CLIP | {"chain": "frame", "prompt": "another star"},
            CLIP | {"chain": "latent", "prompt": ["a star", "red"]},
        ],
    ),
    "wan21-flf2v": ("flf2v-14B", [STAR_LINE | {"last_image": "$base/examples/star_end.png"}]),
    "ti2v": ("ti2v-5B", [FOX_LINE | {"size": "128*96"}, STAR_LINE | {"size": "128*96"}]),
    "s2v": ("s2v-14B", [SHORT | {"image": STAR_FILE, "audio": SOUND, **SPEECH}]),
    "animate": ("animate-14B", [SHORT | {"src_root_path": MOVES, "frame_num": 5}]),
    "vace": ("vace-1.3B", [FOX_LINE | CONTROL, FOX_LINE | {"src_ref_images": STAR_FILE}]),
}
"""Fixture -> its task, and requests to it by a prompt file and over HTTP."""
LINE_FILES = f"""
import json
from pathlib import Path
for name, (_, requests) in {REQUESTS}.items():
    Path(f"$made/lines/{{name}}.txt").write_text("\\n".join(map(json.dumps, requests)))
"""

FIXTURES = (
    (
        Case("npu", f"-c {shlex.quote(NPU_FILES)}", environ=NPU | {"NPU_SIM_SOC": A2}),
        tiny("t2v", "t2v-A14B"),
        tiny("i2v", "i2v-A14B"),
        tiny("ti2v", "ti2v-5B"),
        tiny("dense", "t2v-1.3B"),
        tiny("t2v-diffusers", "t2v-A14B", "diffusers"),
        tiny("i2v-diffusers", "i2v-A14B", "diffusers"),
        tiny("ti2v-diffusers", "ti2v-5B", "diffusers"),
        tiny("dense-diffusers", "t2v-1.3B", "diffusers"),
        tiny("wan21-i2v", "i2v-14B"),
        tiny("wan21-flf2v", "flf2v-14B"),
        tiny("wan21-i2v-diffusers", "i2v-14B", "diffusers"),
        tiny("s2v", "s2v-14B"),
        tiny("animate", "animate-14B"),
        tiny("vace", "vace-1.3B"),
        Case("sound", f"tools/make_sound.py {SOUND} --seconds 1.3"),
        Case("short-sound", "tools/make_sound.py $made/short-sound/tones.wav --seconds 0.4"),
        Case("moves", f"tools/make_character.py {MOVES} --size 48*32 --frames 6"),
        Case("ten-moves", f"tools/make_character.py {TEN_MOVES} --size 48*32 --frames 10"),
        Case("prompts", f"-c {shlex.quote(PROMPT_FILE)}"),
        Case("lines", f"-c {shlex.quote(LINE_FILES)}"),
    ),
    (
        Case("int8", f"{QUANTIZE} --ckpt_dir $made/t2v --out $made/int8"),
        Case("int8-fp8", f"{QUANTIZE} --ckpt_dir $made/ti2v --out $made/int8-fp8 --fa fp8"),
        Case("lora", f"-c {shlex.quote(LORA_FILES)}"),
        Case("fp8-files", f"-c {shlex.quote(FP8_FILES)}"),
        quick("earlier", f"{T2V} --sample_solver dpm++ --sample_guide_scale 2,4"),
        quick("earlier-i2v", I2V),
    ),
)
"""Fixtures of the cases, made by the earlier version; the second stage needs the first."""

CASES = (
    # Tasks and layouts.
    quick("t2v", T2V),
    quick("t2v-diffusers", "--ckpt_dir $made/t2v-diffusers"),
    quick("i2v", I2V),
    quick("i2v-14B-name", f"{I2V} --task i2v-14B"),
    quick("i2v-diffusers", f"{I2V} --ckpt_dir $made/i2v-diffusers"),
    quick("ti2v", TI2V),
    quick("ti2v-image", TI2V_IMAGE),
    quick("ti2v-diffusers", f"{TI2V} --ckpt_dir $made/ti2v-diffusers"),
    quick("dense", DENSE),
    quick("dense-diffusers", f"{DENSE} --ckpt_dir $made/dense-diffusers"),
    quick("dense-under-t2v-14B", f"{DENSE} --task t2v-14B"),
    quick("demo-t2v", DEMO),
    quick("demo-i2v", f"{I2V} --ckpt_dir $base/examples/demo/i2v-A14B --size 64*64"),
    Case("demo-by-default", "generate.py --base_seed 7 --save_latents --save_file $out.mp4"),
    # Requests.
    quick("prompt", f"{T2V} --prompt 'a small blue square rotates' --negative_prompt 'red, 灰'"),
    quick("one-frame", f"{T2V} --frame_num 1"),
    quick("unipc-12-steps", f"{T2V} --sample_steps 12"),
    quick("dpm++", f"{T2V} --sample_solver dpm++"),
    quick("dpm++-12-steps", f"{T2V} --sample_solver dpm++ --sample_steps 12"),
    quick("shift", f"{T2V} --sample_shift 2.5"),
    quick("no-guidance", f"{T2V} --sample_guide_scale 1"),
    quick("guidance-pair", f"{I2V} --sample_guide_scale 2,5.5"),
    quick("guidance-of-one-expert", f"{T2V} --sample_guide_scale 1,4"),
    quick("noise-of-the-device", f"{T2V} --noise_device device"),
    Case("from-json", "generate.py --from_json $made/earlier/out.json --save_file $out.mp4"),
    # Precision and memory.
    quick("bf16", f"{T2V} --precision bf16"),
    quick("bf16-i2v", f"{I2V} --precision bf16 --offload_model false"),
    quick("bf16-ti2v-image", f"{TI2V_IMAGE} --precision bf16"),
    quick("converted", f"{T2V} --convert_model_dtype"),
    quick("fp32", f"{TI2V} --precision fp32 --device cpu"),
    quick("without-offload", f"{T2V} --offload_model false --t5_cpu"),
    quick("compiled", f"{T2V} --compile"),
    # Decoding.
    Case(
        "decoded",
        "generate.py --decode_latents $made/earlier/out.latents.safetensors --save_file $out.mp4",
    ),
    Case(
        "decoded-i2v",
        "generate.py --decode_latents $made/earlier-i2v/out.latents.safetensors"
        " --save_file $out.mp4",
    ),
    quick("fixed-latents", f"{T2V} --fixed_latents $made/earlier/out.latents.safetensors"),
    quick("latents-of-steps", f"{I2V} --save_latents steps"),
    quick("tiled", f"{T2V} --size 288*64 --vae_tiling"),
    # FP8, RainFusion, int8.
    quick("fp8", FP8),
    quick("fp8-bf16", f"{FP8} --precision bf16"),
    quick("fp8-ti2v", f"{TI2V} --fa_quant fp8"),
    quick("v2", f"{T2V} {V2}"),
    quick("v2-refresh", f"{T2V} {V2} --sparse_start_step 0 --mask_refresh_interval 2"),
    quick("v3-bf16", f"{I2V} {V3} --precision bf16"),
    quick("v3-fp8", V3_FP8),
    quick("int8", INT8),
    quick("int8-bf16", f"{INT8} --precision bf16"),
    quick("int8-fp8", f"{TI2V} --quant_dit_path $made/int8-fp8 --fa_quant fp8"),
    # Step caches.
    quick("cache-first-block", FIRST_BLOCK),
    quick("cache-first-block-order-1", f"{FIRST_BLOCK},order=1"),
    quick("cache-first-block-warmup", f"{FIRST_BLOCK},warmup=2"),
    quick("cache-first-block-bf16-i2v", f"{I2V} {FIRST_BLOCK[len(T2V) :]} --precision bf16"),
    quick("cache-mag", MAG),
    quick("cache-mag-a14b", f"{CACHED} --step_cache mag:threshold=0.5"),
    quick("cache-mag-max-skip", f"{MAG},max_skip=1,warmup=0"),
    quick("cache-tea", TEA),
    quick("cache-tea-own-coefficients", f"{TI2V} --sample_steps 9 --step_cache tea"),
    quick("cache-attention", ATTENTION),
    quick("cache-cfg", f"{CACHED} --sample_steps 12 --step_cache cfg"),
    quick("cache-list", f"{CACHED} --step_cache steps:0,2,5-6"),
    quick("cache-few-steps", f"{T2V} --step_cache steps:0,2,force=true"),
    quick("2-cache-first-block-overlap", f"{FIRST_BLOCK} --fa_alltoall_overlap", 2),
    quick("2-cache-tea-ring", f"{TEA} --ring_size 2", 2),
    quick("2-cache-attention-fsdp", f"{ATTENTION} --dit_fsdp --comm_type 1", 2),
    quick("2-cache-cfg-ring", f"{CACHED} --step_cache cfg --ring_size 2", 2),
    quick("4-cache-first-block-cfg", f"{FIRST_BLOCK} --cfg_size 2 --comm_type 1 --dit_fsdp", 4),
    quick("4-cache-mag-cfg", f"{MAG} --cfg_size 2", 4),
    # LoRA, few steps, FP8 files.
    quick("lora", LORA),
    quick("lora-strength", f"{T2V} --lora_high_noise $made/lora/high_noise_model.safetensors=0.5"),
    quick("lora-bf16", f"{LORA} --precision bf16"),
    recipe("lora-lightning", f"{LORA} --recipe lightning-4step"),
    quick("demo-lora", f"{DEMO} --lora_dir $base/examples/demo/T2V-A14B-4steps-lora"),
    recipe("2-lora-fsdp-comm-1", f"{LORA} --recipe lightning-4step --dit_fsdp --comm_type 1", 2),
    recipe("euler-distill", f"{T2V} --recipe distill-4step"),
    recipe("euler-timesteps", f"{T2V} --sample_solver euler --timesteps 1000,750,500,250"),
    quick("euler-boundary-step", f"{T2V} --sample_solver euler --boundary_step 1"),
    recipe("dmd-fastwan", f"{TI2V} --recipe fastwan-3step"),
    recipe("rcm", f"{T2V} --recipe rcm-4step"),
    quick("rcm-ode", f"{T2V} --sample_solver rcm --sample_steps 3 --ode --sigma_max 120"),
    quick("4-rcm-cfg", f"{T2V} --sample_solver rcm --cfg_size 2 --comm_type 1", 4),
    quick("fp8-files-keep", "--ckpt_dir $made/fp8-files --stored_weights keep"),
    quick("fp8-files-upcast", "--ckpt_dir $made/fp8-files --stored_weights upcast"),
    # Wan2.1 with images, and a last image.
    quick("wan21-i2v", I2V21),
    quick("wan21-i2v-bf16", f"{I2V21} --precision bf16"),
    quick("wan21-flf2v", FLF2V),
    quick("last-image", f"{I2V} --last_image $base/examples/star_end.png"),
    quick("2-wan21-i2v-comm-1", f"{I2V21} --comm_type 1", 2),
    quick("2-wan21-flf2v-ring", f"{FLF2V} --ring_size 2", 2),
    # The VAE on ranks, and in bf16.
    quick("vae-bf16", f"{T2V} --vae_precision bf16"),
    quick("2-vae-parallel", f"{T2V} --vae_parallel", 2),
    quick("2-vae-parallel-image", f"{TI2V_IMAGE} --frame_num 9 --vae_parallel", 2),
    quick("2-vae-parallel-bf16", f"{T2V} --vae_parallel --vae_precision bf16", 2),
    quick("3-vae-parallel-image", f"{I2V} --size 64*96 --cfg_size 1 --vae_parallel", 3),
    # Memory: networks and blocks that are copied.
    quick("offload-block", f"{T2V} --offload_model block --resident_blocks 0"),
    quick("offload-block-ti2v", f"{TI2V} --offload_model block --precision bf16"),
    quick("2-offload-block-lora", f"{LORA} --offload_model block --comm_type 1", 2),
    # Speech, characters, control, long videos.
    clips("s2v-without-offload", f"{S2V} --offload_model false"),
    clips("s2v-short-sound", f"{S2V} --audio $made/short-sound/tones.wav"),
    clips("s2v-audio-sync", f"{S2V} --num_clip 1 --audio_sync"),
    clips("s2v-start-from-ref", f"{POSED} --start_from_ref"),
    clips("s2v-offload-block", f"{S2V} --offload_model block --resident_blocks 0"),
    clips("s2v-cache", f"{S2V} --sample_steps 9 {FIRST_BLOCK[len(CACHED) :]}"),
    clips("2-s2v-fsdp-comm-1", f"{S2V} --dit_fsdp --comm_type 1", 2),
    clips("3-s2v-pose", POSED, 3),
    clips("animate-refert-5", f"{ANIMATE} {REFERT} --offload_model false"),
    clips("animate-offload-block", f"{ANIMATE} --replace_flag --offload_model block"),
    clips("2-animate-replace", f"{ANIMATE} --replace_flag --comm_type 1 --vae_parallel", 2),
    quick("vace-scale", f"{VACE} --conditioning_scale 0.5 --offload_model block"),
    quick("2-vace-comm-1", f"{VACE} --comm_type 1 --vae_parallel", 2),
    clips("long-overlap", f"{LONG_I2V} --chain latent --num_clip 3 --overlap_decoding"),
    clips("2-long-vae-parallel", f"{LONG_I2V} --chain latent --vae_parallel --save_latents", 2),
    clips("3-long-frame", f"{LONG_I2V} --chain frame --vae_parallel", 3),
    resumed("long-resumed", f"{LONG_I2V} --chain latent --num_clip 3"),
    resumed("s2v-resumed", S2V),
    resumed("animate-resumed", ANIMATE),
    # Every task by a prompt file, and by the service.
    *(lines(name, *requests) for name, requests in REQUESTS.items()),
    *(served(name, *requests) for name, requests in REQUESTS.items()),
    # Many videos.
    quick("prompt-file", f"{T2V} {FILE}"),
    quick("prompt-file-dense", f"{DENSE} {FILE} --offload_model false"),
    quick("prompt-file-by-expert", f"{T2V} {FILE} --group_by_expert"),
    quick("2-prompt-file-by-expert", f"{T2V} {FILE} --group_by_expert --comm_type 2", 2),
    # Variables of the Ascend adaptation.
    quick("ALGO=3", f"{DEMO} {LONG}", ALGO="3"),
    quick("PRECISION=0", T2V, PRECISION="0", T5_LOAD_CPU="1"),
    quick("OVERLAP=1", T2V, 2, OVERLAP="1"),
    quick("QUANT_ALLTOALL=1", FP8, 2, QUANT_ALLTOALL="1"),
    # Two ranks.
    quick("2-comm-0", T2V, 2),
    quick("2-comm-1", f"{T2V} --comm_type 1", 2),
    quick("2-comm-2", f"{T2V} --comm_type 2", 2),
    quick("2-overlap", f"{T2V} --fa_alltoall_overlap", 2),
    quick("2-comm-2-bf16", f"{T2V} --comm_type 2 --precision bf16", 2),
    quick("2-odd-comm-1", f"{T2V} {ODD} --comm_type 1", 2),
    quick("2-odd-ring", f"{T2V} {ODD} --ulysses_size 1", 2),
    quick("2-cfg", f"{T2V} --cfg_size 2", 2),
    quick("2-cfg-guidance-of-one-expert", f"{T2V} --cfg_size 2 --sample_guide_scale 1,4", 2),
    quick("2-fsdp", f"{T2V} --dit_fsdp --t5_fsdp", 2),
    quick("2-fsdp-converted", f"{I2V} --dit_fsdp --convert_model_dtype --comm_type 1", 2),
    quick("2-compiled-comm-1", f"{T2V} --compile --comm_type 1", 2),
    quick("2-i2v-comm-2", f"{I2V} --comm_type 2", 2),
    quick("2-ti2v-image-comm-1", f"{TI2V_IMAGE} --comm_type 1", 2),
    quick("2-noise-of-the-device", f"{T2V} --noise_device device", 2),
    quick("2-fp8-comm-2", f"{FP8} --comm_type 2", 2),
    quick("2-fp8-quant-alltoall-comm-1", f"{FP8} --quant_alltoall --comm_type 1", 2),
    quick("2-v2-comm-2", f"{T2V} {V2} --comm_type 2", 2),
    quick("2-v3-fp8-overlap", f"{V3_FP8} --fa_alltoall_overlap", 2),
    quick("2-int8-comm-1", f"{INT8} --comm_type 1", 2),
    # More ranks.
    quick("3-ti2v-odd", f"{TI2V} --size 96*96 --frame_num 9 --comm_type 1", 3),
    quick("4-comm-1", f"{T2V} --comm_type 1", 4),
    quick("4-overlap-odd", f"{T2V} {ODD} --fa_alltoall_overlap", 4),
    quick("4-ring", f"{T2V} --ulysses_size 1", 4),
    quick("4-ring-both-ways", f"{T2V} {ODD} --ulysses_size 1 {BOTH_WAYS}", 4),
    quick("4-mixed-comm-2", f"{T2V} {ODD} --ring_size 2 --comm_type 2", 4),
    quick("4-mixed-both-ways-overlap", f"{T2V} --ring_size 2 {BOTH_WAYS} --fa_alltoall_overlap", 4),
    quick("4-mixed-fp8", f"{FP8} --ring_size 2 --quant_alltoall --comm_type 2", 4),
    quick("4-mixed-v3-fp8", f"{V3_FP8} --ring_size 2 --comm_type 1", 4),
    quick("4-cfg-comm-2", f"{I2V} --cfg_size 2 --comm_type 2", 4),
    quick("4-ti2v-ring-fsdp", f"{TI2V} --ring_size 2 --dit_fsdp --t5_fsdp", 4),
    quick("8-comm-1", f"{T2V} --ulysses_size 8 --comm_type 1", 8),
    quick("8-all-axes", f"{T2V} --cfg_size 2 --ring_size 2 --comm_type 2 --dit_fsdp", 8),
    # Simulated NPUs.
    npu("npu", A2, "--sample_guide_scale 4"),
    npu("npu-plain-ops", A2, "--fused_ops none"),
    npu("npu-cache", A2, "--sample_steps 9 --step_cache first_block:threshold=0.6"),
    npu("npu-offload-cpu", A2, "--offload_model cpu"),
    npu("npu-offload-block", A2, "--offload_model block --resident_blocks 1"),
    npu("npu-fused-ops", A2, "--fused_ops rope,rms_norm,layer_norm,scale_shift"),
    npu("npu-2-laser", A2, "--attention_backend laser --size 1024*512 --frame_num 1", 2),
    npu("npu-2-v2-comm-2", A2, f"{V2} --comm_type 2", 2),
    npu("npu-2-fp8-quant-alltoall-comm-1", A5, "--fa_quant fp8 --quant_alltoall --comm_type 1", 2),
    npu("npu-2-v3-fp8-overlap", A5, f"{V3} --fa_quant fp8 --fa_alltoall_overlap", 2),
    npu("npu-4-mixed-both-ways-comm-2", A2, f"--ring_size 2 {BOTH_WAYS} --comm_type 2", 4),
    # The Python classes.
    python("python-t2v", f"WanT2V(WAN_CONFIGS['t2v-A14B'], '$made/t2v').generate({FOX}, {CALL})"),
    python(
        "python-dense-fp8",
        "WanT2V(WAN_CONFIGS['t2v-14B'], '$made/dense', precision='bf16', fa_quant='fp8').generate("
        f"{FOX}, {CALL}, sample_solver='dpm++', guide_scale=3.0, n_prompt='red')",
    ),
    python(
        "python-i2v",
        "WanI2V(WAN_CONFIGS['i2v-A14B'], '$made/i2v', convert_model_dtype=True)"
        f".generate('a star', {STAR}, max_area=2048, {CALL})",
    ),
    python(
        "python-ti2v",
        "WanTI2V(WAN_CONFIGS['ti2v-5B'], '$made/ti2v')"
        f".generate('a star', {STAR}, max_area=12288, {CALL}, offload_model=False)",
    ),
    python(
        "python-ti2v-text",
        f"WanTI2V('ti2v-5B', '$made/ti2v').generate('a fox', size=(128, 96), {CALL})",
    ),
    python(
        "python-flf2v",
        "WanI2V('flf2v-14B', '$made/wan21-flf2v').generate('a star', "
        f"{STAR}, 2048, last_image=Image.open('$base/examples/star_end.png'), {CALL})",
    ),
    python(
        "python-s2v",
        f"WanS2V('s2v-14B', '$made/s2v').generate('a star', '{STAR_FILE}', '{SOUND}', "
        f"num_repeat=None, max_area=6144, infer_frames=12, {FEW})",
    ),
    python(
        "python-animate",
        f"WanAnimate('animate-14B', '$made/animate').generate('{MOVES}', clip_len=5, {FEW})",
    ),
    python(
        "python-vace",
        "WanVace('vace-1.3B', '$made/vace').generate('a fox', "
        f"'{SOURCE}', '{MASK}', '{STAR_FILE}', size=(64, 32), {CALL})",
    ),
    python("python-long-frame", f"{LONG_CALL}, num_repeat=2, chain='frame')"),
    python(
        "python-long-prompts",
        f"{NO_PROMPT}, clip_prompts=['a star', 'red'], chain='latent')",
    ),
    python(
        "2-python-comm-1",
        "WanT2V(WAN_CONFIGS['t2v-A14B'], '$made/t2v', use_sp=True, comm_type=1)"
        f".generate({FOX}, {CALL}, guide_scale=(2.0, 4.0))",
        2,
    ),
    # diffusers' pipelines.
    diffusers("diffusers", "t2v-diffusers", ""),
    diffusers("diffusers-fp8", "ti2v-diffusers", "fa_quant='fp8'", call=FIVE_B),
    diffusers("diffusers-v2", "dense-diffusers", "use_rainfusion=True, sparsity=0.7", call=LARGE),
    diffusers("diffusers-i2v", "i2v-diffusers", ""),
    diffusers("2-diffusers-comm-1", "t2v-diffusers", "ulysses_size=2, comm_type=1", 2),
    diffusers("2-diffusers-cfg", "dense-diffusers", "cfg_size=2", 2),
    diffusers("2-diffusers-cache", "t2v-diffusers", "comm_type=2", 2, cache=CACHE, call=NINE),
    diffusers("2-diffusers-wan21-i2v", "wan21-i2v-diffusers", "ring_size=2", 2),
    diffusers("4-diffusers-ti2v", "ti2v-diffusers", "ring_size=2, comm_type=1", 4, call=FIVE_B),
)
