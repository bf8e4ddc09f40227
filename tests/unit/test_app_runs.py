"""Runs: the memory that decoding needs, and the settings that differ from stored ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.pipelines import resolve_argv
from tests.refusals import get_refusal
from wan.app import resolve
from wan.app.run import list_changed_settings


def test_decoding_needs_memory_for_the_size_of_the_latents(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(resolve, "check_memory", lambda *call: calls.append(call))
    path = tmp_path / "x.latents.safetensors"
    settings = json.dumps({"task": "i2v-A14B", "ckpt_dir": str(tiny("i2v-A14B"))})
    save_file({"latents": torch.zeros(16, 1, 12, 6)}, path, {"settings": settings, "format": "pt"})
    resolve_argv(["--decode_latents", path, "--save_file", tmp_path / "v.mp4"])
    ((_, params, _, stage),) = calls
    assert params.size == (48, 96) and stage == "decoding"
    for name, value in (("WORLD_SIZE", 2), ("RANK", 0), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    argv = ["--decode_latents", path, "--save_file", tmp_path / "v.mp4"]
    assert "runs on one process, but 2 were started" in get_refusal(resolve_argv, argv)
    resolve_argv([*argv, "--vae_parallel"])


def test_settings_that_an_earlier_version_did_not_store() -> None:
    """They count as default, or as not given."""
    for current, stored, changed in (
        ({"guider": "cfg"}, {}, []),
        ({"guider": None}, {}, []),
        ({"guider": "apg"}, {}, ["guider"]),
        ({"guider": "apg"}, {"guider": "cfg"}, ["guider"]),
        ({}, {"guider": "cfg"}, ["guider"]),
    ):
        assert list_changed_settings(current, stored) == changed, (current, stored)
