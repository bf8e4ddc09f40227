"""The tiny checkpoints: the published file lists, and tensors that are the same in both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from tests.conftest import Tiny, slow
from tools import make_tiny_checkpoint
from wan.checkpoint.names import keymaps
from wan.settings.errors import InputError
from wan.testing import random_checkpoint as made_by
from wan.testing.random_checkpoint import make_checkpoint

LAYOUTS = ("official", "diffusers")
VAE = {"t2v-A14B": "2.1", "i2v-A14B": "2.1", "ti2v-5B": "2.2", "t2v-1.3B": "2.1"}
DITS = {  # folders, high noise first
    "official": {True: ("high_noise_model", "low_noise_model"), False: ("",)},
    "diffusers": {True: ("transformer", "transformer_2"), False: ("transformer",)},
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

EACH_TASK = pytest.mark.parametrize(
    "task", ["t2v-A14B", slow("i2v-A14B"), "ti2v-5B", slow("t2v-1.3B")]
)


@pytest.fixture(scope="session")
def tiny(usual_tiny: Any) -> Any:
    return usual_tiny


def relative_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def model_files(task: str, stem: str = "diffusion_pytorch_model") -> list[str]:
    if task == "t2v-1.3B":
        return ["config.json", f"{stem}.safetensors"]
    shards = [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    return ["config.json", f"{stem}.safetensors.index.json", *shards]


def expected_files(task: str, layout: str) -> set[str]:
    """Spec 3.1 and 3.2."""
    dits = DITS[layout]["A14B" in task]
    files = {str(Path(dit, file)) for dit in dits for file in model_files(task)}
    files.add("generation_config.json")
    if layout == "official":
        files |= {f"google/umt5-xxl/{file}" for file in TOKENIZER}
        files |= {"models_t5_umt5-xxl-enc-bf16.pth", f"Wan{VAE[task]}_VAE.pth"}
        return files | ({"configuration.json"} if "A14B" in task else set())
    files |= {f"text_encoder/{file}" for file in model_files("sharded", stem="model")}
    files |= {f"tokenizer/{file}" for file in TOKENIZER}
    files |= {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
    return files | {"model_index.json", "scheduler/scheduler_config.json"}


def safetensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder; an index must name exactly what its shards hold."""
    state, weight_map = {}, {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        state.update(tensors)
        weight_map.update(dict.fromkeys(tensors, file.name))
    for path in folder.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text())
        assert index["weight_map"] == weight_map
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    return state


