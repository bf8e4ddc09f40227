"""A checkpoint's DiTs in bfloat16: the same bits of a run, half the bytes, and interruptions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pipelines import on_cpu
from tools import convert_checkpoint as tool
from wan.checkpoint.layout import describe
from wan.checkpoint.load import mapped


def predicted(task: str, folder: Path, expert: str) -> torch.Tensor:
    network = on_cpu(task, folder, precision="bf16").experts.get(expert)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(network.in_dim, 2, 4, 6, generator=generator)
    text = torch.randn(9, network.text_dim, generator=generator)
    with torch.no_grad():
        return network([x], torch.tensor([400.0]), [text], 12)[0]


def in_float32(folder: Path, copy: Path) -> Path:
    """A checkpoint as the official ones are stored."""
    shutil.copytree(folder, copy)
    for dit in describe(copy).experts.values():
        for file in {info.file for info in dit.tensors.values()}:
            save_file({name: x.float() for name, x in load_file(file).items()}, file)
    return copy


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_the_same_bits_from_half_the_bytes(layout: str, tiny, tmp_path: Path) -> None:
    source, out = in_float32(tiny("t2v-A14B", layout), tmp_path / "fp32"), tmp_path / "bf16"
    assert tool.main(["--ckpt_dir", str(source), "--out", str(out)]) == 0
    names = sorted(path.relative_to(source) for path in source.rglob("*"))
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == names
    before, after = describe(source), describe(out)
    for name in before.experts:
        infos = after.experts[name].tensors.values()
        assert {info.dtype for info in infos} == {"BF16", "F32"}
        assert all(info.dtype == "BF16" for info in infos if info.name.endswith("ffn.0.weight"))
        assert torch.equal(*(predicted("t2v-A14B", f, name) for f in (source, out)))
    large = sum(info.nbytes for info in before.experts[name].tensors.values())
    assert sum(info.nbytes for info in infos) < 0.7 * large


def test_an_interruption_is_gone_on_from(tiny, tmp_path: Path, monkeypatch) -> None:
    source, out = tiny("t2v-A14B"), tmp_path / "bf16"
    real, written = tool.write, []

    def interrupted(path: Path, *args: object) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        real(path, *args)  # type: ignore[arg-type]

    arguments = ["--ckpt_dir", str(source), "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(tool, "write", interrupted)
        assert tool.main(arguments) == 130
    (mark,) = out.glob(tool.UNFINISHED)
    (first,) = (path for path in out.rglob("*.safetensors") if "model" in path.parent.name)
    times, content = first.stat().st_mtime_ns, load_file(first)
    assert tool.main(arguments) == 0
    assert first.stat().st_mtime_ns == times and load_file(first).keys() == content.keys()
    assert not mark.exists() and describe(out).experts.keys() == describe(source).experts.keys()


def published_file(folder: Path, expert: str, file: Path) -> Path:
    """One expert as rCM and TurboDiffusion publish it."""
    sources = mapped(describe(folder).experts[expert].tensors)
    state = {f"net.{name}": source.read(slice(None)).float() for name, source in sources.items()}
    state["net.patch_embedding.weight"] = state["net.patch_embedding.weight"].flatten(1)
    state["net.blocks.0.self_attn.attn_op.local_attn.proj_l.weight"] = torch.ones(16, 16)
    torch.save(state, file)
    return file


def test_networks_of_pth_files(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, out = tiny("t2v-A14B"), tmp_path / "TurboWan2.2-T2V-A14B"
    given = {  # the other way round, so that it is seen whose weights these are
        name: published_file(base, other, tmp_path / f"{name}.pth")
        for name, other in (("high_noise", "low_noise"), ("low_noise", "high_noise"))
    }
    networks = [word for name, file in given.items() for word in (f"--{name}", str(file))]
    assert tool.main(["--ckpt_dir", str(base), "--out", str(out), *networks]) == 0
    for name, other in (("high_noise", "low_noise"), ("low_noise", "high_noise")):
        assert torch.equal(predicted("t2v-A14B", out, name), predicted("t2v-A14B", base, other))
    (tmp_path / "again").mkdir()
    arguments = ["--ckpt_dir", str(base), "--out", str(tmp_path / "again")]
    assert tool.main([*arguments, *networks[:2]]) == 2
    assert "are given by --high_noise and --low_noise" in capfd.readouterr().err
    torch.save(torch.load(given["low_noise"]) | {"net.more": torch.ones(1)}, given["low_noise"])
    assert tool.main([*arguments, *networks]) == 2
    assert "low_noise.pth has more, unlike" in capfd.readouterr().err
    shutil.copy(given["low_noise"], tmp_path / "again")
    assert tool.main(["--ckpt_dir", str(tmp_path / "again"), "--out", str(out)]) == 2
    assert "convert it with tools/convert_checkpoint.py" in capfd.readouterr().err


def test_what_is_refused(tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("x")
    for out in (tmp_path, tmp_path / "taken"):
        assert tool.main(["--ckpt_dir", str(tiny("t2v-1.3B")), "--out", str(out)]) == 2
        assert "no unfinished conversion of this checkpoint; name" in capfd.readouterr().err
    given = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--out", str(tmp_path / "new")]
    for argv, part in (
        ([], "required"),
        ([*given, "--colour", "red"], "--colour is not a known flag"),
        ([*given, "--dit", str(tmp_path / "none.pth")], "does not exist"),
    ):
        assert tool.main(argv) == 2
        assert part in capfd.readouterr().err
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / tool.UNFINISHED).write_text('{"from": "another", "dtype": "bf16"}')
    assert tool.main(["--ckpt_dir", str(tiny("t2v-1.3B")), "--out", str(begun)]) == 2
    assert tool.main(["--ckpt_dir", str(tmp_path / "no"), "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists() and os.listdir(begun) == [tool.UNFINISHED]


def test_broken_weights_are_named(tiny, tmp_path: Path, capfd) -> None:
    """NaN, and tensors of a .pth that have no values."""
    folder = shutil.copytree(tiny("t2v-1.3B"), tmp_path / "checkpoint")
    (file,) = folder.glob("diffusion*.safetensors")
    weights = load_file(file)
    argv = ["--ckpt_dir", str(folder), "--out", str(tmp_path / "new")]
    meta = {name: value.to("meta") for name, value in weights.items()}
    torch.save(meta, tmp_path / "x.pth")
    assert tool.main([*argv, "--dit", str(tmp_path / "x.pth")]) == 2
    assert "something other than weights (" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()
    weights["blocks.0.ffn.0.bias"][0] = float("nan")
    save_file(weights, file)
    assert tool.main(argv) == 2
    assert f"{file}: blocks.0.ffn.0.bias holds NaN or infinity" in capfd.readouterr().err
