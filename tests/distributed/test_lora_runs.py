"""Whole runs with LoRAs, FP8 and GGUF files, against merged or upcast checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import slow
from tests.distributed import test_runs
from tests.distributed.test_runs import QUICK
from tools.gguf_files import make_gguf_folders
from wan.testing.random_checkpoint import make_checkpoint

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("torchrun")]  # it takes no pools
EXPERTS = ("high_noise", "low_noise")


def weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def adapted(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A --lora_dir, and a checkpoint (fp32 files) into which it was merged in float64."""
    folder, loras = (tmp_path_factory.mktemp(name) for name in ("merged", "loras"))
    shutil.copytree(tiny("t2v-A14B"), folder, dirs_exist_ok=True)
    for seed, expert in enumerate(EXPERTS):
        generator = torch.Generator().manual_seed(seed)
        state, tensors = weights(folder / f"{expert}_model"), {}
        for name, weight in state.items():
            layer = name.removesuffix(".weight")
            if not layer.startswith("blocks.") or weight.dim() != 2 or layer == name:
                continue
            down = torch.randn(4, weight.shape[1], generator=generator) / 30
            up = torch.randn(weight.shape[0], 4, generator=generator) / 30
            key = f"diffusion_model.{layer}"
            tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
            tensors[f"{key}.alpha"] = torch.tensor(2.0)
            state[name] = (weight.double() + 0.5 * up.double() @ down.double()).float()
        for file in (folder / f"{expert}_model").glob("diffusion_pytorch_model*"):
            file.unlink()
        save_file({n: t.float() for n, t in state.items()}, _single(folder, expert))
        save_file(tensors, loras / f"{expert}_model.safetensors")
    return loras, folder


def _single(folder: Path, expert: str) -> Path:
    return folder / f"{expert}_model" / "diffusion_pytorch_model.safetensors"


