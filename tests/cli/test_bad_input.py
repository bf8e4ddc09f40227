"""Bad input: one sentence, exit code 2, no weight read, under 3 s, mostly without torch."""

from __future__ import annotations

import itertools
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
from safetensors.torch import load_file, save_file

from tests.cli.test_attention_flags import INVALID_FLAGS, INVALID_PLANS
from tests.conftest import Refusals, Tiny, slow

REPO = Path(__file__).parents[2]
SIMPLE = {
    "unknown task": ["--task", "t2v-99B"],
    "unknown flag": ["--promt", "x"],
    "keyword": ["--sampling_steps", "3"],
    "no such flag": ["--qqqqq", "x"],
    "abbreviated flag": ["--prom", "x"],
    "flag without value": ["--prompt"],
    "size words": ["--size", "large"],
    "size of three": ["--size", "1*2*3"],
    "size beyond floats": ["--size", "9" * 4000 + "*16"],
    "size not whole tokens": ["--size", "100*100"],
    "size for 5B": ["--task", "ti2v-5B", "--size", "1280*720"],
    "size beyond positions": ["--size", "16400*16"],
    "size beyond memory": ["--size", "16384*16384"],
    "frames not 4n+1": ["--frame_num", "80"],
    "previews often": ["--preview", "often"],
    "frames zero": ["--frame_num", "0"],
    "steps huge": ["--sample_steps", "5000"],
    "shift negative": ["--sample_shift", "-5"],
    "shift nan": ["--sample_shift", "nan"],
    "scale zero": ["--sample_guide_scale", "0"],
    "scale nan in pair": ["--sample_guide_scale", "3,nan"],
    "scale of three": ["--sample_guide_scale", "1,2,3"],
    "solver": ["--sample_solver", "nonsense"],
    "seed words": ["--base_seed", "x"],
    "seed huge": ["--base_seed", "9" * 30],
    "seed of thousands of digits": ["--base_seed", "9" * 4000],
    "fps tiny": ["--fps", "1e-9"],
    "empty folder": ["--ckpt_dir", ""],
    "empty image path": ["--task", "i2v-A14B", "--image", " "],
    "output nowhere": ["--save_file", "/proc/x.mp4"],
    "prompt not text": ["--prompt", "\udcff"],
    "precision": ["--precision", "fp16"],
    "precision conflict": ["--precision", "fp32", "--convert_model_dtype"],
    "device": ["--device", "tpu"],
    "noise device": ["--noise_device", "gpu"],
    "offload words": ["--offload_model", "maybe"],
    "blocks of none": ["--resident_blocks", "2"],
    "no blocks of none": ["--resident_blocks", "0"],
    "blocks, compiled": ["--offload_model", "block", "--compile"],
    "host memory of a CPU": ["--offload_model", "cpu", "--device", "cpu"],
    "ulysses": ["--ulysses_size", "8"],
    "cfg x ring": ["--cfg_size", "2", "--ring_size", "3"],
    "comm_type 1": ["--comm_type", "1"],
    "comm_type 3": ["--comm_type", "nonsense"],
    "cfg of three": ["--cfg_size", "3"],
    "plan with a value": ["--plan=1"],
    "extension without its switch": ["--prompt_extend_model", "x"],
    "output without a name": ["--save_file", ".mp4"],
    "both aims": ["--comm_type", "1", "--fa_alltoall_overlap"],
    "overlap alone": ["--fa_alltoall_overlap"],
    "chunks zero": ["--chunks", "0"],
    "chunks of the baseline": ["--plan", "--ulysses_size", "2", "--chunks", "2"],
    "chunks beyond the heads": [
        *("--plan", "--ulysses_size", "2", "--comm_type", "1", "--chunks", "21"),
    ],
    "trace of compiled blocks": ["--trace", "x", "--compile"],
    "log of compiled blocks": ["--log_level", "debug", "--compile"],
    "trace nowhere": ["--trace", "/proc/x"],
    "trace into a file": ["--trace", "/etc/hostname"],
    "steps of no trace": ["--trace_steps", "1"],
    "steps behind the last": ["--trace", "x", "--trace_steps", "3,4", "--sample_steps", "4"],
    "falling steps": ["--trace", "x", "--trace_steps", "4-3"],
    "steps as a word": ["--trace", "x", "--trace_steps", "all"],
    "log level": ["--log_level", "loud"],
    "trace of decoding": ["--trace", "x", "--decode_latents", "y"],
    "ring type alone": ["--ring_type", "bidirectional"],
    "unknown ring type": ["--ring_type", "torus"],
    "zero ranks": ["--ring_size", "0"],
    "endless wait": ["--dist_timeout", "inf"],
    "wait for nobody": ["--dist_timeout", "5"],
    "fsdp": ["--dit_fsdp"],
    "t5 fsdp": ["--t5_fsdp"],
    "tensor parallel": ["--tp_size=2"],
    "vae parallel": ["--vae_parallel"],
    "vae parallel in tiles": ["--plan", "--ulysses_size", "2", "--vae_parallel", "--vae_tiling"],
    "vae in half precision": ["--vae_precision", "fp16"],
    "speech flag": ["--audio", "x.wav"],
    "i2v without image": ["--task", "i2v-A14B"],
    "t2v with image": ["--image", "x.png"],
    "image missing": ["--task", "i2v-A14B", "--image", "no.png"],
    "image address": ["--task", "i2v-A14B", "--image", "https://example.com/cat.jpg"],
    "image without end": ["--task", "i2v-A14B", "--image", "/dev/zero"],
    "folder missing": ["--ckpt_dir", "nowhere/at/all"],
    "hub name": ["--ckpt_dir", "Wan-AI/Wan2.2-T2V-A14B"],
    "folder is a file": ["--ckpt_dir", str(REPO / "README.md")],
    "output not mp4": ["--save_file", "video.avi"],
    "output below a file": ["--save_file", str(REPO / "README.md/x.mp4")],
    "output name too long": ["--save_file", "x" * 250 + ".mp4"],
    "output name of long letters": ["--save_file", "猫" * 70 + ".mp4"],
    "record missing": ["--from_json", "no.json"],
    "scale pair for one network": ["--task", "ti2v-5B", "--sample_guide_scale", "3,4"],
    "folder name too long": ["--ckpt_dir", "x" * 300],
    "latents missing": ["--decode_latents", "no.safetensors"],
    "both continuations": ["--from_json", "a", "--decode_latents", "b"],
    "prompt extension method": ["--prompt_extend_method", "gpt"],
    "prompt extension folder": ["--use_prompt_extend", "--prompt_extend_model", "./no-such-model"],
}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_arguments(refusals: Refusals) -> None:
    refusals("arguments", SIMPLE)


