"""Bad input: one sentence, exit code 2, no weight read, under 3 s, mostly without torch."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from wan.cli import main as generate

REPO = Path(__file__).parents[2]
SIMPLE = {
    "unknown task": (["--task", "t2v-99B"], "must be t2v-A14B"),
    "unknown flag": (["--promt", "x"], "--promt is not a known flag; did you mean --prompt?"),
    "other tools' flag": (["--height=3"], "--height is not a known flag; did you mean --size?"),
    "keyword": (["--sampling_steps", "3"], "did you mean --sample_steps?"),
    "no such flag": (["--qqqqq", "x"], "--qqqqq is not a known flag; --help all lists them"),
    "abbreviated flag": (["--prom", "x"], "--prom is not a known flag"),
    "flag without value": (["--prompt"], "--prompt needs a value"),
    "size words": (["--size", "large"], "must be WIDTH*HEIGHT"),
    "size of three": (["--size", "1*2*3"], "must be WIDTH*HEIGHT"),
    "size zero": (["--size", "0*480"], "from 1 to 1000000"),
    "size beyond floats": (["--size", "9" * 4000 + "*16"], "from 1 to 1000000"),
    "size not whole tokens": (["--size", "100*100"], "try 96*96"),
    "size for 5B": (["--task", "ti2v-5B", "--size", "1280*720"], "try 1280*704"),
    "size beyond positions": (["--size", "16400*16"], "1024 positions"),
    "size beyond memory": (["--size", "16384*16384"], "GB free; choose a smaller --size or"),
    "frames not 4n+1": (["--frame_num", "80"], "use 77 or 81"),
    "frames zero": (["--frame_num", "0"], "from 1 to"),
    "frames negative": (["--frame_num", "-3"], "from 1 to"),
    "frames fraction": (["--frame_num", "8.5"], "whole number"),
    "steps zero": (["--sample_steps", "0"], "from 1 to 1000"),
    "steps negative": (["--sample_steps", "-4"], "from 1 to 1000"),
    "steps huge": (["--sample_steps", "5000"], "from 1 to 1000"),
    "steps words": (["--sample_steps", "many"], "whole number"),
    "shift zero": (["--sample_shift", "0"], "from 0.001 to 1000"),
    "shift negative": (["--sample_shift", "-5"], "from 0.001 to 1000"),
    "shift nan": (["--sample_shift", "nan"], "must be a number"),
    "shift infinite": (["--sample_shift", "inf"], "from 0.001 to 1000"),
    "scale zero": (["--sample_guide_scale", "0"], "above 0"),
    "scale negative": (["--sample_guide_scale", "-1"], "above 0"),
    "scale nan in pair": (["--sample_guide_scale", "3,nan"], "must be a number"),
    "scale of three": (["--sample_guide_scale", "1,2,3"], "LOW,HIGH"),
    "scale words": (["--sample_guide_scale", "strong"], "must be a number"),
    "solver": (["--sample_solver", "nonsense"], "unipc, dpm++, euler, dmd or rcm"),
    "seed words": (["--base_seed", "x"], "whole number"),
    "seed huge": (["--base_seed", "9" * 30], "from -"),
    "seed of thousands of digits": (["--base_seed", "9" * 4000], "9... (4002 characters) must"),
    "fps zero": (["--fps", "0"], "from 1 to 240"),
    "fps nan": (["--fps", "nan"], "must be a number"),
    "fps tiny": (["--fps", "1e-9"], "from 1 to 240"),
    "empty folder": (["--ckpt_dir", ""], "is empty; give a path"),
    "empty image path": (["--task", "i2v-A14B", "--image", " "], "is empty; give a path"),
    "empty output": (["--save_file", ""], "is empty; give a path"),
    "output nowhere": (["--save_file", "/proc/x.mp4"], "writable folder"),
    "prompt not text": (["--prompt", "\udcff"], "not valid UTF-8"),
    "precision": (["--precision", "fp16"], "auto, bf16 or fp32"),
    "precision conflict": (["--precision", "fp32", "--convert_model_dtype"], "drop one"),
    "device": (["--device", "tpu"], "auto, cpu, cuda or npu"),
    "noise device": (["--noise_device", "gpu"], "cpu or device"),
    "offload words": (["--offload_model", "maybe"], "must be true, false, cpu or block"),
    "blocks of none": (["--resident_blocks", "2"], "no effect without --offload_model block"),
    "blocks, compiled": (["--offload_model", "block", "--compile"], "--compile needs weights in"),
    "host memory of a CPU": (
        ["--offload_model", "cpu", "--device", "cpu"],
        "use --offload_model false, which keeps all networks in its memory",
    ),
    "ulysses": (["--ulysses_size", "8"], "torchrun --nproc_per_node=8"),
    "cfg x ring": (["--cfg_size", "2", "--ring_size", "3"], "torchrun --nproc_per_node=6"),
    "comm_type 1": (["--comm_type", "1"], "comm_type optimization requires ulysses_size > 1."),
    "comm_type 3": (["--comm_type", "nonsense"], "--comm_type nonsense must be 0, 1 or 2."),
    "cfg of three": (["--cfg_size", "3"], "--cfg_size 3 must be 1 or 2."),
    "plan with a value": (["--plan=1"], "--plan takes no value."),
    "extension without its switch": (["--prompt_extend_model", "x"], "--use_prompt_extend; add"),
    "output without a name": (["--save_file", ".mp4"], "--save_file .mp4 has no name before .mp4"),
    "both aims": (["--comm_type", "1", "--fa_alltoall_overlap"], "choose one"),
    "overlap alone": (["--fa_alltoall_overlap"], "--ulysses_size 1"),
    "chunks zero": (["--chunks", "0"], "--chunks 0 must be from 1 to 4096"),
    "chunks of the baseline": (
        ["--plan", "--ulysses_size", "2", "--chunks", "2"],
        "--fa_alltoall_overlap; add one",
    ),
    "chunks beyond the heads": (
        ["--plan", "--ulysses_size", "2", "--comm_type", "1", "--chunks", "21"],
        "the 20 of 40 heads that a rank has with --ulysses_size 2; give 1 to 20",
    ),
    "trace of compiled blocks": (["--trace", "x", "--compile"], "--trace does not work with --com"),
    "log of compiled blocks": (["--log_level", "debug", "--compile"], "whose graphs have no range"),
    "trace nowhere": (["--trace", "/proc/x"], "--trace /proc/x cannot be written: /proc is not a"),
    "trace into a file": (["--trace", "/etc/hostname"], "/etc/hostname is not a writable folder"),
    "steps of no trace": (["--trace_steps", "1"], "--trace_steps has no effect without --trace"),
    "steps behind the last": (
        ["--trace", "x", "--trace_steps", "3,4", "--sample_steps", "4"],
        "--trace_steps names step 4, but there are 4 (--sample_steps): 0 to 3",
    ),
    "falling steps": (["--trace", "x", "--trace_steps", "4-3"], "has the steps 4 to 3; they must"),
    "steps as a word": (
        ["--trace", "x", "--trace_steps", "all"],
        "all; write them from 0, for exam",
    ),
    "log level": (["--log_level", "loud"], "--log_level loud must be info or debug"),
    "trace of decoding": (
        ["--trace", "x", "--decode_latents", "y"],
        "--decode_latents, which only decodes",
    ),
    "ring type alone": (["--ring_type", "bidirectional"], "no effect"),
    "unknown ring type": (["--ring_type", "torus"], "ring or bidirectional"),
    "zero ranks": (["--ring_size", "0"], "from 1 to 4096"),
    "endless wait": (["--dist_timeout", "inf"], "above 0"),
    "wait for nobody": (["--dist_timeout", "5"], "no effect on one process"),
    "fsdp": (["--dit_fsdp"], "torchrun"),
    "t5 fsdp": (["--t5_fsdp"], "torchrun"),
    "tensor parallel": (["--tp_size=2"], "--tp_size is not available"),
    "vae parallel": (["--vae_parallel"], "start it with torchrun"),
    "vae parallel in tiles": (
        ["--plan", "--ulysses_size", "2", "--vae_parallel", "--vae_tiling"],
        "drop one of them",
    ),
    "vae in half precision": (["--vae_precision", "fp16"], "must be fp32 or bf16"),
    "speech flag": (["--audio", "x.wav"], "s2v-14B"),
    "i2v without image": (["--task", "i2v-A14B"], "with --image"),
    "t2v with image": (["--image", "x.png"], "takes no --image"),
    "image missing": (["--task", "i2v-A14B", "--image", "no.png"], "does not exist"),
    "image address": (
        ["--task", "i2v-A14B", "--image", "https://example.com/cat.jpg"],
        "--image takes a file, not an address; download it first.",
    ),
    "image without end": (["--task", "i2v-A14B", "--image", "/dev/zero"], "is not a file"),
    "folder missing": (["--ckpt_dir", "nowhere/at/all"], "does not exist"),
    "hub name": (["--ckpt_dir", "Wan-AI/Wan2.2-T2V-A14B"], "download the checkpoint first"),
    "folder is a file": (["--ckpt_dir", str(REPO / "README.md")], "is a file"),
    "output not mp4": (["--save_file", "video.avi"], "must end in .mp4"),
    "output below a file": (["--save_file", str(REPO / "README.md/x.mp4")], "writable folder"),
    "output name too long": (["--save_file", "x" * 250 + ".mp4"], "shorten it"),
    "record missing": (["--from_json", "no.json"], "cannot be read"),
    "scale pair for one network": (
        ["--task", "ti2v-5B", "--sample_guide_scale", "3,4"],
        "one network",
    ),
    "folder name too long": (["--ckpt_dir", "x" * 300], "cannot be used"),
    "image name too long": (["--task", "i2v-A14B", "--image", "x" * 300], "cannot be used"),
    "latents missing": (["--decode_latents", "no.safetensors"], "cannot be read"),
    "both continuations": (
        ["--from_json", "a", "--decode_latents", "b"],
        "--from_json excludes --decode_latents",
    ),
    "prompt extension method": (["--prompt_extend_method", "gpt"], "local_qwen or dashscope"),
    "prompt extension language": (["--prompt_extend_target_lang", "fr"], "must be zh or en"),
    "prompt extension name": (
        ["--use_prompt_extend", "--prompt_extend_model", "two words"],
        "two words is not on this machine",
    ),
    "prompt extension folder": (
        ["--use_prompt_extend", "--prompt_extend_model", "./no-such-model"],
        "no-such-model",
    ),
}


def refused(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that generate.py says; everything else about a refusal is asserted here."""
    assert generate.main(argv) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("generate.py: "), lines
    assert lines[0].endswith((".", "?", "!")) and "Traceback" not in lines[0]
    return lines[0]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any attempt to read tensors, or to make the demo checkpoint, is a failure."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("wan.checkpoint.load.fill", fail)
    monkeypatch.setattr("wan.checkpoint.load.in_safetensors", fail)
    monkeypatch.setattr("wan.pipeline.tiny.make_checkpoint", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", SIMPLE)
def test_arguments(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv, sentence = SIMPLE[name]
    assert sentence in refused(argv, capfd)


def test_refusals_need_no_torch(tmp_path: Path) -> None:
    """All of the table in one fresh interpreter: torch is never imported."""
    script = (
        "import json, sys\n"
        "from wan.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert main(argv) == 2, argv\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)\n"
    )
    argvs = [argv for argv, _ in SIMPLE.values()]
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argvs)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(SIMPLE)


def test_environment_without_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OVERLAP", "yes")
    assert "OVERLAP 'yes'" in refused([], capfd)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is set, but RANK is not" in refused([], capfd)
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE is 'two'" in refused([], capfd)


def image_file(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.png"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("no image")
    elif kind == "truncated":
        Image.effect_noise((64, 64), 50).save(path)
        path.write_bytes(path.read_bytes()[:400])
    elif kind == "animated":
        path = path.with_suffix(".gif")
        frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
        frames[0].save(path, save_all=True, append_images=frames[1:])
    elif kind == "folder":
        path.mkdir()
    elif kind == "flat":
        Image.new("RGB", (4000, 2)).save(path)
    elif kind == "postscript":
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    elif kind == "short header":  # Pillow's error is a ValueError
        chunk = b"IHDR" + bytes(12)
        crc = struct.pack(">I", zlib.crc32(chunk))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 12) + chunk + crc)
    return path


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("empty", "is empty (0 bytes)"),
        ("text", "cannot be read as an image"),
        ("truncated", "cannot be read as an image"),
        ("animated", "is animated (2 frames)"),
        ("folder", "is not a file"),
        ("postscript", "no sound PNG, JPEG, WebP, AVIF, BMP, TIFF or GIF; convert it to one."),
        ("short header", "cannot be read as an image"),
        ("flat", "one side of the video would vanish"),
    ],
)
def test_images(
    kind: str, sentence: str, tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["--task", "i2v-A14B", "--image", str(image_file(kind, tmp_path))]
    argv += ["--ckpt_dir", str(tiny("i2v-A14B"))]
    assert sentence in refused(argv, capfd)


HIGH = "high_noise_model"
STEM = "diffusion_pytorch_model"
VAE, T5 = "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"


def _shard(folder: Path) -> Path:
    return sorted((folder / HIGH).glob("*.safetensors"))[0]


def _edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _rename_in_header(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert len(old) == len(new) and old in content
    path.write_bytes(content.replace(old, new, 1))


def _edit_pth(path: Path, change: Callable[[dict], object]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def _drop_map_entry(folder: Path) -> None:
    index = folder / HIGH / f"{STEM}.safetensors.index.json"
    _edit_json(
        index, lambda value: value["weight_map"].update({"ghost.weight": _shard(folder).name})
    )


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard truncated": (
        lambda f: _shard(f).write_bytes(_shard(f).read_bytes()[:-100]),
        "download it again",
    ),
    "shard garbage": (lambda f: _shard(f).write_bytes(b"\xff" * 500), "download it again"),
    "shard empty": (lambda f: _shard(f).write_bytes(b""), "download it again"),
    "shard header broken": (
        lambda f: _shard(f).write_bytes(struct.pack("<Q", 9) + b"{not json" + b"x" * 20),
        "is no whole safetensors file",
    ),
    "shard missing": (lambda f: _shard(f).unlink(), "download the shard"),
    "index missing": (
        lambda f: (f / HIGH / f"{STEM}.safetensors.index.json").unlink(),
        "download the index",
    ),
    "index names a ghost": (_drop_map_entry, "lacks the tensor ghost.weight"),
    "index not JSON": (
        lambda f: (f / HIGH / f"{STEM}.safetensors.index.json").write_text("{"),
        "is not valid JSON",
    ),
    "config not JSON": (lambda f: (f / HIGH / "config.json").write_text("[]"), "JSON list"),
    "config of another net": (
        lambda f: _edit_json(f / HIGH / "config.json", lambda c: c.update(ffn_dim=64)),
        "ffn_dim is 64, but the shapes of the tensors say 480",
    ),
    "config with more layers": (
        lambda f: _edit_json(f / HIGH / "config.json", lambda c: c.update(num_layers=3)),
        "num_layers is 3, but",
    ),
    "config with fewer layers": (
        lambda f: _edit_json(f / HIGH / "config.json", lambda c: c.update(num_layers=1)),
        "num_layers is 1, but",
    ),
    "config with odd heads": (
        lambda f: _edit_json(f / HIGH / "config.json", lambda c: c.update(num_heads=7)),
        "7 heads",
    ),
    "expert missing": (lambda f: shutil.rmtree(f / "low_noise_model"), "the other expert"),
    "no networks": (
        lambda f: [shutil.rmtree(f / d) for d in (HIGH, "low_noise_model")],
        "holds no video network (DiT); expected",
    ),
    "VAE missing": (lambda f: (f / "Wan2.1_VAE.pth").unlink(), "has no vae"),
    "VAE truncated": (
        lambda f: (f / "Wan2.1_VAE.pth").write_bytes((f / "Wan2.1_VAE.pth").read_bytes()[:9999]),
        "truncated or corrupt",
    ),
    "config without heads": (
        lambda f: _edit_json(f / HIGH / "config.json", lambda c: c.update(num_heads=0)),
        "num_heads is 0",
    ),
    "shard entry without shape": (
        lambda f: _rename_in_header(_shard(f), b'"shape"', b'"shapo"'),
        "is no whole safetensors file",
    ),
    "quantised weights": (
        lambda f: _rename_in_header(_shard(f), b'"BF16"', b'"I16" '),
        "quantised weights are not supported there",
    ),
    "unknown dtype": (
        lambda f: _rename_in_header(_shard(f), b'"BF16"', b'"F8E4"'),
        "unknown variant `F8E4`",
    ),
    "index of brackets": (
        lambda f: (f / HIGH / f"{STEM}.safetensors.index.json").write_text("[" * 100_000),
        "is not valid JSON",
    ),
    "VAE of the other family": (
        lambda f: torch.save({"x": torch.zeros(1)}, f / "Wan2.1_VAE.pth"),
        "does not hold the weights of a Wan 2.1 or 2.2 VAE",
    ),
    "VAE file with code": (
        lambda f: torch.save({"x": Path("boom")}, f / "Wan2.1_VAE.pth"),
        "because it could run code; download it again.",
    ),
    "text encoder of another model": (
        lambda f: torch.save({"x": torch.zeros(1)}, f / "models_t5_umt5-xxl-enc-bf16.pth"),
        "does not hold the weights of a UMT5 encoder",
    ),
    "VAE with one tensor more": (
        lambda f: _edit_pth(f / VAE, lambda state: state.update(more=torch.ones(1))),
        f"{VAE} has the unknown tensor more; download it again.",
    ),
    "VAE with one tensor less": (
        lambda f: _edit_pth(f / VAE, lambda state: state.pop("decoder.head.2.bias")),
        f"{VAE} lacks tensor decoder.conv_out.bias; download it again.",
    ),
    "VAE of half the width inside": (
        lambda f: _edit_pth(
            f / VAE, lambda s: s.update({"conv2.bias": s["conv2.bias"][:8].clone()})
        ),
        "has shape [8], the network asks for [16]",
    ),
    "text encoder with one tensor less": (
        lambda f: _edit_pth(f / T5, lambda state: state.pop("blocks.1.attn.q.weight")),
        f"{T5} lacks tensor encoder.block.1.layer.0.SelfAttention.q.weight; download it again.",
    ),
    "text encoder with numbers that are no weights": (
        lambda f: _edit_pth(f / T5, lambda state: state.update(step=7)),
        f"{T5} holds something other than weights (step); download it again.",
    ),
    "tokenizer damaged": (
        lambda f: (f / "google/umt5-xxl/tokenizer.json").write_text("{"),
        "holds no usable tokenizer",
    ),
    "tokenizer of nothing": (
        lambda f: (f / "google/umt5-xxl/tokenizer.json").unlink(),
        "holds no usable tokenizer",
    ),
    "tokenizer without a padding token": (
        lambda f: [
            _edit_json(f / f"google/umt5-xxl/{name}.json", lambda c: c.pop("pad_token"))
            for name in ("tokenizer_config", "special_tokens_map")
        ],
        "holds no usable tokenizer",
    ),
    "config with layers beyond measure": (
        lambda f: _edit_json(f / HIGH / "config.json", lambda c: c.update(num_layers=10**9)),
        "num_layers is 1000000000, but",
    ),
    "index that leaves its folder": (
        lambda f: _edit_json(
            f / HIGH / f"{STEM}.safetensors.index.json",
            lambda value: value["weight_map"].update({"head.head.bias": "../x.safetensors"}),
        ),
        "which is no weight file beside it",
    ),
    "text encoder missing": (
        lambda f: (f / "models_t5_umt5-xxl-enc-bf16.pth").unlink(),
        "has no text encoder",
    ),
    "tokenizer missing": (lambda f: shutil.rmtree(f / "google"), "has no tokenizer"),
    "generation config not JSON": (
        lambda f: (f / "generation_config.json").write_text("nope"),
        "is not valid JSON",
    ),
    "generation config unknown key": (
        lambda f: (f / "generation_config.json").write_text('{"image": "x"}'),
        "a checkpoint may set",
    ),
    "generation config bad value": (
        lambda f: (f / "generation_config.json").write_text('{"frame_num": 80}'),
        "use 77 or 81",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(
    name: str, tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny("t2v-A14B"), folder)
    damage, sentence = BROKEN[name]
    damage(folder)
    assert sentence in refused(["--ckpt_dir", str(folder)], capfd)


@pytest.mark.parametrize(
    ("task", "folder", "sentence"),
    [
        ("i2v-A14B", "t2v-A14B", "two experts for t2v"),
        ("t2v-A14B", "ti2v-5B", "one network for ti2v"),
        ("ti2v-5B", "t2v-A14B", "needs one network for ti2v"),
        ("t2v-1.3B", "t2v-A14B", "needs one network for t2v"),
        ("t2v-A14B", "t2v-1.3B", "one network for t2v"),
    ],
)
def test_folder_of_another_task(
    task: str,
    folder: str,
    sentence: str,
    tiny,
    image_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = ["--task", task, "--ckpt_dir", str(tiny(folder))]
    argv += ["--image", str(image_path)] if task == "i2v-A14B" else []
    assert sentence in refused(argv, capfd)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("{}", "no settings in it"),
        ('{"settings": {"colour": 1}}', "colour is not a known setting"),
        ('{"settings": {"fps": NaN}}', "must be a number"),
        ('{"settings": {"prompt": 7}}', "must be text"),
        ('{"settings": {"sample_steps": true}}', "must be"),
        ('{"settings": {"task": []}}', "must be t2v-A14B"),
        ('{"settings": {"task": {}}}', "must be t2v-A14B"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"settings": {"base_seed": ' + "9" * 5000 + "}}", "is not valid JSON"),
        *(
            (f'{{"settings": {{"{name}": 1}}}}', f"{name} is not part of a record; remove it.")
            for name in ("plan", "chip", "device_memory", "from_json", "decode_latents", "power")
        ),
        ('{"settings": {"ulysses_size": 2}}', "ulysses_size is not part of a record"),
    ],
)
def test_records(
    content: str, sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    assert sentence in refused(["--from_json", str(path)], capfd)
    assert sentence in refused(["--plan", "--from_json", str(path)], capfd)


def test_cuda_where_there_is_none(tiny, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    argv = ["--device", "cuda", "--ckpt_dir", str(tiny("t2v-A14B"))]
    assert "sees no CUDA device" in refused(argv, capfd)


FOREIGN: dict[str, tuple[str, list[str]]] = {
    "the video": ("v.mp4", []),
    "the record": ("v.json", []),
    "the latents": ("v.latents.safetensors", ["--save_latents"]),
    "latents after a step": ("v.steps/0001.safetensors", ["--save_latents", "steps"]),
    "a folder of latents": ("v.steps/notes.txt", ["--save_latents", "steps"]),
    "a file as the folder of latents": ("v.steps", ["--save_latents", "steps"]),
    "the trace": ("trace/rank0.json", ["--trace", "trace"]),
    "a kernel trace": ("trace/rank0.step0.kernels.json", ["--trace", "trace"]),
    "the summary": ("lines.summary.json", ["--prompt_file", "lines.txt", "--save_file", "."]),
    "the video of each line": ("a.mp4", ["--prompt_file", "lines.txt", "--save_file", "."]),
}
KINDS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text('{"mine": 1}'),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_not_replaced(
    name: str,
    kind: str,
    tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They are refused before any weight is read, and stay as they are."""
    monkeypatch.chdir(tmp_path)
    file, flags = FOREIGN[name]
    (tmp_path / "lines.txt").write_text('{"prompt": "a", "save_file": "a.mp4"}')
    Path(file).parent.mkdir(exist_ok=True)
    KINDS[kind](Path(file))

    def found() -> dict[Path, tuple[int, ...]]:
        stats = {path: path.lstat() for path in tmp_path.rglob("*") if not path.is_dir()}
        return {path: (one.st_ino, one.st_mtime_ns, one.st_size) for path, one in stats.items()}

    before = found()
    refused(["--ckpt_dir", str(tiny("t2v-A14B")), "--save_file", "v.mp4", *flags], capfd)
    assert found() == before


def test_decoding_refuses_what_it_would_ignore(
    tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    settings = {"task": "t2v-A14B", "ckpt_dir": str(tiny("t2v-A14B"))}
    metadata = {"settings": json.dumps(settings), "format": "pt"}
    save_file({"latents": torch.zeros(48, 2, 4, 4)}, path, metadata=metadata)
    argv = ["--decode_latents", str(path)]
    assert "--sample_steps has no effect" in refused([*argv, "--sample_steps", "4"], capfd)
    assert "has 48 channels and the 2.1 VAE of this task decodes 16" in refused(argv, capfd)
    save_file({"latents": torch.zeros(16, 0, 4, 4)}, path, metadata=metadata)
    assert "each at least 1" in refused(argv, capfd)
    metadata["settings"] = json.dumps(settings | {"size": [64, 64], "frame_num": 9})
    save_file({"latents": torch.zeros(16, 2, 8, 8)}, path, metadata=metadata)
    assert "whose frame_num is 5, and its settings say 9" in refused(argv, capfd)
    metadata["settings"] = json.dumps(settings)
    save_file({"latents": torch.zeros(16, 2, 8, 8)}, path, metadata=metadata)
    with monkeypatch.context() as patch:
        patch.setattr("wan.host.available_memory", lambda: 1000)
        assert "(decoding), and this machine has" in refused([*argv, "--device", "cpu"], capfd)


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
module, sys.argv[1:] = sys.argv[1], ["--plan"]
class Finder:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from wan.__main__ import run
sys.exit(run())
"""


@pytest.mark.parametrize("module", ["wan.cli.resolve", "torch"])
def test_an_interrupted_import(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 130
    assert (
        done.stderr == "generate.py: interrupted; the video was not written.\n" and not done.stdout
    )


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_torch_that_does_not_load(processes: str, tiny, tmp_path: Path) -> None:
    """As with torch-npu installed and no CANN: `import torch` itself fails."""
    (tmp_path / "torch").mkdir()
    message = "Failed to load the backend extension: torch_npu. More words.\nAnd a second line."
    (tmp_path / "torch" / "__init__.py").write_text(f"raise RuntimeError({message!r})")
    done = subprocess.run(
        [sys.executable, str(REPO / "generate.py"), "--ckpt_dir", str(tiny("t2v-A14B"))],
        env={"PYTHONPATH": str(tmp_path), "WORLD_SIZE": processes, "RANK": "0", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "install CANN" in done.stderr and len(done.stderr.splitlines()) == 1
