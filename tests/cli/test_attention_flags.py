"""Flags of attention and of NPUs: what they resolve to, and what is refused, in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.test_bad_input import REPO, no_weights, refused
from wan.cli import flags
from wan.cli.resolve import resolve
from wan.run import Run
from wan.settings.attention import Attention
from wan.settings.devices import CHIPS
from wan.settings.kernels import RAINFUSION, SMALL_OPS, dense_names
from wan.settings.values import either

__all__ = ["no_weights"]  # a fixture that holds for every test here, too

FP8 = ["--fa_quant", "fp8"]
RAIN = ["--use_rainfusion"]
BACKENDS = "must be auto, " + either(dense_names("attention_backend"))
LASER = ["--attention_algo", "laser"]
ALONE = {
    "algorithm": (
        ["--attention_algo", "nonsense"],
        f"must be {either(dense_names('attention_algo'))}",
    ),
    "dtype": (["--fa_quant", "int8"], "must be fp8 or none"),
    "sparsity 1": ([*RAIN, "--sparsity", "1"], "at least 0 and below 1"),
    "sparsity negative": ([*RAIN, "--sparsity", "-0.1"], "at least 0 and below 1"),
    "sparsity nan": ([*RAIN, "--sparsity", "nan"], "must be a number"),
    "sparsity words": ([*RAIN, "--sparsity", "much"], "must be a number"),
    "first sparse step": ([*RAIN, "--sparse_start_step", "-1"], "from 0 to 1000"),
    "no refresh": ([*RAIN, "--mask_refresh_interval", "0"], "from 1 to 1000"),
    "RainFusion v4": ([*RAIN, "--rainfusion_type", "v4"], f"must be {either([*RAINFUSION])}"),
    "RainFusion v1": ([*RAIN, "--rainfusion_type", "v1"], "v1 is not supported"),
    "sparsity alone": (["--sparsity", "0.5"], "--sparsity has no effect without --use_rainfusion"),
    "start alone": (["--sparse_start_step", "3"], "no effect without --use_rainfusion"),
    "type alone": (["--rainfusion_type", "v3"], "no effect without --use_rainfusion"),
    "refresh alone": (["--mask_refresh_interval", "2"], "no effect without --use_rainfusion"),
    "sparse after the end": (
        [*RAIN, "--sample_steps", "8", "--sparse_start_step", "8"],
        "would begin at step 8, but there are 8",
    ),
    "sparse in one step": ([*RAIN, "--sample_steps", "1"], "lower --sparse_start_step"),
    "laser where all is sparse": (
        [*LASER, *RAIN, "--sparse_start_step", "0"],
        "the kernel of dense steps",
    ),
    "a mask for one step": (
        [*RAIN, "--sample_steps", "8", "--sparse_start_step", "7", "--mask_refresh_interval", "2"],
        "--mask_refresh_interval 2 has no effect, as only the last of 8",
    ),
    "v2 in FP8": ([*FP8, *RAIN], "use --rainfusion_type v3"),
    "FP8 exchange alone": (["--quant_alltoall"], "add --fa_quant fp8"),
    "FP8 exchange of sparse": (
        [*FP8, *RAIN, "--rainfusion_type", "v3", "--quant_alltoall"],
        "masks on unquantised tensors",
    ),
    "FP8 exchange on one rank": ([*FP8, "--quant_alltoall"], "none with --ulysses_size 1"),
    "laser in FP8": ([*LASER, *FP8], "is another kernel and excludes --fa_quant fp8"),
    "laser in fp32": ([*LASER, "--precision", "fp32"], "takes no --precision fp32"),
    "laser on a CPU": ([*LASER, "--device", "cpu"], "needs an A2 or A3; this device is a CPU"),
    "laser on CUDA": (
        [*LASER, "--device", "cuda"],
        "this device is a CUDA GPU; use --attention_algo fused",
    ),
    "laser on few rows": (
        [*LASER, "--size", "832*480", "--frame_num", "1"],
        "has one of 1560 x 1560",
    ),
    "unknown backend": (
        ["--attention_backend", "flash_9"],
        BACKENDS,
    ),
    "sparse backend": (["--attention_backend", "aiter_sparge"], BACKENDS),
    "two kernels": (
        ["--attention_backend", "sage", "--attention_algo", "fused"],
        "names the dense kernel of NPUs, and --attention_backend",
    ),
    "FP8 twice": (
        ["--attention_backend", "flash_3_fp8", *FP8],
        "flash_3_fp8 quantises by itself and excludes --fa_quant fp8; drop one",
    ),
    "backend in FP8": (["--attention_backend", "flash", *FP8], "is another kernel and excludes"),
    "backend in fp32": (
        ["--attention_backend", "cudnn", "--precision", "fp32"],
        "takes no --precision fp32; use bf16, or --attention_backend auto",
    ),
    "backend in fp32 on a CPU": (
        ["--attention_backend", "sdpa_flash", "--device", "cpu"],
        "takes no fp32, which a run on a CPU would compute in; use --precision bf16",
    ),
    "backend of GPUs on a CPU": (
        ["--attention_backend", "cudnn", "--device", "cpu"],
        "--attention_backend cudnn needs a CUDA GPU; this device is a CPU; use --attention_backend",
    ),
    "backend of GPUs on an NPU": (
        ["--attention_backend", "sage", "--device", "npu"],
        "(--attention_algo names an NPU's own kernels)",
    ),
    "backend where all is sparse": (
        ["--attention_backend", "flash", *RAIN, "--sparse_start_step", "0"],
        "--attention_backend flash is the kernel of dense steps",
    ),
    "compiled backend": (
        ["--attention_backend", "flash", "--compile"],
        "--compile does not work with --attention_backend flash; drop one",
    ),
    "unknown operation": (["--fused_ops", "rope,softmax"], ",".join(SMALL_OPS)),
    "no operation": (["--fused_ops", ""], "must be auto, none, or some of"),
    "operations of other devices": (
        ["--fused_ops", "rope,gelu"],
        "needs an A2 or A3",
    ),
    "operations of compiled blocks": (
        ["--fused_ops", "gelu", "--compile"],
        "--compile does not work with a list of --fused_ops",
    ),
    "operations on a CPU": (
        ["--fused_ops", "rope", "--device", "cpu"],
        "this device is a CPU; leave rope out",
    ),
    "clock on a CPU": (["--fa_freq_cap", "1400", "--device", "cpu"], "needs an A2, A3 or A5"),
    "clock too low": (["--fa_freq_cap", "50"], "from 100 to 4000"),
    "clock in GHz": (["--fa_freq_cap", "1.4"], "whole number"),
    "clock above the usual": (["--fa_freq_cap", "1800"], "above the 1650 MHz"),
    "clock restored to less": (
        ["--fa_freq_cap", "1400", "--fa_freq_restore", "1200"],
        "above the 1200 MHz",
    ),
    "restored from nothing": (["--fa_freq_restore", "1650"], "no effect without --fa_freq_cap"),
    "clock in compiled code": (["--fa_freq_cap", "1400", "--compile"], "does not work with"),
    "FP8 in compiled code": ([*FP8, "--compile"], "--compile does not work with --fa_quant"),
    "sparse in compiled code": ([*RAIN, "--compile"], "does not work with --use_rainfusion"),
    "device memory without a plan": (
        ["--device_memory", "64"],
        "--device_memory has no effect without --plan; add",
    ),
    "chip without a plan": (["--chip", "A2"], "--chip has no effect without --plan; add"),
    "quantised demo": (["--task", "ti2v-5B", "--quant_dit_path", "x"], "add its --ckpt_dir"),
    "quantised nothing": (["--quant_dit_path", " "], "is empty; give a path"),
}
PLANNED = {
    "chip": (["--chip", "A9"], f"must be {either(CHIPS)}"),
    "chip on CUDA": (["--chip", "A2", "--device", "cuda"], "drop one of them"),
    "FP8 on an A2": (["--chip", "A2", *FP8], "--fa_quant fp8 needs a CPU, CUDA GPU or A5; this"),
    "laser on an A5": (
        ["--chip", "A5", *LASER],
        "laser needs an A2 or A3; this device is an A5",
    ),
    "a Duo": (["--chip", "Duo", *RAIN], "a Duo computes in float16 only"),
    "sparse v2 on an A5": (["--chip", "A5", *RAIN], "use --rainfusion_type v3"),
    "sparse fp32": (["--chip", "A3", *RAIN, "--precision", "fp32"], "use --precision bf16"),
    "FP8 exchange in a ring only": (
        [*FP8, "--quant_alltoall", "--ring_size", "4", "--ulysses_size", "1"],
        "none with --ulysses_size 1",
    ),
    "laser on halves": (
        [*LASER, "--ulysses_size", "8", "--comm_type", "2", "--frame_num", "1"],
        "--ring_size 1 and --comm_type 2 has one of 1800 x 3600",
    ),
    "laser on the last rank of a ring": (
        [*LASER, "--ring_size", "37", "--ulysses_size", "1"],
        "--ring_size 37 and --comm_type 0 has one of 2016 x 75600",
    ),
    "compiled on a chip": (
        ["--chip", "A2", "--compile"],
        "--compile needs a CPU or CUDA GPU; this device is an",
    ),
    "fp32 on any NPU": (
        ["--device", "npu", *FP8, "--precision", "fp32"],
        "--fa_quant fp8 takes 16-bit tensors only on an NPU; use --precision bf16",
    ),
    "compiled on any NPU": (["--device", "npu", "--compile"], "--compile needs a CPU or CUDA GPU"),
    "quantised without a folder": (["--quant_dit_path", "x"], "add its --ckpt_dir"),
}


@pytest.mark.parametrize("name", ALONE)
def test_refusals(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv, sentence = ALONE[name]
    assert sentence in refused(argv, capfd)


@pytest.mark.parametrize("name", PLANNED)
def test_refusals_of_a_plan(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv, sentence = PLANNED[name]
    assert sentence in refused(["--plan", *argv], capfd)


def test_refusals_need_no_torch(tmp_path: Path) -> None:
    script = (
        "import json, sys\n"
        "from wan.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert main(argv) == 2, argv\n"
        "assert not (found := {'torch', 'torch_npu', 'mindiesd'} & set(sys.modules)), found\n"
    )
    argvs = [argv for argv, _ in ALONE.values()]
    argvs += [["--plan", *argv] for argv, _ in PLANNED.values()]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argvs)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(argvs)


def test_fp8_needs_heads_that_can_be_rotated(tiny, capfd: pytest.CaptureFixture[str]) -> None:
    text = refused(["--ckpt_dir", str(tiny("t2v-A14B")), *FP8], capfd)
    assert "a head has 6 channels" in text
    assert resolved("--task", "ti2v-5B", "--ckpt_dir", tiny("ti2v-5B"), *FP8).setup.attention == (
        Attention(fa_quant="fp8")
    )


def test_a_folder_of_quantised_weights_must_exist(tiny, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--ckpt_dir", str(tiny("t2v-A14B")), "--quant_dit_path", "nowhere"]
    assert "--quant_dit_path nowhere is not a folder" in refused(argv, capfd)


def resolved(*argv: object) -> Run:
    def no_demo(*_: object) -> None:
        raise AssertionError("the demo must not be made here")

    return resolve(flags.parse([str(a) for a in argv]), no_demo, plan="--plan" in argv)


def test_nothing_asked_for(tiny) -> None:
    run = resolved("--ckpt_dir", tiny("t2v-A14B"))
    assert run.setup.attention == Attention() and run.setup.quantised is None
    assert run.settings["attention_algo"] == "fused"
    assert run.settings["use_rainfusion"] is False and "sparsity" not in run.settings


def test_a_record_and_a_variable_may_hold_the_other_flag(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Defaults in a record are no choice; another kernel in it, or in a variable, is one."""
    first = resolved("--ckpt_dir", tiny("t2v-A14B"))
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"settings": first.settings}))
    again = resolved("--from_json", path, "--attention_backend", "sdpa")
    assert again.setup.attention == Attention(attention_backend="sdpa")
    assert again.settings["attention_backend"] == "sdpa"
    monkeypatch.setenv("ALGO", "1")
    argv = ["--ckpt_dir", str(tiny("t2v-A14B")), "--attention_backend", "sdpa"]
    assert "--attention_algo laser (or ALGO=1) both name the dense kernel" in refused(argv, capfd)