def official_tensors(folder: Path, task: str, layout: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: "part/official name"."""
    if layout == "official":
        vae = torch.load(folder / f"Wan{VAE[task]}_VAE.pth", weights_only=True)
        t5 = torch.load(folder / "models_t5_umt5-xxl-enc-bf16.pth", weights_only=True)
    else:
        vae, t5 = (safetensors_in(folder / part) for part in ("vae", "text_encoder"))
        vae = {keymaps.rename_vae_to_official(k, VAE[task] == "2.2"): t for k, t in vae.items()}
        t5 = {keymaps.rename_t5_to_official(k): t for k, t in t5.items()}
    parts = {"vae": vae, "t5": t5}
    for number, dit in enumerate(DITS[layout]["A14B" in task]):
        state = safetensors_in(folder / dit)
        parts[f"dit{number}"] = {keymaps.rename_dit_to_official(k): t for k, t in state.items()}
    return {f"{part}/{k}": t for part, state in parts.items() for k, t in state.items()}


@pytest.mark.parametrize("task", [slow(task) if task == "i2v-A14B" else task for task in VAE])
def test_the_files_are_those_of_the_published_folder(tiny: Tiny, task: str):
    for layout in LAYOUTS:
        folder = tiny(task, layout)
        assert relative_files(folder) == expected_files(task, layout)
        assert sum(path.stat().st_size for path in folder.rglob("*")) < 40e6
        quick = json.loads((folder / "generation_config.json").read_text())
        assert quick == {"size": "128*128", "frame_num": 9, "sample_steps": 4}


@EACH_TASK
def test_both_layouts_hold_the_same_tensors(tiny: Tiny, task: str):
    official, other = (official_tensors(tiny(task, x), task, x) for x in LAYOUTS)
    assert official.keys() == other.keys()
    for name, tensor in official.items():
        expected_dtype = torch.float32 if name.startswith("vae/") else torch.bfloat16
        assert tensor.dtype == other[name].dtype == expected_dtype
        assert torch.equal(tensor, other[name]), name
    if "A14B" in task:
        assert not torch.equal(official["dit0/head.modulation"], official["dit1/head.modulation"])


@EACH_TASK
def test_diffusers_loads_its_folder(tiny: Tiny, task: str):
    """The library itself judges the layout, and finds no tensor missing or unknown."""
    folder = tiny(task, "diffusers")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    boundary = {"t2v-A14B": 0.875, "i2v-A14B": 0.9}.get(task)
    assert pipeline.config.boundary_ratio == boundary
    assert pipeline.config.expand_timesteps == (task == "ti2v-5B")
    assert type(pipeline).__name__.startswith("WanImage" if task == "i2v-A14B" else "WanPipeline")
    assert (pipeline.transformer_2 is None) == (boundary is None)
    assert pipeline.scheduler.config.flow_shift == (5.0 if task == "ti2v-5B" else 3.0)
    _, info = UMT5EncoderModel.from_pretrained(folder / "text_encoder", output_loading_info=True)
    assert not any(info.values())


def test_networks_have_outputs_of_the_size_of_noise(tiny: Tiny):
    """Neither vanishing nor saturated."""
    folder = tiny("t2v-1.3B", "diffusers")
    vae = diffusers.AutoencoderKLWan.from_pretrained(folder / "vae")
    dit = diffusers.WanTransformer3DModel.from_pretrained(folder / "transformer")
    generator = torch.Generator().manual_seed(0)
    x, text = (torch.randn(s, generator=generator) for s in ((1, 16, 2, 4, 4), (1, 512, 64)))
    std = torch.tensor(vae.config.latents_std).view(1, 16, 1, 1, 1)
    with torch.no_grad():
        out, video = dit(x, torch.tensor([500]), text).sample, vae.decode(x * std).sample
    assert 0.5 < out.std() < 2 and 0.1 < video.std() < 1
    assert (video.abs() >= 1).float().mean() < 0.15


def test_tokenizer(tiny: Tiny):
    folder = tiny("t2v-1.3B", "official") / "google" / "umt5-xxl"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    prompt = "Two cats (1 red) walk, 一只猫"
    batch = tokenizer(prompt, padding="max_length", truncation=True, max_length=512)
    ids, valid = batch.input_ids, sum(batch.attention_mask)
    assert len(ids) == 512 and ids[valid - 1 :] == [1] + [0] * (512 - valid)
    assert 2 not in ids and 4 < valid < 30
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    assert tokenizer("\N{SNOWMAN}").input_ids[-2:] == [2, 1]
    long = tokenizer("cat " * 600, padding="max_length", truncation=True, max_length=512).input_ids
    assert len(long) == 512 and long[-1] == 1
    tensors = official_tensors(tiny("t2v-1.3B", "official"), "t2v-1.3B", "official")
    assert len(tensors["t5/token_embedding.weight"]) == len(tokenizer)


def test_dtype_changes_no_value_and_seed_changes_all(tiny: Tiny, tmp_path: Path):
    bf16 = official_tensors(tiny("t2v-1.3B"), "t2v-1.3B", "official")
    (tmp_path / "fp32").mkdir()  # an empty folder is filled
    same = make_checkpoint("t2v-1.3B", tmp_path / "fp32", dtype="fp32")
    for name, tensor in official_tensors(same, "t2v-1.3B", "official").items():
        assert tensor.dtype == (torch.bfloat16 if name.startswith("t5/") else torch.float32)
        assert torch.equal(tensor, bf16[name].to(tensor.dtype)), name
    make_checkpoint("t2v-1.3B", tmp_path / "other", seed=1)
    tensors = official_tensors(tmp_path / "other", "t2v-1.3B", "official")
    assert not any(torch.equal(tensor, bf16[name]) for name, tensor in tensors.items())


def test_a_folder_with_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    (tmp_path / "file").touch()
    for out in (tmp_path / "full", tmp_path / "file"):
        with pytest.raises(InputError, match=f"{out} exists and is not empty"):
            make_tiny_checkpoint.main(["--task", "t2v-1.3B", "--out", str(out)])
    assert relative_files(tmp_path) == {"full/mine.txt", "file"}


def test_unknown_words_are_refused_with_the_known_ones(tmp_path: Path):
    for wrong in ({"task": "v2v-14B"}, {"layout": "comfy"}, {"dtype": "fp16"}):
        with pytest.raises(ValueError, match=r"unknown here; choose one of \w+"):
            make_checkpoint(**({"task": "t2v-A14B", "out": tmp_path / "x"} | wrong))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch):
    def interrupt(*_: object) -> None:
        assert relative_files(tmp_path), "interrupted too early to prove anything"
        raise KeyboardInterrupt

    monkeypatch.setattr(made_by, "write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint("t2v-1.3B", tmp_path / "tiny")
    assert not list(tmp_path.iterdir())