def test_refusals_need_no_torch(tmp_path: Path) -> None:
    """Refuses the tables, also of attention, in a fresh interpreter without importing torch."""
    script = (
        "import json, sys\n"
        "from wan.cli.main import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert main(argv) == 2, argv\n"
        "names = 'torch diffusers transformers torch_npu mindiesd'.split()\n"
        "assert not {*names} & set(sys.modules)\n"
    )
    argvs = [*SIMPLE.values(), *INVALID_FLAGS.values()]
    argvs += [["--plan", *argv] for argv in INVALID_PLANS.values()]
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argvs)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == len(argvs)


def test_environment_without_torchrun(monkeypatch: pytest.MonkeyPatch, refusals: Refusals) -> None:
    monkeypatch.setenv("OVERLAP", "yes")
    refusals("environment: a word for a switch", {"OVERLAP=yes": []})
    for case, world_size in (("half a launcher", "2"), ("a word for a number", "two")):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        refusals(f"environment: {case}", {f"WORLD_SIZE={world_size}": []})


def write_short_header(path: Path) -> None:
    """Writes a PNG whose header lacks a byte: Pillow's error is a ValueError."""
    chunk = b"IHDR" + bytes(12)
    crc = struct.pack(">I", zlib.crc32(chunk))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 12) + chunk + crc)


def write_truncated(path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:400])


def write_animated(path: Path) -> None:
    first, second = (Image.new("RGB", (32, 32), color) for color in ("red", "blue"))
    first.save(path, "GIF", save_all=True, append_images=[second])