ALIASED = {"ALGO": "3", "ROPE_OPT": "1", "FAST_LAYERNORM": "1"}


@pytest.mark.parametrize("name", ALIASED)
def test_the_record_of_a_dense_run_wins_over_variables(
    name: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolved("--task", "ti2v-5B", "--ckpt_dir", tiny("ti2v-5B"))
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"settings": first.settings}))
    monkeypatch.setenv(name, ALIASED[name])
    again = resolved("--from_json", path)
    assert again.setup.attention == first.setup.attention == Attention()
    assert again.settings["fa_quant"] == "none" and again.settings["fused_ops"] == ("auto",)


@pytest.mark.parametrize(("steps", "start"), [(40, 10), (50, 13), (4, 1), (2, 1)])
def test_sparse_attention_starts_after_a_quarter_of_the_steps(tiny, steps: int, start: int) -> None:
    run = resolved("--ckpt_dir", tiny("t2v-A14B"), *RAIN, "--sample_steps", steps)
    assert run.setup.attention == Attention(use_rainfusion=True)
    assert run.setup.attention.start_step(run.request.sample_steps) == start


NPU = [
    *("--device", "npu", "--fused_ops", "scale_shift, rms_norm", "--fa_freq_cap", "1400"),
    *("--fa_quant", "fp8", "--use_rainfusion", "--rainfusion_type", "v3", "--sparsity", "0.5"),
    *("--sparse_start_step", "0", "--mask_refresh_interval", "3", "--sample_steps", "8"),
]


