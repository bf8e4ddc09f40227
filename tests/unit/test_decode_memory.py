"""The free memory of a run that decodes latents is that of the latents' size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.pipelines import resolve_argv
from wan.app import resolve


def test_decoding_needs_memory_for_the_size_of_the_latents(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(resolve, "check_memory", lambda *call: calls.append(call))
    path = tmp_path / "x.latents.safetensors"
    settings = json.dumps({"task": "t2v-1.3B", "ckpt_dir": str(tiny("t2v-1.3B"))})
    save_file({"latents": torch.zeros(16, 1, 12, 6)}, path, {"settings": settings, "format": "pt"})
    resolve_argv(["--decode_latents", path, "--save_file", tmp_path / "v.mp4"])
    ((_, params, _, stage),) = calls
    assert params.size == (48, 96) and stage == "decoding"
