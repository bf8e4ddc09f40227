"""A checkpoint's DiTs in bfloat16: runs with the same bits, half the bytes, interruptions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import slow
from tests.pipelines import build_cpu_pipeline
from tests.refusals import check_refusals
from tools import convert_checkpoint as tool
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources


def predict_velocity(task: str, folder: Path, expert: str) -> torch.Tensor:
    network = build_cpu_pipeline(task, folder, precision="bf16").experts.get(expert)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(network.in_dim, 2, 4, 6, generator=generator)
    text = torch.randn(9, network.text_dim, generator=generator)
    with torch.no_grad():
        return network([x], torch.tensor([400.0]), [text], 12)[0]


def convert_to_float32(folder: Path, copy: Path) -> Path:
    """Copy a checkpoint with DiTs in float32, as the official checkpoints are stored."""
    shutil.copytree(folder, copy)
    for dit in inspect_checkpoint(copy).experts.values():
        for file in {info.file for info in dit.tensors.values()}:
            save_file({name: x.float() for name, x in load_file(file).items()}, file)
    return copy


def test_links_of_a_checkpoint(tiny, tmp_path: Path, capsys) -> None:
    """Folders that are links are copied; a link to nothing, or to its own folder, is refused."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny("t2v-1.3B"), source)
    shutil.move(source / "google", tmp_path / "google")
    (source / "google").symlink_to(tmp_path / "google")
    for target in ("gone", "."):
        (source / "notes").symlink_to(target)
        assert tool.main(["--ckpt_dir", str(source), "--out", str(out)]) == 2
        assert f"{source}/notes is a link to " in capsys.readouterr().err and not out.exists()
        (source / "notes").unlink()
    assert tool.main(["--ckpt_dir", str(source), "--out", str(out)]) == 0
    files = {path.relative_to(tmp_path) for path in (tmp_path / "google").rglob("*.json")}
    assert files and all((out / path).is_file() for path in files)


@pytest.mark.parametrize("layout", ["official", slow("diffusers")])
def test_the_same_bits_from_half_the_bytes(layout: str, tiny, tmp_path: Path) -> None:
    source, out = convert_to_float32(tiny("t2v-A14B", layout), tmp_path / "fp32"), tmp_path / "bf16"
    assert tool.main(["--ckpt_dir", str(source), "--out", str(out)]) == 0
    names = sorted(path.relative_to(source) for path in source.rglob("*"))
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == names
    source_checkpoint, converted_checkpoint = inspect_checkpoint(source), inspect_checkpoint(out)
    for name in source_checkpoint.experts:
        infos = converted_checkpoint.experts[name].tensors.values()
        assert {info.dtype for info in infos} == {"BF16", "F32"}
        assert all(info.dtype == "BF16" for info in infos if info.name.endswith("ffn.0.weight"))
        assert torch.equal(*(predict_velocity("t2v-A14B", f, name) for f in (source, out)))
    large = sum(info.nbytes for info in source_checkpoint.experts[name].tensors.values())
    assert sum(info.nbytes for info in infos) < 0.7 * large


