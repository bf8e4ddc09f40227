"""LoRAs chosen by requests: which may be named, their jobs, and the videos of two ranks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.pipelines import resolve_argv
from tests.refusals import check_refusals
from tests.serve.jobs import IdleRanks, Jobs
from wan.serve.queue.service import Limits
from wan.serve.ranks import __main__ as ranks

WIDTH = 240  # of the tiny A14B network
LAYER = "blocks.0.self_attn.q"
FLAGS = ["--size", "64*64", "--frame_num", "5", "--sample_steps", "2"]


def save_lora(path: Path, seed: int, strength: float = 0.05) -> Path:
    """Saves a LoRA of all attention layers of the tiny network."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for block in range(2):
        for name in ("self_attn.q", "self_attn.v", "self_attn.o", "cross_attn.v", "cross_attn.o"):
            layer = f"blocks.{block}.{name}"
            draw = torch.randn(2, WIDTH, 4, generator=generator)
            tensors[f"{layer}.lora_down.weight"] = draw[0].T.contiguous() * strength * 20
            tensors[f"{layer}.lora_up.weight"] = draw[1].contiguous() * strength
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of LoRAs: two good ones, one for an expert, and a damaged one."""
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("a", "b", "c_high_noise")):
        save_lora(folder / f"{name}.safetensors", seed)
    save_file({f"{LAYER}.diff": torch.zeros(WIDTH, WIDTH)}, folder / "whole.safetensors")
    (folder / "damaged.safetensors").write_bytes(b"no header")
    return folder


@pytest.fixture
def jobs(tmp_path: Path, tiny: Any, folder: Path) -> Jobs:
    flags = ["--ckpt_dir", str(tiny("t2v-A14B")), "--lora_folder", str(folder)]
    return Jobs(tmp_path / "jobs", Limits(batch_size=1), flags=flags)


async def test_the_list(jobs: Jobs, folder: Path) -> None:
    status, _, answer = await jobs.request("/v1/loras")
    assert (status, answer["object"]) == (200, "list")
    loras = {lora.pop("name"): lora for lora in answer["data"]}
    assert [*loras] == ["a", "b", "c_high_noise", "damaged", "whole"]
    content = (folder / "a.safetensors").read_bytes()
    assert loras["a"] == {
        "bytes": len(content),
        "experts": ["high_noise", "low_noise"],
        "kind": "LoRA",
        "sha256": hashlib.sha256(content).hexdigest(),
        "error": None,
    }
    assert loras["c_high_noise"]["experts"] == ["high_noise"]
    assert "difference of whole weights" in loras["whole"]["error"]
    assert "damaged" in loras["damaged"]["error"]
    assert str(folder) not in json.dumps(answer)


async def test_without_a_folder(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs")
    assert (await jobs.request("/v1/loras"))[2] == {"object": "list", "data": []}
    error = await jobs.refuse({"lora": {"name": "a"}})
    assert error["param"] == "lora" and "--lora_folder" in error["message"]


async def test_refused_before_queueing(jobs: Jobs, folder: Path) -> None:
    values: dict[str, Any] = {
        "unknown": "nothing",
        "another folder": "../a",
        "a path": str(folder / "a.safetensors"),
        "a key for paths": {"name": "a", "path": "/x"},
        "a scale": {"name": "a", "scale": "much"},
        "an expert": {"name": "c_high_noise", "expert": "low_noise"},
        "both experts": {"name": "c_high_noise", "expert": "both"},
        "whole weights": {"name": "whole"},
        "damaged": {"name": "damaged"},
    }
    sentences = {}
    for case, value in values.items():
        for key in ("lora", "loras"):
            error = await jobs.refuse({key: value})
            assert error["param"] == key, (case, error)
        sentences[case] = error["message"]
    check_refusals("LoRAs of requests", sentences)
    assert not jobs.service.journal.count_states()
    assert not [*(jobs.folder / "jobs").iterdir()]


async def test_every_form_is_the_same_job(jobs: Jobs) -> None:
    for field, value in (
        ("lora", {"name": "a", "scale": 0.5}),
        ("lora", {"lora_name": "a", "lora_scale": 0.5, "int_id": 3}),
        ("loras", [{"adapter": "a", "scale": "0.5", "expert": None}]),
        ("video_lora", ["a=0.5"]),
        ("extra_body", {"lora": '{"name": "a", "scale": 0.5}'}),
    ):
        name = await jobs.create({field: value})
        settings = jobs.service.find_job(name).settings
        assert settings["video_lora"] == [{"name": "a", "scale": 0.5}], value
        assert (await jobs.get_video(name))["lora"] == settings["video_lora"]


async def test_jobs_of_the_same_loras_follow_each_other(jobs: Jobs) -> None:
    """As jobs of one size do; a remix has the LoRAs of its video."""
    idle_ranks: Any = IdleRanks()
    jobs.service.rank_group = idle_ranks
    chosen = ["a", "b", "a=0.5", "b", "a", "", "a"]
    names = [await jobs.create({"video_lora": [x] if x else []}) for x in chosen]
    started = []
    while jobs.service.journal.count_states()["in_progress"]:
        started.append(idle_ranks.job_groups[-1][0]["job"])
        jobs.complete(started[-1])
    order = [chosen[names.index(name)] for name in started]
    assert order == ["a", "a", "a", "b", "b", "a=0.5", ""]
    remix = await jobs.remix(names[0])
    assert remix["lora"] == [{"name": "a", "scale": 1.0}]
    assert idle_ranks.job_groups[-1][0]["settings"]["video_lora"] == remix["lora"]


def test_ranks_compare_the_content(tmp_path: Path, tiny: Any) -> None:
    """Folders with the same names on two machines, and other content, are different runs."""
    hashes = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        save_lora(folder / "a.safetensors", seed)
        argv = ["--ckpt_dir", tiny("t2v-A14B"), *FLAGS, "--lora_folder", folder, "--base_seed", 1]
        hashes.append(ranks._hash_run(resolve_argv([*argv, "--video_lora", "a"])))
    assert hashes[0] == hashes[1] != hashes[2]
