"""Flags of attention and of NPUs: resolved settings, and refusals in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import Refusals, Tiny
from tests.pipelines import fail_on_demo
from wan.app import flag_parser
from wan.app.resolve import ResolveContext, resolve_video
from wan.app.run import Run
from wan.settings.attention import Attention

FP8 = ["--fa_quant", "fp8"]
RAIN = ["--use_rainfusion"]
LASER = ["--attention_backend", "laser"]
INVALID_FLAGS = {
    "algorithm": ["--attention_backend", "nonsense"],
    "dtype": ["--fa_quant", "int8"],
    "sparsity 1": [*RAIN, "--sparsity", "1"],
    "sparsity negative": [*RAIN, "--sparsity", "-0.1"],
    "sparsity nan": [*RAIN, "--sparsity", "nan"],
    "sparsity words": [*RAIN, "--sparsity", "much"],
    "first sparse step": [*RAIN, "--sparse_start_step", "-1"],
    "no refresh": [*RAIN, "--mask_refresh_interval", "0"],
    "RainFusion v4": [*RAIN, "--rainfusion_type", "v4"],
    "RainFusion v1": [*RAIN, "--rainfusion_type", "v1"],
    "sparsity alone": ["--sparsity", "0.5"],
    "start alone": ["--sparse_start_step", "3"],
    "type alone": ["--rainfusion_type", "v3"],
    "refresh alone": ["--mask_refresh_interval", "2"],
    "sparse after the end": [*RAIN, "--sample_steps", "8", "--sparse_start_step", "8"],
    "sparse in one step": [*RAIN, "--sample_steps", "1"],
    "laser where all is sparse": [*LASER, *RAIN, "--sparse_start_step", "0"],
    "a mask for one step": [
        *(*RAIN, "--sample_steps", "8", "--sparse_start_step", "7", "--mask_refresh_interval", "2"),
    ],
    "v2 in FP8": [*FP8, *RAIN],
    "FP8 exchange alone": ["--quant_alltoall"],
    "FP8 exchange of sparse": [*FP8, *RAIN, "--rainfusion_type", "v3", "--quant_alltoall"],
    "FP8 exchange on one rank": [*FP8, "--quant_alltoall"],
    "laser in FP8": [*LASER, *FP8],
    "laser in fp32": [*LASER, "--precision", "fp32"],
    "laser on a CPU": [*LASER, "--device", "cpu"],
    "laser on CUDA": [*LASER, "--device", "cuda"],
    "laser on few rows": [*LASER, "--size", "832*480", "--frame_num", "1"],
    "unknown backend": ["--attention_backend", "flash_9"],
    "sparse backend": ["--attention_backend", "aiter_sparge"],
    "FP8 twice": ["--attention_backend", "flash_3_fp8", *FP8],
    "backend in FP8": ["--attention_backend", "flash", *FP8],
    "backend in fp32": ["--attention_backend", "cudnn", "--precision", "fp32"],
    "backend in fp32 on a CPU": ["--attention_backend", "sdpa_flash", "--device", "cpu"],
    "backend of GPUs on a CPU": ["--attention_backend", "cudnn", "--device", "cpu"],
    "backend of GPUs on an NPU": ["--attention_backend", "sage", "--device", "npu"],
    "backend where all is sparse": [
        *("--attention_backend", "flash", *RAIN, "--sparse_start_step", "0"),
    ],
    "compiled backend": ["--attention_backend", "flash", "--compile"],
    "unknown operation": ["--fused_ops", "rope,softmax"],
    "no operation": ["--fused_ops", ""],
    "operations of other devices": ["--fused_ops", "rope,gelu"],
    "operations of compiled blocks": ["--fused_ops", "gelu", "--compile"],
    "operations on a CPU": ["--fused_ops", "rope", "--device", "cpu"],
    "clock on a CPU": ["--fa_freq_cap", "1400", "--device", "cpu"],
    "clock too low": ["--fa_freq_cap", "50"],
    "clock in GHz": ["--fa_freq_cap", "1.4"],
    "clock above the usual": ["--fa_freq_cap", "1800"],
    "clock restored to less": ["--fa_freq_cap", "1400,1200"],
    "restored from nothing": ["--fa_freq_cap", "1400,1500,1600"],
    "clock in compiled code": ["--fa_freq_cap", "1400", "--compile"],
    "FP8 in compiled code": [*FP8, "--compile"],
    "sparse in compiled code": [*RAIN, "--compile"],
    "device memory without a plan": ["--device_memory", "64"],
    "chip without a plan": ["--chip", "A2"],
    "quantised demo": ["--task", "ti2v-5B", "--quant_dit_path", "x"],
    "quantised nothing": ["--quant_dit_path", " "],
}
INVALID_PLANS = {
    "chip": ["--chip", "A9"],
    "chip on CUDA": ["--chip", "A2", "--device", "cuda"],
    "FP8 on an A2": ["--chip", "A2", *FP8],
    "laser on an A5": ["--chip", "A5", *LASER],
    "a Duo": ["--chip", "Duo", *RAIN],
    "FP8 with a reference video": ["--task", "animate2-14B", *FP8],
    "laser with a reference video": ["--task", "animate2-14B", "--chip", "A2", *LASER],
    "compiled with a reference video": ["--task", "animate2-14B", "--compile"],
    "sparse v2 on an A5": ["--chip", "A5", *RAIN],
    "sparse fp32": ["--chip", "A3", *RAIN, "--precision", "fp32"],
    "FP8 exchange in a ring only": [
        *(*FP8, "--quant_alltoall", "--ring_size", "4", "--ulysses_size", "1"),
    ],
    "laser on halves": [*LASER, "--ulysses_size", "8", "--comm_type", "2", "--frame_num", "1"],
    "laser on the last rank of a ring": [*LASER, "--ring_size", "37", "--ulysses_size", "1"],
    "compiled on a chip": ["--chip", "A2", "--compile"],
    "fp32 on any NPU": ["--device", "npu", *FP8, "--precision", "fp32"],
    "compiled on any NPU": ["--device", "npu", "--compile"],
    "quantised without a folder": ["--quant_dit_path", "x"],
}


def test_refusals(refusals: Refusals) -> None:
    refusals("attention: flags", INVALID_FLAGS)
    refusals("attention: plans", {case: ["--plan", *argv] for case, argv in INVALID_PLANS.items()})


def test_flags_that_a_checkpoint_does_not_support(tiny: Tiny, refusals: Refusals) -> None:
    start = ["--ckpt_dir", tiny("t2v-A14B")]
    cases = {"FP8 of 6 channels": FP8, "no folder": ["--quant_dit_path", "nowhere"]}
    refusals("attention: checkpoints", {case: [*start, *argv] for case, argv in cases.items()})
    rotated = resolve_run("--task", "ti2v-5B", "--ckpt_dir", tiny("ti2v-5B"), *FP8)
    assert rotated.setup.attention == Attention(fa_quant="fp8")


def resolve_run(*argv: object) -> Run:
    return resolve_video(
        ResolveContext(plan="--plan" in argv, make_demo=fail_on_demo),
        flag_parser.parse_flags([str(a) for a in argv]),
    )


def repeat_run(first: Run, tmp_path: Path, *argv: object) -> Run:
    """Resolves a run from the record of another one."""
    path = tmp_path / "record.json"
    settings = {name: value for name, value in first.settings.items() if name != "ckpt_dir"}
    path.write_text(json.dumps({"settings": settings if "--plan" in argv else first.settings}))
    return resolve_run("--from_json", path, *argv)


def test_default_attention(tiny: Tiny) -> None:
    run = resolve_run("--ckpt_dir", tiny("t2v-A14B"))
    assert run.setup.attention == Attention() and run.setup.quantized_dit is None
    assert run.settings["attention_backend"] == "auto"
    assert run.settings["use_rainfusion"] is False and "sparsity" not in run.settings
    settings = resolve_run("--ckpt_dir", tiny("t2v-A14B"), *RAIN, "--sample_steps", 10).settings
    assert settings["use_rainfusion"] is True and settings["mask_refresh_interval"] == 1
    assert (settings["rainfusion_type"], settings["sparsity"]) == ("v2", 0.64)


def test_a_flag_replaces_the_other_kernel_of_a_record_or_variable(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--ckpt_dir", str(tiny("t2v-A14B"))]
    repeated = repeat_run(resolve_run(*argv), tmp_path, "--attention_backend", "sdpa")
    assert repeated.setup.attention == Attention(attention_backend="sdpa")
    assert repeated.settings["attention_backend"] == "sdpa"
    monkeypatch.setenv("ALGO", "1")
    flags = [*argv, "--attention_backend", "sdpa"]
    assert resolve_run(*flags).setup.attention == Attention(attention_backend="sdpa")


def test_the_record_of_a_dense_run_wins_over_variables(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve_run("--task", "ti2v-5B", "--ckpt_dir", tiny("ti2v-5B"))
    for name, value in {"ALGO": "3", "ROPE_OPT": "1", "FAST_LAYERNORM": "1"}.items():
        monkeypatch.setenv(name, value)
    repeated = repeat_run(first, tmp_path)
    assert repeated.setup.attention == first.setup.attention == Attention()
    assert repeated.settings["fa_quant"] == "none" and repeated.settings["fused_ops"] == ("auto",)


NPU = [
    *("--device", "npu", "--fused_ops", "scale_shift, rms_norm", "--fa_freq_cap", "1400"),
    *("--fa_quant", "fp8", "--use_rainfusion", "--rainfusion_type", "v3", "--sparsity", "0.5"),
    *("--sparse_start_step", "0", "--mask_refresh_interval", "3", "--sample_steps", "8"),
]


def test_all_attention_flags() -> None:
    run = resolve_run("--plan", "--task", "ti2v-5B", *NPU)
    assert run.setup.execution.device == "npu"
    assert run.setup.attention == Attention(
        fa_quant="fp8",
        use_rainfusion=True,
        rainfusion_type="v3",
        sparsity=0.5,
        sparse_start_step=0,
        mask_refresh_interval=3,
        fused_ops=("rms_norm", "scale_shift"),
        fa_freq_cap=(1400, 1650),
    )


def test_the_record_repeats_the_video_but_not_the_clock(tmp_path: Path) -> None:
    """Planned only: no FP8 kernel of an NPU supports the small heads of a tiny checkpoint."""
    first = resolve_run("--plan", "--task", "ti2v-5B", *NPU)
    assert "fa_freq_cap" not in first.settings
    repeated = repeat_run(first, tmp_path, "--plan").setup.attention
    assert repeated == replace(first.setup.attention, fa_freq_cap=None)
    cpu_flags = ["--plan", "--device", "cpu", "--fused_ops", "none"]
    sparse = repeat_run(
        first, tmp_path, *cpu_flags, "--rainfusion_type", "v2", "--fa_quant", "none"
    )
    assert sparse.setup.attention == Attention(
        use_rainfusion=True,
        sparsity=0.5,
        sparse_start_step=0,
        mask_refresh_interval=3,
        fused_ops=(),
    )
    dense = repeat_run(first, tmp_path, *cpu_flags, "--use_rainfusion", "false")
    assert dense.setup.attention == Attention(fa_quant="fp8", fused_ops=())
    assert dense.settings["use_rainfusion"] is False and "sparsity" not in dense.settings


def test_default_sparse_start_follows_the_steps(tiny: Tiny, tmp_path: Path) -> None:
    """A quarter of the steps, rounded up, also of a repetition with other steps."""
    argv = ("--ckpt_dir", tiny("t2v-A14B"), *RAIN, "--sample_steps", 40)

    def find_start(run: Run) -> int | None:
        return run.setup.attention.resolve_sparse_start_step(run.params.sample_steps)

    for flags, start, repeat_starts in (
        ((), 10, {4: 1, 2: 1, 50: 13}),
        (("--sparse_start_step", "2"), 2, {4: 2}),
    ):
        first = resolve_run(*argv, *flags)
        assert find_start(first) == find_start(repeat_run(first, tmp_path)) == start
        for steps, expected in repeat_starts.items():
            repeated = repeat_run(first, tmp_path, "--sample_steps", steps)
            assert find_start(repeated) == expected, (flags, steps)


MX = "quant_model_description_w8a8_mxfp8.json"


def write_mx_export(folder: Path) -> Path:
    """One layer of the tiny t2v-1.3B as W8A8_MXFP8; only the headers matter here."""
    name = "blocks.0.ffn.0"
    entries = {"model_quant_type": "W8A8_MXFP8", f"{name}.weight": "W8A8_MXFP8"}
    (folder / MX).write_text(json.dumps(entries))
    tensors = {
        "weight": torch.zeros(192, 96, dtype=torch.float8_e4m3fn),
        "weight_scale": torch.zeros(192, 3, dtype=torch.uint8),
        "bias": torch.zeros(192),
    }
    tensors = {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    save_file(tensors, folder / "quant_model_weight_w8a8_mxfp8.safetensors")
    for path in folder.iterdir():
        path.chmod(0o640)
    return folder


def test_a_plan_refuses_what_the_run_would(tiny: Tiny, tmp_path: Path, refusals: Refusals) -> None:
    folder = write_mx_export(tmp_path)
    argv = ["--plan", "--task", "t2v-14B", "--ckpt_dir", tiny("t2v-1.3B")]
    argv += ["--quant_dit_path", folder]
    assert resolve_run(*argv, "--chip", "A5").setup.quantized_dit is not None
    assert resolve_run(*argv).setup.quantized_dit is not None
    a5 = [*argv, "--chip", "A5"]
    cases = {"an A2": [*argv, "--chip", "A2"], "fp32": [*a5, "--precision", "fp32"]}
    refusals("MXFP8: plans", cases)
    (folder / MX).chmod(0o644)
    refusals("MXFP8: permissions", {"0644": a5})


def test_a_plan_for_a_chip_is_one_for_an_npu() -> None:
    setup = resolve_run("--plan", "--chip", "A5", *FP8, "--ulysses_size", "8").setup
    assert setup.chip == "A5" and setup.execution.device == "npu"
    assert setup.attention == Attention(fa_quant="fp8") and setup.parallel.world_size == 8
    assert resolve_run("--plan").setup.chip is None


def test_decoding_ignores_attention_settings(tiny: Tiny, tmp_path: Path, monkeypatch) -> None:
    """Latents of a run on an NPU can be decoded on any device; the record keeps its settings."""
    monkeypatch.setenv("OVERLAP", "1")  # as in the shell of the run that could not be finished
    settings: dict[str, object] = {
        "task": "t2v-A14B",
        "ckpt_dir": str(tiny("t2v-A14B")),
        "attention_backend": "laser",
    }
    settings |= {"fa_quant": "fp8", "fused_ops": ["rope"], "quant_dit_path": str(tmp_path / "gone")}
    path = tmp_path / "x.safetensors"
    metadata = {"settings": json.dumps(settings), "format": "pt"}
    save_file({"latents": torch.zeros(16, 2, 4, 4)}, path, metadata=metadata)
    run = resolve_run("--decode_latents", path, "--device", "cpu")
    assert run.setup.attention == Attention() and run.setup.quantized_dit is None
    assert run.settings["attention_backend"] == "laser" and run.settings["fa_quant"] == "fp8"
