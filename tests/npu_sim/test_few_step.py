"""LoRAs, recipes of few steps and image networks on a simulated NPU, on one rank and several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.dist import run
from tests.npu_sim import checkpoint
from tests.npu_sim.latents import latents, on_cpu
from tests.npu_sim.oracles import far

pytestmark = pytest.mark.dist

RANKS = {1: [], 2: ["--ulysses_size", "2", "--comm_type", "1"]}
COMMON = ["--device", "npu", "--base_seed", "7", "--size", "128*96", "--frame_num", "5"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint of four heads, a --lora_dir, and the checkpoint with it merged in float64."""
    folder, loras, merged = (tmp_path_factory.mktemp(name) for name in ("plain", "lora", "merged"))
    plain = checkpoint.make(folder / "checkpoint", heads=4)
    shutil.copytree(plain, merged, dirs_exist_ok=True)
    for seed, expert in enumerate(("high_noise", "low_noise")):
        generator, pairs = torch.Generator().manual_seed(seed), {}
        for file in (merged / f"{expert}_model").glob("*.safetensors"):
            state = load_file(file)
            for name, weight in state.items():
                layer = name.removesuffix(".weight")
                if layer == name or weight.dim() != 2 or not layer.startswith("blocks."):
                    continue
                up, down = (torch.randn(n, 8, generator=generator) / 10 for n in weight.shape)
                pairs |= {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down.T}
                state[name] = (weight.double() + up.double() @ down.double().T).to(weight.dtype)
            save_file(state, file)
        contiguous = {name: tensor.contiguous() for name, tensor in pairs.items()}
        save_file(contiguous, loras / f"{expert}_model.safetensors")
    return plain, loras, merged


@pytest.mark.parametrize(("recipe", "ranks"), [("lightning-4step", 2), ("rcm-4step", 1)])
def test_a_lora_is_as_if_merged_beforehand(
    recipe: str, ranks: int, adapted: tuple[Path, Path, Path]
) -> None:
    plain, loras, merged = adapted
    asked = ["--task", "t2v-A14B", *COMMON, "--recipe", recipe, *RANKS[ranks]]
    found = run(ranks, latents, [*asked, "--ckpt_dir", str(plain), "--lora_dir", str(loras)], "A2")
    want = run(ranks, latents, [*asked, "--ckpt_dir", str(merged)], "A2")
    without = run(ranks, latents, [*asked, "--ckpt_dir", str(plain)], "A2")
    assert torch.equal(found[0], want[0]) and all(torch.equal(found[0], x) for x in found)
    assert far(without[0], want[0]) > 1e-2


@pytest.mark.parametrize("task", ["i2v-14B", "flf2v-14B"])
def test_networks_that_look_at_images(task: str, tmp_path: Path) -> None:
    folder, images = checkpoint.make(tmp_path / "checkpoint", task, heads=4), []
    for name in ("image", "last_image")[: 1 if task == "i2v-14B" else 2]:
        Image.effect_noise((128, 96), 80).convert("RGB").save(tmp_path / f"{name}.png")
        images += [f"--{name}", str(tmp_path / f"{name}.png")]
    asked = ["--task", task, "--ckpt_dir", str(folder), *COMMON, "--sample_steps", "2", *images]
    cpu = on_cpu(asked)
    for ranks, flags in RANKS.items():
        found = run(ranks, latents, [*asked, *flags], "A2")
        assert all(torch.equal(found[0], other) for other in found)
        assert far(found[0], cpu) < 1e-2