def test_a_conversion_resumes_after_an_interruption(tiny, tmp_path: Path, monkeypatch) -> None:
    source, out = tiny("t2v-A14B"), tmp_path / "bf16"
    write_file, written = tool.stream_safetensors, []

    def interrupt_second_file(path: Path, *args: object) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        write_file(path, *args)  # type: ignore[arg-type]

    arguments = ["--ckpt_dir", str(source), "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(tool, "stream_safetensors", interrupt_second_file)
        assert tool.main(arguments) == 130
    (mark,) = out.glob(tool.UNFINISHED)
    (first,) = (path for path in out.rglob("*.safetensors") if "model" in path.parent.name)
    time, names = first.stat().st_mtime_ns, load_file(first).keys()
    assert tool.main(arguments) == 0 and not mark.exists()
    assert first.stat().st_mtime_ns == time and load_file(first).keys() == names
    assert inspect_checkpoint(out).experts.keys() == inspect_checkpoint(source).experts.keys()


def write_published_file(folder: Path, expert: str, file: Path) -> Path:
    """One expert as rCM and TurboDiffusion publish it."""
    sources = open_sources(inspect_checkpoint(folder).experts[expert].tensors)
    state = {f"net.{name}": source.read(slice(None)).float() for name, source in sources.items()}
    state["net.patch_embedding.weight"] = state["net.patch_embedding.weight"].flatten(1)
    state["net.blocks.0.self_attn.attn_op.local_attn.proj_l.weight"] = torch.ones(16, 16)
    torch.save(state, file)
    return file


def test_networks_of_pth_files(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, out = tiny("t2v-A14B"), tmp_path / "TurboWan2.2-T2V-A14B"
    pth_files = {  # exchanged, to distinguish them from the weights of the base
        name: write_published_file(base, other, tmp_path / f"{name}.pth")
        for name, other in (("high_noise", "low_noise"), ("low_noise", "high_noise"))
    }
    networks = [
        argument for name, file in pth_files.items() for argument in (f"--{name}", str(file))
    ]
    assert tool.main(["--ckpt_dir", str(base), "--out", str(out), *networks]) == 0
    expected = predict_velocity("t2v-A14B", base, "low_noise")
    assert torch.equal(predict_velocity("t2v-A14B", out, "high_noise"), expected)
    (tmp_path / "again").mkdir()
    arguments = ["--ckpt_dir", str(base), "--out", str(tmp_path / "again")]
    messages = {"one of two": get_refusal([*arguments, *networks[:2]], capfd)}
    torch.save(
        torch.load(pth_files["low_noise"]) | {"net.more": torch.ones(1)}, pth_files["low_noise"]
    )
    messages["a tensor more"] = get_refusal([*arguments, *networks], capfd)
    shutil.copy(pth_files["low_noise"], tmp_path / "again")
    pth_arguments = ["--ckpt_dir", str(tmp_path / "again"), "--out", str(out)]
    messages["pth files in a folder"] = get_refusal(pth_arguments, capfd)
    check_refusals("tools: convert_checkpoint.py, pth files", messages)


def get_refusal(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert tool.main(argv) == 2
    return capfd.readouterr().err


def test_arguments_and_weights_that_are_refused(
    tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also broken weights: NaN, and meta tensors in a .pth file."""
    (tmp_path / "taken").write_text("x")
    started_folder = tmp_path / "begun"
    started_folder.mkdir()
    (started_folder / tool.UNFINISHED).write_text('{"from": "another", "dtype": "bf16"}')
    folder = shutil.copytree(tiny("t2v-1.3B"), tmp_path / "checkpoint")
    (file,) = folder.glob("diffusion*.safetensors")
    weights = load_file(file)
    torch.save({name: x.to("meta") for name, x in weights.items()}, tmp_path / "meta.pth")
    weights["blocks.0.ffn.0.bias"][0] = float("nan")
    save_file(weights, file)
    out = ["--out", str(tmp_path / "new")]
    checkpoint_flags = ["--ckpt_dir", str(tiny("t2v-1.3B"))]
    table = {
        "a folder with files": [*checkpoint_flags, "--out", str(tmp_path)],
        "a file": [*checkpoint_flags, "--out", str(tmp_path / "taken")],
        "begun of another": [*checkpoint_flags, "--out", str(started_folder)],
        "nothing": [],
        "another flag": [*checkpoint_flags, *out, "--colour", "red"],
        "no such network": [*checkpoint_flags, *out, "--dit", str(tmp_path / "none.pth")],
        "no such checkpoint": ["--ckpt_dir", str(tmp_path / "no"), *out],
        "no values": [*checkpoint_flags, *out, "--dit", str(tmp_path / "meta.pth")],
        "NaN": ["--ckpt_dir", str(folder), *out],
    }
    messages = {}
    for name, argv in table.items():
        messages[name] = get_refusal(argv, capfd)
        assert name == "NaN" or not (tmp_path / "new").exists(), name
    check_refusals("tools: convert_checkpoint.py", messages)
    assert os.listdir(started_folder) == [tool.UNFINISHED]
