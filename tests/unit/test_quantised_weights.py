"""Exports of int8 DiT weights that are written, refused and loaded."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import slow
from tests.gguf_files import make_gguf_folders
from tests.lora_files import make_pair
from tests.pipelines import build_cpu_pipeline, generate_quick_latents
from tests.refusals import check_refusals, get_refusal
from tools import quantize_dit
from tools.quantize_dit import quantize_checkpoint
from wan.app.resolve import make_setup
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import load_rotations
from wan.checkpoint.quant.w8a8_export import QuantizedDit, check_export_device, read_quantized_dit
from wan.kernels.int8_linear import W8A8Linear, quantize_per_token
from wan.modules.model import WanModel
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.run_options import read_run_options

REPO = Path(__file__).parents[2]
DESCRIPTION = "quant_model_description_w8a8_dynamic.json"
WEIGHTS = "quant_model_weight_w8a8_dynamic.safetensors"
FOLDERS = {True: ("high_noise_model", "low_noise_model"), False: (".",)}
LAYERS = [f"{part}_attn.{name}" for part in ("self", "cross") for name in "qkvo"] + [
    "ffn.0",
    "ffn.2",
]
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def export(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """export(task, fa=None): the folder that the tool writes for a tiny checkpoint, once."""
    root, exports = tmp_path_factory.mktemp("exports"), {}

    def make(task: str = "t2v-1.3B", fa: str | None = None) -> Path:
        if (task, fa) not in exports:
            exports[task, fa] = quantize_checkpoint(tiny(task), root / f"{task}-{fa}", fa=fa)
        return exports[task, fa]

    return make


@pytest.fixture
def broken(export: Export, tmp_path: Path) -> Path:
    """A copy of the export of t2v-1.3B with FP8 attention, to be damaged."""
    return Path(shutil.copytree(export(fa="fp8"), tmp_path / "broken"))


def read_export(folder: Path, checkpoint: Path, **changes: Any) -> QuantizedDit:
    options = {"device": "cpu", "fa_quant": None, **changes}
    return read_quantized_dit(folder, inspect_checkpoint(checkpoint), **options)


# --- the tool


@pytest.mark.parametrize("task", ["t2v-A14B", "ti2v-5B", slow("i2v-A14B"), slow("t2v-1.3B")])
def test_tool_writes_the_format(task: str, tiny: Any, export: Export) -> None:
    """Names, numbers, description and modes, against the definition."""
    folder = export(task)
    for sub in FOLDERS["A14B" in task]:
        files = {path.name: path for path in (folder / sub).iterdir() if path.is_file()}
        assert files.keys() == {DESCRIPTION, WEIGHTS}
        assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o640}
        stored, source = load_file(files[WEIGHTS]), load_floats(tiny(task) / sub)
        blocks = {name.split(".")[1] for name in source if name.startswith("blocks.")}
        linears = [f"blocks.{block}.{layer}" for block in blocks for layer in LAYERS]
        parts = ("weight", "weight_scale", "bias")
        assert stored.keys() == {f"{name}.{part}" for name in linears for part in parts}
        for name in linears:
            weight = source[f"{name}.weight"].numpy()
            scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
            assert np.array_equal(stored[f"{name}.weight_scale"], scale)
            assert stored[f"{name}.weight"].dtype == torch.int8
            assert np.array_equal(stored[f"{name}.weight"], np.rint(weight / scale))
            assert torch.equal(stored[f"{name}.bias"], source[f"{name}.bias"])
        description = json.loads(files[DESCRIPTION].read_text())
        assert description.pop("model_quant_type") == "W8A8_DYNAMIC" and description.pop("version")
        assert {k for k, v in description.items() if v == "W8A8_DYNAMIC"} == stored.keys()
        assert {k for k, v in description.items() if v == "FLOAT"} == source.keys() - stored.keys()


def load_floats(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_tool_writes_fp8_attention(tiny: Any, export: Export) -> None:
    folder = export(fa="fp8")
    description = json.loads((folder / DESCRIPTION).read_text())
    types = {description[f"blocks.{i}.self_attn.quant_type"] for i in range(2)}
    assert types == {"FP8_DYNAMIC"}
    rotations = load_rotations(read_export(folder, tiny("t2v-1.3B"), fa_quant="fp8"))
    assert rotations.keys() == {("dit", 0), ("dit", 1)}
    for q_rot, k_rot in rotations.values():
        assert q_rot.dtype == torch.bfloat16 and torch.equal(q_rot, k_rot)
        assert (q_rot.float() @ q_rot.float().T - torch.eye(8)).abs().max() < 4e-3
    assert load_rotations(read_export(export(), tiny("t2v-1.3B"), fa_quant="fp8")) == {}


def test_tool_reads_other_folders(tiny: Any, export: Export, tmp_path: Path) -> None:
    """The integers of a GGUF file are those of its dequantized weights."""
    stored, plain = make_gguf_folders(tiny("t2v-1.3B"), "Q8_0", tmp_path)
    folders = {"diffusers": tiny("t2v-1.3B", "diffusers"), "gguf": stored, "plain": plain}
    exports = {name: quantize_checkpoint(x, tmp_path / f"{name} q") for name, x in folders.items()}
    for first, second in ((exports["diffusers"], export()), (exports["gguf"], exports["plain"])):
        for name in (DESCRIPTION, WEIGHTS):
            assert (first / name).read_bytes() == (second / name).read_bytes()
    read_export(exports["gguf"], stored)


def test_tool_refuses_and_leaves_nothing(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, with one sentence, and no new folder is left."""
    monkeypatch.chdir(tmp_path)
    for name in ("full", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    for target in ("empty", "none"):
        (tmp_path / f"link to {target}").symlink_to(tmp_path / target)
    names_before, q = {path.name for path in tmp_path.iterdir()}, tmp_path / "q"
    small = ["--ckpt_dir", tiny("t2v-1.3B"), "--out"]
    relit = ["--ckpt_dir", tiny("animate-14B"), "--out", q, "--use_relighting_lora"]
    cases: dict[str, list[object]] = {
        "no checkpoint": ["--ckpt_dir", tmp_path / "none", "--out", q],
        "a full folder": [*small, tmp_path / "full"],
        "heads of 6": ["--ckpt_dir", tiny("t2v-A14B"), "--out", q, "--fa", "fp8"],
        "no such place": [*small, "/proc/none/q"],
        "no relighting LoRA": relit,
        "the current folder": [*small, "."],
        "an empty checkpoint": ["--ckpt_dir", "", "--out", "x"],
        "an empty name": ["--ckpt_dir", "x", "--out= "],
        "no name": ["--ckpt_dir", "x"],
        "another format": ["--ckpt_dir", "x", "--out", "y", "--fa", "fp4"],
        "half a flag": ["--ckpt", "x", "--out", "y"],
    }
    # A folder cannot take the place of a link.
    cases |= {f"a link to {name}": [*small, f"link to {name}"] for name in ("empty", "none")}
    # Nothing may be read before.
    monkeypatch.setattr("wan.checkpoint.load.map_tensors", None)
    messages = {}
    for name, arguments in cases.items():
        assert quantize_dit.main([str(a) for a in arguments]) == 2, name
        messages[name] = capsys.readouterr().err
    check_refusals("quantize_dit: refused", messages, hide=[r"\(choose from .*?\)"])
    assert {path.name for path in tmp_path.iterdir()} == names_before


def test_tool_is_ended_while_it_reads(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a disk that fails after the headers, and by Ctrl-C; no file is left."""
    argv = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--out", str(tmp_path / "q")]
    unreadable = f"{tiny('t2v-1.3B')} cannot be read"
    for error, code, message in (
        (OSError(5, "Input/output error"), 2, unreadable),
        (SafetensorError("incomplete"), 2, unreadable),
        (KeyboardInterrupt, 130, "Interrupted; nothing was written.\n"),
    ):
        monkeypatch.setattr("wan.checkpoint.load.map_tensors", mock.Mock(side_effect=error))
        assert quantize_dit.main(argv) == code
        text = capsys.readouterr().err
        assert message in text and "--out" not in text
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_tool_terminated(tiny: Any, tmp_path: Path) -> None:
    """The process is terminated while it reads a tensor from a slow disk."""
    script = (
        "import runpy, sys, time, safetensors\n"
        "safetensors.safe_open = lambda *_, **__: (print('reading', flush=True), time.sleep(60))\n"
        "sys.argv[0] = 'tools/quantize_dit.py'\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    argv = [sys.executable, "-c", script, "--ckpt_dir", tiny("t2v-1.3B"), "--out", tmp_path / "q"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPO) as run:
        assert run.stdout is not None and run.stdout.readline() == b"reading\n"
        assert all(path.name.startswith(".") for path in tmp_path.iterdir())
        run.terminate()
        assert run.wait(timeout=30) == 143
    assert not list(tmp_path.iterdir())


# --- refusals


def edit_description(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description)
    (folder / DESCRIPTION).write_text(json.dumps(description))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


Q = "blocks.0.self_attn.q"
WRONG: dict[str, Callable[[Path], Any]] = {
    "no folder": shutil.rmtree,
    "no description": lambda f: (f / DESCRIPTION).unlink(),
    "no JSON": lambda f: (f / DESCRIPTION).write_text("{"),
    "no type": lambda f: edit_description(f, lambda d: d.pop("model_quant_type")),
    "type": lambda f: edit_description(f, lambda d: d.update(model_quant_type=3)),
    "no weights": lambda f: (f / WEIGHTS).unlink(),
    "truncated": lambda f: (f / WEIGHTS).write_bytes(b"\0" * 9),
    "nothing": lambda f: edit_description(
        f, lambda d: d.update({k: "FLOAT" for k in d if "blocks" in k})
    ),
    "no scale": lambda f: edit_tensors(f, lambda t: t.pop(f"{Q}.weight_scale")),
    "no bias": lambda f: edit_tensors(f, lambda t: t.pop(f"{Q}.bias")),
    "no rotation": lambda f: edit_tensors(f, lambda t: t.pop("blocks.1.self_attn.k_rot")),
    "dtype": lambda f: edit_tensors(
        f, lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()})
    ),
    "shape": lambda f: edit_tensors(
        f, lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][1:].clone()})
    ),
    "scales per group": lambda f: edit_tensors(
        f, lambda t: t.update({f"{Q}.weight_scale": torch.ones(96, 3)})
    ),
    "rotation of other heads": lambda f: edit_tensors(
        f, lambda t: t.update({"blocks.0.self_attn.q_rot": torch.eye(64)})
    ),
    "file with a gap": lambda f: edit_header(f, lambda h: h.pop(f"{Q}.weight")),
    "metadata": lambda f: edit_header(f, lambda h: h.update(__metadata__={"format": 5})),
}
ENTRIES = {  # of the description
    "algorithm": {f"{Q}.weight": "W9A9"},
    "linear as attention": {f"{Q}.weight": "FP8_DYNAMIC"},
    "other network": {"blocks.9.ffn.0.weight": "W8A8_DYNAMIC"},
    "float32 layer": {"time_embedding.0.weight": "W8A8_DYNAMIC"},
    "weights of NPUs on a CPU": {f"{Q}.weight": "W8A16"},
    "linear as self-attention": {"blocks.0.self_attn.quant_type": "W8A8_DYNAMIC"},
    "cross-attention": {"blocks.0.cross_attn.quant_type": "FP8_DYNAMIC"},
}


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


NO_LINEAR = {  # entry -> its layer
    "patch_embedding.weight": "patch_embedding",
    "blocks.0.norm3.weight": "blocks.0.norm3",
    "blocks.0.norm3.bias": "blocks.0.norm3.bias",
    "blocks.0.modulation": "blocks.0.modulation",
    "blocks.0": "blocks.0",
    "blocks.0.self_attn.norm_q.weight": "blocks.0.self_attn.norm_q",
    "blocks.1.ffn.quant_type": "blocks.1.ffn",
}


def test_only_linear_layers_can_be_quantised(broken: Path, tiny: Any) -> None:
    """mindiesd passes over such an entry in silence."""
    description = (broken / DESCRIPTION).read_text()
    for entry, layer in NO_LINEAR.items():
        edit_description(broken, lambda d, entries={entry: "w4a16"}: d.update(entries))
        message = f"quantises {layer} as W4A16, but it is no linear layer;"
        assert message in get_refusal(read_export, broken, tiny("t2v-1.3B")), entry
        (broken / DESCRIPTION).write_text(description)


DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16)
INT8, FP8 = {torch.int8: 96}, {torch.float8_e4m3fn: 96}
FLOATS, BYTES = (torch.float32, torch.bfloat16), (torch.uint8,)
# algorithm -> dtypes of a weight with 96 columns and how many each has, of its scales
ACCEPTED_DTYPES = {
    "W8A8": (INT8, DTYPES),  # has no such scales
    "W8A8_TIMESTEP": (INT8, FLOATS),
    "W8A16": (INT8, FLOATS),
    "W4A16": (INT8, FLOATS),
    "W4A4_DYNAMIC": (INT8, FLOATS),
    "W8A8_MXFP8": (FP8, BYTES),
    "W4A4_MXFP4": ({**FP8, torch.uint8: 48}, BYTES),
    "W4A4_MXFP4_DUALSCALE": ({**FP8, torch.uint8: 48}, BYTES),
}


def test_numbers_of_weights_that_only_npus_take(broken: Path, tiny: Any) -> None:
    """As mindiesd's layers read them; the algorithm's name on other numbers is refused."""
    parts = ("input_scale", "input_offset", "deq_scale", "quant_bias", "weight_dual_scale")
    wrong, layer = [], {f"{Q}.{part}": torch.ones(96) for part in parts}
    others = load_file(broken / WEIGHTS) | layer

    def refusal(algorithm: str, weight: torch.dtype, scale: torch.dtype, rows: int = 96) -> str:
        columns = ACCEPTED_DTYPES[algorithm][0].get(weight, 96)
        tensors = {f"{Q}.weight": torch.zeros(rows, columns, dtype=weight)}
        tensors[f"{Q}.weight_scale"] = torch.zeros(96, 1, dtype=scale)
        save_file(others | tensors, broken / WEIGHTS)
        try:
            (export,) = read_export(broken, tiny("t2v-1.3B"), device="auto").experts.values()
        except InputError as error:
            return str(error)
        assert export.linears[Q].algorithm == algorithm
        return ""

    for algorithm, (weights, scales) in ACCEPTED_DTYPES.items():
        edit_description(broken, lambda d, entries={f"{Q}.weight": algorithm}: d.update(entries))
        for dtype in DTYPES:
            message = refusal(algorithm, dtype, scales[0])
            if message if dtype in weights else f"{Q}.weight is" not in message:
                wrong.append((algorithm, "weight", dtype, message))
            message = refusal(algorithm, next(iter(weights)), dtype)
            if message if dtype in scales else f"{Q}.weight_scale is" not in message:
                wrong.append((algorithm, "scale", dtype, message))
        message = refusal(algorithm, next(iter(weights)), scales[0], rows=95)
        if f"{Q}.weight is" not in message or f"but {algorithm} takes" not in message:
            wrong.append((algorithm, "rows", message))
    assert not wrong


def test_refused_before_weights_are_read(export: Export, tiny: Any, tmp_path: Path) -> None:
    messages = {}
    intact = export(fa="fp8")
    for name in (*WRONG, *ENTRIES):
        folder = Path(shutil.copytree(intact, tmp_path / name))
        if name in WRONG:
            WRONG[name](folder)
        else:
            edit_description(folder, lambda d, name=name: d.update(ENTRIES[name]))
        messages[name] = get_refusal(read_export, folder, tiny("t2v-1.3B"))
    parser = r"(?<=(?:file|JSON)) \(.*\)(?=;)"
    check_refusals("quantised weights", messages, hide=[parser])


def test_two_experts_need_two_folders(tiny: Any, export: Export, tmp_path: Path) -> None:
    folder = shutil.copytree(export("t2v-A14B"), tmp_path / "q")
    assert read_export(folder, tiny("t2v-A14B")).experts.keys() == {"high_noise", "low_noise"}
    shutil.rmtree(folder / "low_noise_model")
    with pytest.raises(InputError, match="low_noise_model holds no description"):
        read_export(folder, tiny("t2v-A14B"))


def test_combinations_that_cannot_run(broken: Path, tiny: Any) -> None:
    checkpoint = tiny("t2v-1.3B")
    values = {"quant_dit_path": broken, "dit_fsdp": True, "device": "cpu"}
    with pytest.raises(InputError, match=r"dit_fsdp.* quantised weights are buffers"):
        make_setup(
            read_run_options(values),
            PRESETS["t2v-1.3B"],
            inspect_checkpoint(checkpoint),
            world_size=2,
        )
    edit_description(broken, lambda d: d.update({"blocks.0.self_attn.quant_type": "MXFP8_DYNAMIC"}))
    (export,) = read_export(broken, checkpoint).experts.values()
    assert export.attentions[0].algorithm == "MXFP8_DYNAMIC"
    with pytest.raises(InputError, match="MXFP8_DYNAMIC, but fa_quant=fp8"):
        read_export(broken, checkpoint, fa_quant="fp8")


def test_file_modes_matter_to_npus_only(broken: Path, tiny: Any) -> None:
    checkpoint = tiny("t2v-1.3B")
    assert read_export(broken, checkpoint, device="npu").algorithms == ("W8A8_DYNAMIC",)
    (broken / WEIGHTS).chmod(0o644)
    loose = read_export(broken, checkpoint, device="auto")
    check_export_device(loose, "cpu")
    with pytest.raises(InputError, match=f"mode 0644.*chmod 0640 .*{WEIGHTS}"):
        check_export_device(loose, "npu")
    (broken / WEIGHTS).chmod(0o600)
    check_export_device(loose, "npu")
    (broken / DESCRIPTION).rename(broken / "elsewhere.json")
    (broken / DESCRIPTION).symlink_to(broken / "elsewhere.json")
    with pytest.raises(InputError, match="symbolic link"):
        read_export(broken, checkpoint, device="npu")
    read_export(broken, checkpoint, device="cpu")


def test_layouts_of_other_exporters(broken: Path, tiny: Any) -> None:
    """Entries by layer, in any case; a smoothed layer one level deeper; scales as vectors."""

    def smooth(tensors: dict[str, Tensor]) -> None:
        for part in ("weight", "bias"):
            tensors[f"{Q}.linear.{part}"] = tensors.pop(f"{Q}.{part}")
        tensors[f"{Q}.linear.weight_scale"] = tensors.pop(f"{Q}.weight_scale")[:, 0].clone()
        tensors[f"{Q}.div.mul_scale"] = torch.ones(96)

    def rename(description: dict[str, Any]) -> None:
        del description[f"{Q}.weight"]
        description |= {f"{Q}.linear.weight": "w8a8_dynamic", "blocks.1.ffn.0.weight": "FLOAT"}
        del description["blocks.1.self_attn.quant_type"]
        description["blocks.1.self_attn.fa_q.scale"] = "FP8_DYNAMIC"

    edit_tensors(broken, smooth)
    edit_description(broken, rename)
    network = read_export(broken, tiny("t2v-1.3B")).experts["dit"]
    assert network.linears[Q].tensors.keys() == {"weight", "weight_scale", "bias", "mul_scale"}
    assert "blocks.1.ffn.0" not in network.linears and len(network.linears) == 19
    assert network.attentions.keys() == {0, 1}


Entries = dict[str, str | None]  # None: there is no such entry
# The entries of one layer -> its algorithm, None: it is not quantised.
FIRST: dict[str, tuple[Entries, str | None]] = {
    "one level deeper": ({".linear.weight": "W8A8", ".weight": "W8A16"}, "W8A8"),
    "weight": ({".weight": "W8A8", "": "W8A16"}, "W8A8"),
    "the bare name": ({".weight": None, "": "W8A8", ".quant_type": "W8A16"}, "W8A8"),
    "bare before FP8": ({".weight": None, "": "W8A8", ".fa_q.scale": "W8A16"}, "W8A8"),
    "scale before type": (
        {".weight": None, ".fa_q.scale": "W8A8", ".quant_type": "W8A16"}, "W8A8"
    ),
    "type alone": ({".weight": None, ".quant_type": "w8a8"}, "W8A8"),
    "FLOAT last": ({".weight": "W8A8", ".quant_type": "FLOAT"}, None),
    "FLOAT in another case": ({".weight": "W8A8", ".quant_type": "float"}, "W8A8"),
    "and first": ({".weight": "Float", ".quant_type": "W8A8"}, "W8A8"),
    "and alone": ({".weight": "float"}, None),
    "16 bits first": ({".weight": "w16a16", ".quant_type": "W8A8"}, None),
    "16 bits last": ({".weight": "W8A8", ".quant_type": "W16A16"}, "W8A8"),
    "not quantised, last": ({".weight": "W8A8", ".quant_type": "NO_QUANT"}, "W8A8"),
}  # fmt: skip


def test_which_entry_counts(broken: Path, tiny: Any) -> None:
    """As mindiesd's quantize looks a layer up: get_key_patterns, get_cfg_and_weights."""
    parts = ("weight_scale", "input_scale", "input_offset", "deq_scale", "quant_bias")
    edit_tensors(broken, lambda t: t.update({f"{Q}.{part}": torch.ones(96) for part in parts}))
    original, algorithms = json.loads((broken / DESCRIPTION).read_text()), {}
    for case, (entries, _) in FIRST.items():
        overrides = {Q + suffix: value for suffix, value in entries.items()}
        description = {
            name: value for name, value in (original | overrides).items() if value is not None
        }
        (broken / DESCRIPTION).write_text(json.dumps(description))
        (export,) = read_export(broken, tiny("t2v-1.3B"), device="auto").experts.values()
        layer = export.linears.get(Q)
        algorithms[case] = None if layer is None else layer.algorithm
    assert algorithms == {case: algorithm for case, (_, algorithm) in FIRST.items()}


def test_a_lora_is_merged_before(tiny: Any, export: Export, tmp_path: Path) -> None:
    """The int8 weights are those of the merged checkpoint; what stays FLOAT cannot change."""
    checkpoint, layer = tiny("t2v-1.3B"), "blocks.1.ffn.0"
    weight = load_file(checkpoint / "diffusion_pytorch_model.safetensors")[f"{layer}.weight"]
    down, up = make_pair(weight.shape, rank=2)
    pair = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
    save_file(pair, tmp_path / "lora.safetensors")
    loras = [f"{tmp_path / 'lora.safetensors'}=0.5"]
    exported = load_file(quantize_checkpoint(checkpoint, tmp_path / "out", lora=loras) / WEIGHTS)
    plain = load_file(export() / WEIGHTS)
    payload, scale = quantize_per_token((weight + 0.5 * up.double() @ down.double()).float())
    changed = {f"{layer}.weight": payload, f"{layer}.weight_scale": scale}
    assert not torch.equal(plain[f"{layer}.weight"], payload)
    assert exported.keys() == plain.keys()
    assert all(torch.equal(exported[name], x) for name, x in (plain | changed).items())
    save_file({"blocks.0.norm3.diff": torch.ones(96)}, tmp_path / "norm.safetensors")
    loras = [str(tmp_path / "norm.safetensors")]
    message = get_refusal(quantize_checkpoint, checkpoint, tmp_path / "more", lora=loras)
    assert "changes blocks.0.norm3.weight, which is not quantised" in message


# --- loading


def load_dit(checkpoint: Path, folder: Path | None, precision: str = "fp32") -> WanModel:
    options = {} if folder is None else {"quant_dit_path": folder}
    return build_cpu_pipeline("t2v-1.3B", checkpoint, precision=precision, **options).experts.get(
        "dit"
    )


def compute_velocity(model: WanModel) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(model.in_dim, 2, 8, 8, generator=generator)
    text = torch.randn(9, model.text_dim, generator=generator)
    with torch.inference_mode():
        return model([x], torch.tensor([700.0]), [text], 32)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_network_is_the_float_network_with_rounded_weights(
    precision: str, tiny: Any, export: Export
) -> None:
    plain, model = (load_dit(tiny("t2v-1.3B"), f, precision) for f in (None, export()))
    quantised = {n for n, module in model.named_modules() if isinstance(module, W8A8Linear)}
    assert quantised == {f"blocks.{block}.{layer}" for block in range(2) for layer in LAYERS}
    parameters = dict(model.named_parameters())
    for name, tensor in plain.named_parameters():
        if name.rpartition(".")[0] not in quantised:
            assert torch.equal(parameters.pop(name), tensor) and not tensor.requires_grad
    assert not parameters and not model.training
    expected, out = compute_velocity(plain), compute_velocity(model)
    assert 1e-4 < (out - expected).norm() / expected.norm() < 0.02


def test_float_weights_of_quantised_layers_are_not_read(
    tiny: Any, export: Export, tmp_path: Path
) -> None:
    """They may be anything: with NaN in their place the network computes the same."""
    checkpoint = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "nan"))
    expected = compute_velocity(load_dit(checkpoint, export()))
    file = checkpoint / "diffusion_pytorch_model.safetensors"
    names = load_file(export() / WEIGHTS).keys()
    tensors = load_file(file)
    save_file({n: t * float("nan") if n in names else t for n, t in tensors.items()}, file)
    assert torch.equal(compute_velocity(load_dit(checkpoint, export())), expected)
    assert compute_velocity(load_dit(checkpoint, None)).isnan().any()


def test_whole_run(tiny: Any, export: Export) -> None:
    """Both experts, the text cache, --convert_model_dtype: latents close to the float run's."""
    flags = ("--convert_model_dtype", "--frame_num", "1", "--sample_steps", "2")
    flags += ("--boundary_step", "1", "--size", "32*32")
    folder, quantised = tiny("t2v-A14B"), ("--quant_dit_path", str(export("t2v-A14B")))
    argv = ("--task", "t2v-A14B", *flags)
    expected, out = (generate_quick_latents(folder, *argv, *more) for more in ((), quantised))
    assert 1e-4 < (out - expected).norm() / expected.norm() < 0.05
