"""A long video through the service: it goes on after its last clip where ranks are lost."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

import imageio
import numpy as np
import pytest

from tests.dist import GENERATE, REPO
from tests.serve.serving import Served

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("serve"), pytest.mark.slow]
STAR = REPO / "examples" / "star.png"
WAYS = [f"a large yellow star moves {way} on a gray background" for way in ("left", "right") * 3]


def test_a_lost_rank_between_clips(tmp_path: Path) -> None:
    served = Served(tmp_path / "jobs", 2, flags=["--task", "i2v-A14B", "--comm_type", 1])
    image = "data:image/png;base64," + base64.b64encode(STAR.read_bytes()).decode()
    asked = {"chain": "latent", "prompt": WAYS, "seed": 3, "input_reference": image}
    try:
        told = served.ask("/v1/videos", asked | {"num_frames": 9, "num_inference_steps": 8})[2]
        video = told["id"]
        clips = served.folder / "jobs" / video / "video.clips"
        served.wait((clips / "0002.safetensors").exists, 90)
        os.kill(served.ranks()[-1], signal.SIGKILL)
        ended = served.ended(video)
        assert (ended["status"], ended["attempt"]) == ("completed", 2)
        assert "of 6 clips are in" in (served.folder / "ranks.log").read_text()
        assert not clips.exists()
        made = tmp_path / "made.mp4"
        made.write_bytes(served.ask(f"/v1/videos/{video}/content")[2])
        refused = served.ask("/v1/videos", asked | {"clips": 3})
        assert refused[0] == 400 and "number of prompt" in refused[2]["error"]["message"]
    finally:
        assert served.stop() == 0
    out = tmp_path / "plain.mp4"
    flags = ["--task", "i2v-A14B", "--image", STAR, "--frame_num", 9, "--sample_steps", 8]
    flags += ["--chain", "latent", "--base_seed", 3, "--save_file", out, "--clip_prompts", *WAYS]
    subprocess.run([sys.executable, GENERATE, *map(str, flags)], check=True, capture_output=True)
    frames = [np.stack(list(imageio.get_reader(path).iter_data())) for path in (made, out)]
    assert frames[0].shape[0] == 9 + 5 * 4
    assert np.abs(frames[0].astype(int) - frames[1]).max() <= 2
