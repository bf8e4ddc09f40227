"""A long video by the service: it continues after its last clip when a rank is lost."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.dist import REPO
from tests.serve.serving import Served, frames, generated

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("serve"), pytest.mark.slow]
STAR = REPO / "examples" / "star.png"
WAYS = [f"a large yellow star moves {way} on a gray background" for way in ("left", "right") * 3]


def test_a_lost_rank_between_clips(tmp_path: Path) -> None:
    image = "data:image/png;base64," + base64.b64encode(STAR.read_bytes()).decode()
    asked = {"chain": "latent", "prompt": WAYS, "seed": 3, "input_reference": image}
    flags = ["--task", "i2v-A14B", "--comm_type", 1]
    with Served(tmp_path / "jobs", 2, flags=flags) as served:
        told = served.ask("/v1/videos", asked | {"num_frames": 9, "num_inference_steps": 8})[2]
        folder = served.folder / "jobs" / told["id"]
        served.wait((folder / "video.clips" / "0002.safetensors").exists, 90)
        os.kill(served.ranks()[-1], signal.SIGKILL)
        ended = served.ended(told["id"])
        assert (ended["status"], ended["attempt"]) == ("completed", 2)
        assert "of 6 clips are in" in (served.folder / "ranks.log").read_text()
        assert not (folder / "video.clips").exists()
        refused = served.ask("/v1/videos", asked | {"clips": 3})
        assert refused[0] == 400 and "number of prompt" in refused[2]["error"]["message"]
    own = ["--task", "i2v-A14B", "--image", STAR, "--frame_num", 9, "--sample_steps", 8]
    own += ["--chain", "latent", "--base_seed", 3, "--clip_prompts", *WAYS]
    plain, made = generated(tmp_path / "plain.mp4", *own), frames(folder / "video.mp4")
    assert made.shape[0] == 9 + 5 * 4
    assert np.abs(made.astype(int) - plain).max() <= 2