IMAGES: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "text": lambda path: path.write_text("no image"),
    "truncated": write_truncated,
    "animated": write_animated,
    "folder": Path.mkdir,
    "postscript": lambda path: path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    ),
    "flat": lambda path: Image.new("RGB", (4000, 2)).save(path),
    "short header": write_short_header,
}


def test_images(tiny: Tiny, tmp_path: Path, refusals: Refusals) -> None:
    start, cases = ["--task", "i2v-A14B", "--ckpt_dir", tiny("i2v-A14B"), "--image"], {}
    for kind, write in IMAGES.items():
        write(tmp_path / f"{kind}.png")
        cases[kind] = [*start, f"{kind}.png"]
    refusals("images", cases, plans=True)


HIGH = "high_noise_model"
STEM = "diffusion_pytorch_model"
VAE, T5 = "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"


INDEX = f"{HIGH}/{STEM}.safetensors.index.json"


def _shard(folder: Path) -> Path:
    return sorted((folder / HIGH).glob("*.safetensors"))[0]


def edit_json(file: str, change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        change(value)
        (folder / file).write_text(json.dumps(value))

    return edit


def set_config(**values: int) -> Callable[[Path], object]:
    return edit_json(f"{HIGH}/config.json", lambda config: config.update(values))


def rename_in_header(old: bytes, new: bytes) -> Callable[[Path], object]:
    def rename(folder: Path) -> None:
        content = _shard(folder).read_bytes()
        assert len(old) == len(new) and old in content
        _shard(folder).write_bytes(content.replace(old, new, 1))

    return rename


def edit_pth(file: str, change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        state = torch.load(folder / file, weights_only=True)
        change(state)
        torch.save(state, folder / file)

    return edit


def save_pth(file: str, value: object) -> Callable[[Path], object]:
    return lambda folder: torch.save({"x": value}, folder / file)


def shorten_low_noise_bias(folder: Path) -> None:
    path = folder / "low_noise_model" / _shard(folder).name
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("bias"))
    save_file(tensors | {name: tensors[name][:-1].clone()}, path)


def write(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


def write_shard(make_content: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: _shard(folder).write_bytes(make_content(_shard(folder).read_bytes()))


def remove(*names: str) -> Callable[[Path], object]:
    def remove_all(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove_all


BROKEN: dict[str, Callable[[Path], object]] = {
    "shard truncated": write_shard(lambda content: content[:-100]),
    "shard garbage": write_shard(lambda _: b"\xff" * 500),
    "shard empty": write_shard(lambda _: b""),
    "shard header broken": write_shard(lambda _: struct.pack("<Q", 9) + b"{not json" + b"x" * 20),
    "shard missing": lambda folder: _shard(folder).unlink(),
    "index missing": remove(INDEX),
    "index names a ghost": lambda folder: edit_json(
        INDEX, lambda value: value["weight_map"].update({"ghost.weight": _shard(folder).name})
    )(folder),
    "index not JSON": write(INDEX, "{"),
    "config not JSON": write(f"{HIGH}/config.json", "[]"),
    "config of another net": set_config(ffn_dim=64),
    "config with more layers": set_config(num_layers=3),
    "config with fewer layers": set_config(num_layers=1),
    "config with odd heads": set_config(num_heads=7),
    "expert missing": remove("low_noise_model"),
    "no networks": remove(HIGH, "low_noise_model"),
    "VAE missing": remove(VAE),
    "VAE truncated": lambda f: (f / VAE).write_bytes((f / VAE).read_bytes()[:9999]),
    "config without heads": set_config(num_heads=0),
    "shard entry without shape": rename_in_header(b'"shape"', b'"shapo"'),
    "quantised weights": rename_in_header(b'"BF16"', b'"I16" '),
    "unknown dtype": rename_in_header(b'"BF16"', b'"F8E4"'),
    "index of brackets": write(INDEX, "[" * 100_000),
    "VAE of the other family": save_pth(VAE, torch.zeros(1)),
    "VAE file with code": save_pth(VAE, Path("boom")),
    "text encoder of another model": save_pth(T5, torch.zeros(1)),
    "VAE with one tensor more": edit_pth(VAE, lambda state: state.update(more=torch.ones(1))),
    "VAE with one tensor less": edit_pth(VAE, lambda state: state.pop("decoder.head.2.bias")),
    "VAE of half the width inside": edit_pth(
        VAE, lambda state: state.update({"conv2.bias": state["conv2.bias"][:8].clone()})
    ),
    "text encoder with one tensor less": edit_pth(
        T5, lambda state: state.pop("blocks.1.attn.q.weight")
    ),
    "text encoder with numbers that are no weights": edit_pth(T5, lambda s: s.update(step=7)),
    "tokenizer damaged": write("google/umt5-xxl/tokenizer.json", "{"),
    "tokenizer of nothing": remove("google/umt5-xxl/tokenizer.json"),
    "config with layers beyond measure": set_config(num_layers=10**9),
    "index that leaves its folder": edit_json(
        INDEX, lambda value: value["weight_map"].update({"head.head.bias": "../x.safetensors"})
    ),
    "text encoder missing": remove(T5),
    "tokenizer missing": remove("google"),
    "generation config not JSON": write("generation_config.json", "nope"),
    "generation config unknown key": write("generation_config.json", '{"image": "x"}'),
    "generation config bad value": write("generation_config.json", '{"frame_num": 80}'),
    "second expert with a shorter bias": shorten_low_noise_bias,
}


def test_broken_checkpoints(tiny: Tiny, tmp_path: Path, refusals: Refusals) -> None:
    cases = {}
    for number, (name, damage) in enumerate(BROKEN.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tiny("t2v-A14B"), folder)
        damage(folder)
        cases[name] = ["--ckpt_dir", folder.name]
    refusals("broken checkpoints", cases, plans=True)


def test_folders_of_other_tasks(tiny: Tiny, image_path: Path, refusals: Refusals) -> None:
    pairs = [("i2v-A14B", "t2v-A14B"), ("t2v-A14B", "ti2v-5B"), ("ti2v-5B", "t2v-A14B")]
    pairs += [("t2v-1.3B", "t2v-A14B"), ("t2v-A14B", "t2v-1.3B")]
    cases = {}
    for task, folder in pairs:
        image = ["--image", image_path] if task == "i2v-A14B" else []
        cases[f"{task} of {folder}"] = ["--task", task, "--ckpt_dir", tiny(folder), *image]
    refusals("folders of other tasks", cases)


RECORDS = {
    "half a record": "{",
    "nothing": "{}",
    "an unknown setting": '{"settings": {"colour": 1}}',
    "NaN": '{"settings": {"fps": NaN}}',
    "a number for a text": '{"settings": {"prompt": 7}}',
    "a truth value for a number": '{"settings": {"sample_steps": true}}',
    "a list for a task": '{"settings": {"task": []}}',
    "an object for a task": '{"settings": {"task": {}}}',
    "brackets": "[" * 100_000,
    "a number of 5000 digits": '{"settings": {"base_seed": ' + "9" * 5000 + "}}",
    **{
        name: f'{{"settings": {{"{name}": 1}}}}'
        for name in ("plan", "chip", "device_memory", "from_json", "decode_latents", "power")
    },
    "the number of ranks": '{"settings": {"ulysses_size": 2}}',
    "a removed setting": '{"settings": {"clips": 1}}',
    "a setting twice": '{"settings": {"sample_steps": 4, "sample_steps": 4}}',
    "two sections": '{"settings": {"sample_steps": 4}, "settings": {}}',
    "half a letter as a name": '{"settings": {"\\ud800": 1}}',
    "half a letter": '{"settings": {"prompt": "\\ud800"}}',
}


def test_records(tmp_path: Path, refusals: Refusals) -> None:
    names = {}
    for number, (case, content) in enumerate(RECORDS.items()):
        names[case] = f"{number}.json"
        (tmp_path / names[case]).write_text(content)
    refusals("records", {case: ["--from_json", name] for case, name in names.items()})
    refusals("records", {case: ["--plan", "--from_json", name] for case, name in names.items()})


def test_cuda_where_there_is_none(tiny: Tiny, refusals: Refusals) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    argv = ["--device", "cuda", "--ckpt_dir", tiny("t2v-A14B")]
    refusals("a device that is not there", {"cuda": argv})


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


def test_other_files_are_not_replaced(tiny: Tiny, tmp_path: Path, refusals: Refusals) -> None:
    """Refuses existing files before any weight is read, and does not change them."""

    def stats() -> dict[Path, tuple[int, ...]]:
        lstats = {path: path.lstat() for path in tmp_path.rglob("*") if not path.is_dir()}
        return {
            path: (lstat.st_ino, lstat.st_mtime_ns, lstat.st_size) for path, lstat in lstats.items()
        }

    cases, folders = {}, {}
    for (name, (file, flags)), kind in itertools.product(FOREIGN.items(), KINDS):
        folder = folders[f"{name}, {kind}"] = tmp_path / name / kind
        (folder / file).parent.mkdir(parents=True)
        (folder / "lines.txt").write_text('{"prompt": "a", "save_file": "a.mp4"}')
        KINDS[kind](folder / file)
        start = ["--ckpt_dir", tiny("t2v-A14B"), "--save_file", "v.mp4"]
        cases[f"{name}, {kind}"] = [*start, *flags]
    stats_before = stats()
    refusals("files of others", cases, folders)
    assert stats() == stats_before


def test_decoding_refuses_what_it_would_ignore(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    settings = {"task": "t2v-A14B", "ckpt_dir": str(tiny("t2v-A14B"))}

    def latents(name: str, *shape: int, **more: object) -> list[str]:
        metadata = {"settings": json.dumps(settings | more), "format": "pt"}
        save_file({"latents": torch.zeros(shape)}, tmp_path / name, metadata=metadata)
        return ["--decode_latents", name]

    argv = latents("x", 16, 2, 8, 8)
    cases = {
        "steps": [*argv, "--sample_steps", "4"],
        "channels": latents("channels", 48, 2, 4, 4),
        "no frames": latents("frames", 16, 0, 4, 4),
        "other frames": latents("length", 16, 2, 8, 8, size=[64, 64], frame_num=9),
    }
    refusals("decoding of latents", cases)
    image = {"task": "i2v-A14B", "image": "x.png", "size": [64, 64], "frame_num": 5}
    wide = latents("wide", 16, 2, 90, 160, **image, ckpt_dir=str(tiny("i2v-A14B")))
    for free, small in ((1000, argv), (4 * 10**7, wide)):
        monkeypatch.setattr("wan.utils.system.read_available_memory", lambda free=free: free)
        refusals(f"decoding with {free} bytes", {small[-1]: [*small, "--device", "cpu"]})


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
module, sys.argv[1:] = sys.argv[1], ["--plan"]
class Finder:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from wan.__main__ import run_command_line
sys.exit(run_command_line())
"""


@pytest.mark.parametrize("module", ["wan.app.resolve", slow("torch")])
def test_an_interrupted_import(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module]
    result = subprocess.run(command, capture_output=True, timeout=60, env={"PYTHONPATH": str(REPO)})
    message = b"generate.py: interrupted; the video was not written.\n"
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", message)


@pytest.mark.parametrize("processes", [slow("1"), "2"])
def test_a_torch_that_does_not_load(processes: str, tiny: Tiny, tmp_path: Path) -> None:
    """`import torch` itself fails, as with torch-npu installed but not CANN."""
    (tmp_path / "torch").mkdir()
    message = "Failed to load the backend extension: torch_npu. More words.\nAnd a second line."
    (tmp_path / "torch" / "__init__.py").write_text(f"raise RuntimeError({message!r})")
    result = subprocess.run(
        [sys.executable, str(REPO / "generate.py"), "--ckpt_dir", str(tiny("t2v-A14B"))],
        env={"PYTHONPATH": str(tmp_path), "WORLD_SIZE": processes, "RANK": "0", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert "install CANN" in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_missing_package_is_one_sentence() -> None:
    """A Python without the packages, as before the environment is activated."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "generate.py", "--plan"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=REPO, env=environment
    )
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.count("\n") == 1 and "make setup" in result.stderr
    assert "is not installed" in result.stderr and sys.executable in result.stderr
