"""`wan.Video`: what `generate` returns is a tensor, and a notebook shows it as a player."""

from __future__ import annotations

import copy
import io
import re
from base64 import b64decode
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from torch import Tensor

import wan
from tests.conftest import Tiny
from tests.refusals import get_refusal

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"size": (32, 32), "frame_num": 5, "sampling_steps": 3, "seed": 1}


def test_a_generated_video(tiny: Tiny, tmp_path: Path) -> None:
    model = wan.WanT2V("t2v-1.3B", tiny("t2v-1.3B"))
    steps: list[tuple[int, Tensor]] = []
    video = model.generate(
        "a", **SMALL, callback_on_step_end=lambda done, latents: steps.append((done, latents))
    )
    assert isinstance(video, wan.Video) and video.fps == model.config.sample_fps == 16
    latents = model.generate("a", **SMALL, output_type="latent")
    assert type(latents) is Tensor and [done for done, _ in steps] == [1, 2, 3]
    assert torch.equal(steps[-1][1].cpu(), latents.cpu())
    assert "callback_on_step_end" in (wan.WanT2V.generate.__doc__ or "")
    assert "no function" in get_refusal(model.generate, "a", callback_on_step_end=1)

    match = re.search(r'src="data:video/mp4;base64,([^"]+)"', video._repr_html_())
    (tmp_path / "shown.mp4").write_bytes(b64decode(match[1]))
    wan.save_video(video, tmp_path / "saved.mp4", fps=16)
    shown, saved = (iio.imread(tmp_path / f"{name}.mp4") for name in ("shown", "saved"))
    assert shown.shape == (5, 32, 32, 3) and np.array_equal(shown, saved)


def test_operations_give_plain_tensors() -> None:
    values = torch.linspace(-1, 1, 3 * 2 * 4 * 4).view(3, 2, 4, 4)
    video = wan.Video.from_tensor(values.clone(), 24)
    results = [
        video + 1,
        video[:, 0],
        torch.cat([video, video], 1),
        video.bfloat16(),
        video.clone(),
    ]
    results += [*video.unbind(1), video.permute(1, 0, 2, 3), torch.nn.functional.relu(video)]
    expected = [values + 1, values[:, 0], torch.cat([values, values], 1), values.bfloat16(), values]
    expected += [*values.unbind(1), values.permute(1, 0, 2, 3), values.relu()]
    for result, plain in zip(results, expected, strict=True):
        assert type(result) is Tensor and torch.equal(result, plain)
    assert isinstance(video, Tensor) and torch.equal(video, values)
    assert np.array_equal(np.asarray(video), values.numpy())
    video.mul_(0.5)
    assert torch.equal(video, values * 0.5) and repr(video)
    file = io.BytesIO()
    torch.save(video, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), video)
    twin = copy.deepcopy(video)
    assert isinstance(twin, wan.Video) and twin.fps == 24 and torch.equal(twin, video)
    assert twin.data_ptr() != video.data_ptr()