def make_latents(ranks: int, arguments: list[str], out: Path) -> Tensor:
    return test_runs.make_latents(ranks, arguments, out)[0]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        slow(1, ""),
        slow(2, "--comm_type 1 --dit_fsdp"),
        slow(4, "--cfg_size 2 --offload_model true"),
        slow(2, "--offload_model block --ring_size 2"),
    ],
)
def test_a_lora_is_as_if_merged_beforehand(
    ranks: int, flags: str, adapted: tuple[Path, Path], tiny: Any, tmp_path: Path
) -> None:
    """With the recipe of four steps, also with sharded or offloaded weights."""
    loras, merged = adapted
    recipe = [*QUICK, "--recipe", "lightning-4step"]
    if "cfg" in flags:
        recipe += ["--sample_guide_scale", "3"]
    actual = make_latents(
        ranks,
        ["--ckpt_dir", str(tiny("t2v-A14B")), "--lora_dir", str(loras), *recipe, *flags.split()],
        tmp_path / "v.mp4",
    )
    expected = make_latents(1, ["--ckpt_dir", str(merged), *recipe], tmp_path / "merged.mp4")
    assert (actual - expected).abs().max() <= 1e-5
    plain = make_latents(1, ["--ckpt_dir", str(tiny("t2v-A14B")), *recipe], tmp_path / "plain.mp4")
    assert (plain - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        slow(2, "--comm_type 1 --dit_fsdp"),
        slow(4, "--cfg_size 2 --ring_size 2 --offload_model block"),
    ],
)
def test_other_kinds_than_pairs(ranks: int, flags: str, tiny: Any, tmp_path: Path) -> None:
    """LoHa, LoKr, GLoRA and DoRA, also of columns, whose norms need rows of all ranks."""
    folder, generator = tiny("t2v-1.3B"), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 10

    tensors, path = {}, tmp_path / "x.safetensors"
    for name, weight in weights(folder).items():
        layer, rows, columns = name.removesuffix(".weight"), len(weight), weight[0].numel()
        if weight.dim() != 2 or not name.startswith("blocks.") or layer == name:
            continue
        if "ffn" in name:
            tensors |= {f"{layer}.lokr_w1": draw(3, 4)}
            tensors |= {f"{layer}.lokr_w2_a": draw(rows // 3, 2)}
            tensors |= {f"{layer}.lokr_w2_b": draw(2, columns // 4)}
        elif "cross_attn" in name:
            tensors |= {f"{layer}.a1.weight": draw(columns, 2), f"{layer}.b1.weight": draw(rows, 2)}
            tensors |= {f"{layer}.{x}.weight": draw(2, columns) for x in ("a2", "b2")}
        else:
            for number in (1, 2):
                tensors |= {f"{layer}.hada_w{number}_a": draw(rows, 2)}
                tensors |= {f"{layer}.hada_w{number}_b": draw(2, columns)}
        if layer.endswith(("self_attn.q", "ffn.0")):
            axis = layer.endswith(".q")
            norms = weight.float().norm(dim=int(not axis), keepdim=True)
            tensors[f"{layer}.dora_scale"] = norms * (1 + draw(*norms.shape))
    save_file(tensors, path)
    arguments = [*QUICK, "--task", "t2v-1.3B", "--ckpt_dir", str(folder), "--sample_steps", "2"]
    plain = make_latents(1, arguments, tmp_path / "plain.mp4")
    arguments += ["--lora", str(path)]
    single_latents = make_latents(1, arguments, tmp_path / "alone.mp4")
    actual = make_latents(ranks, [*arguments, *flags.split()], tmp_path / "v.mp4")
    assert (actual - single_latents).abs().max() <= 1e-4
    assert (plain - single_latents).abs().max() > 1e-2


@pytest.fixture(scope="module")
def scaled(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in ComfyUI's scaled FP8, and the float32 checkpoint of the same values."""
    fp8, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "plain"))
    for folder in (fp8, plain):
        shutil.copytree(tiny("t2v-A14B"), folder, dirs_exist_ok=True)
        for expert in EXPERTS:
            shutil.rmtree(folder / f"{expert}_model")
    for expert in EXPERTS:
        fp8_state, float_state = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, {}
        for name, tensor in weights(tiny("t2v-A14B") / f"{expert}_model").items():
            key = f"model.diffusion_model.{name}"
            if not name.startswith("blocks.") or tensor.dim() != 2 or "weight" not in name:
                fp8_state[key] = float_state[name] = tensor.float()
                continue
            scale = tensor.float().abs().max() / 448
            values = (tensor.float() / scale).to(torch.float8_e4m3fn)
            layer = key.removesuffix(".weight")
            fp8_state |= {
                key: values,
                f"{layer}.scale_weight": scale,
                f"{layer}.scale_input": scale,
            }
            float_state[name] = values.float() * scale
        name = f"wan2.2_t2v_{expert}_14B_fp8_scaled.safetensors"
        save_file({key: value.clone() for key, value in fp8_state.items()}, fp8 / name)
        save_file(float_state, plain / name)
    for folder in (fp8, plain):  # such files have no config; the default is 128 channels a head
        source = tiny("t2v-A14B") / "high_noise_model" / "config.json"
        shutil.copy(source, folder / "config.json")
    return fp8, plain


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        slow(1, "--fp8_weights keep"),
        slow(1, "--fp8_weights upcast"),
        slow(1, ""),
        slow(2, "--dit_fsdp --comm_type 1"),
    ],
)
def test_scaled_fp8_files(
    ranks: int, flags: str, scaled: tuple[Path, Path], tmp_path: Path
) -> None:
    """Weights kept in FP8 or upcast give the latents of the same values in float32."""
    fp8, plain = scaled
    arguments = [*QUICK, "--sample_steps", "3"]
    actual = make_latents(
        ranks, ["--ckpt_dir", str(fp8), *arguments, *flags.split()], tmp_path / "v.mp4"
    )
    expected = make_latents(1, ["--ckpt_dir", str(plain), *arguments], tmp_path / "plain.mp4")
    if ranks == 1:
        assert torch.equal(actual, expected)
    assert (actual - expected).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [
        ("Q4_K", 1, "--gguf_weights keep"),
        ("Q8_0", 2, "--comm_type 1 --gguf_weights keep"),
        ("Q4_K", 2, "--dit_fsdp --comm_type 2"),
        ("Q8_0", 4, "--cfg_size 2 --ring_size 2 --offload_model block"),
    ],
)
def test_gguf_files(ranks: int, flags: str, kind: str, wide_gguf: Any, tmp_path: Path) -> None:
    """With and without a LoRA: the latents of the dequantized values, merged in float64."""
    files, plain, lora, merged = wide_gguf(kind)
    arguments = [*QUICK, "--task", "t2v-1.3B", "--sample_steps", "2"]
    for folder, lora_arguments in ((plain, []), (merged, ["--lora", f"{lora}=0.5"])):
        rank_arguments = ["--ckpt_dir", str(files), *arguments, *lora_arguments, *flags.split()]
        actual = make_latents(ranks, rank_arguments, tmp_path / "v.mp4")
        expected = make_latents(1, ["--ckpt_dir", str(folder), *arguments], tmp_path / "plain.mp4")
        bound = 1e-4 if ranks > 1 else 1e-5 * expected.abs().max()
        assert (actual - expected).abs().max() <= bound


@pytest.fixture(scope="module")
def wide_gguf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """wide_gguf(kind): GGUF files, their values as a checkpoint, a LoRA, the merged checkpoint."""
    base, folders_by_kind = tmp_path_factory.mktemp("gguf"), {}
    sizes = {"dim": 768, "ffn_dim": 1024, "num_layers": 2}
    source = make_checkpoint("t2v-1.3B", base / "source", sizes=sizes)

    def make_folders(kind: str) -> tuple[Path, Path, Path, Path]:
        if kind not in folders_by_kind:
            files, plain = make_gguf_folders(source, kind, base / kind)
            merged, lora = base / kind / "merged", base / kind / "lora.safetensors"
            shutil.copytree(plain, merged)
            file = "diffusion_pytorch_model.safetensors"
            state, tensors = load_file(plain / file), {}
            generator = torch.Generator().manual_seed(4)
            for layer in (
                f"blocks.{n}.{name}" for n in (0, 1) for name in ("ffn.0", "self_attn.q")
            ):
                weight = state[f"{layer}.weight"]
                down = torch.randn(4, weight.shape[1], generator=generator) / 30
                up = torch.randn(len(weight), 4, generator=generator) / 30
                tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
                total = weight.double() + 0.5 * up.double() @ down.double()
                state[f"{layer}.weight"] = total.float()
            save_file(state, merged / file)
            save_file(tensors, lora)
            folders_by_kind[kind] = files, plain, lora, merged
        return folders_by_kind[kind]

    return make_folders