def test_everything_asked_for() -> None:
    run = resolved("--plan", "--task", "ti2v-5B", *NPU)
    assert run.setup.execution.device == "npu"
    assert run.setup.attention == Attention(
        fa_quant="fp8",
        use_rainfusion=True,
        rainfusion_type="v3",
        sparsity=0.5,
        sparse_start_step=0,
        mask_refresh_interval=3,
        fused_ops=("rms_norm", "scale_shift"),
        fa_freq_cap=1400,
        fa_freq_restore=1650,
    )


def test_the_record_repeats_the_video_but_not_the_clock(tmp_path: Path) -> None:
    """As a plan: no NPU's FP8 kernel takes the small heads of a tiny checkpoint."""
    first = resolved("--plan", "--task", "ti2v-5B", *NPU)
    assert "fa_freq_cap" not in first.settings
    path = tmp_path / "record.json"
    settings = {name: value for name, value in first.settings.items() if name != "ckpt_dir"}
    path.write_text(json.dumps({"settings": settings}))
    again = ("--plan", "--from_json", path)
    repeated = resolved(*again).setup.attention
    assert repeated == replace(first.setup.attention, fa_freq_cap=None)
    other = ["--device", "cpu", "--fused_ops", "none", "--rainfusion_type", "v2"]
    elsewhere = resolved(*again, *other, "--fa_quant", "none")
    assert elsewhere.setup.attention == Attention(
        use_rainfusion=True,
        sparsity=0.5,
        sparse_start_step=0,
        mask_refresh_interval=3,
        fused_ops=(),
    )
    dense = resolved(*again, *other[:-2], "--use_rainfusion", "false")
    assert dense.setup.attention == Attention(fa_quant="fp8", fused_ops=())
    assert dense.settings["use_rainfusion"] is False and "sparsity" not in dense.settings


def test_the_record_holds_what_was_left_open(tiny) -> None:
    settings = resolved("--ckpt_dir", tiny("t2v-A14B"), *RAIN, "--sample_steps", 10).settings
    assert settings["use_rainfusion"] is True
    assert (settings["rainfusion_type"], settings["sparsity"]) == ("v2", 0.64)
    assert settings["mask_refresh_interval"] == 1


def test_a_start_that_nobody_gave_follows_the_repeats_steps(tiny, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    argv = ("--ckpt_dir", tiny("t2v-A14B"), *RAIN, "--sample_steps", 40)
    for given, start, later in (((), 10, 1), (("--sparse_start_step", "2"), 2, 2)):
        first = resolved(*argv, *given)
        path.write_text(json.dumps({"settings": first.settings}))
        for more, expected in (((), start), (("--sample_steps", 4), later)):
            run = resolved("--from_json", path, *more)
            assert run.setup.attention.start_step(run.request.sample_steps) == expected


MX = "quant_model_description_w8a8_mxfp8.json"


def mx_export(folder: Path) -> Path:
    """One layer of the tiny t2v-1.3B as W8A8_MXFP8; only its headers are looked at here."""
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


def test_a_plan_refuses_what_the_run_would(
    tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = mx_export(tmp_path)
    argv = ["--plan", "--task", "t2v-14B", "--ckpt_dir", str(tiny("t2v-1.3B"))]
    argv += ["--quant_dit_path", str(folder)]
    assert "with W8A8_MXFP8 weights needs an A5; this device is an A2" in refused(
        [*argv, "--chip", "A2"], capfd
    )
    assert resolved(*argv, "--chip", "A5").setup.quantised is not None
    assert resolved(*argv).setup.quantised is not None
    text = refused([*argv, "--chip", "A5", "--precision", "fp32"], capfd)
    assert "takes 16-bit tensors only on an NPU" in text
    (folder / MX).chmod(0o644)
    assert "chmod 0640" in refused([*argv, "--chip", "A5"], capfd)


def test_a_plan_for_a_chip_is_one_for_an_npu() -> None:
    setup = resolved("--plan", "--chip", "A5", *FP8, "--ulysses_size", "8").setup
    assert setup.chip == "A5" and setup.execution.device == "npu"
    assert setup.attention == Attention(fa_quant="fp8") and setup.parallel.world_size == 8
    assert resolved("--plan").setup.chip is None


def test_decoding_attends_to_nothing(tiny, tmp_path: Path, monkeypatch) -> None:
    """The latents of an NPU's run are decoded anywhere, and stay what they are."""
    monkeypatch.setenv("OVERLAP", "1")  # as in the shell of the run that could not be finished
    made: dict[str, object] = {
        "task": "t2v-A14B",
        "ckpt_dir": str(tiny("t2v-A14B")),
        "attention_algo": "laser",
    }
    made |= {"fa_quant": "fp8", "fused_ops": ["rope"], "quant_dit_path": str(tmp_path / "gone")}
    path = tmp_path / "x.safetensors"
    metadata = {"settings": json.dumps(made), "format": "pt"}
    save_file({"latents": torch.zeros(16, 2, 4, 4)}, path, metadata=metadata)
    run = resolved("--decode_latents", path, "--device", "cpu")
    assert run.setup.attention == Attention() and run.setup.quantised is None
    assert run.settings["attention_algo"] == "laser" and run.settings["fa_quant"] == "fp8"
