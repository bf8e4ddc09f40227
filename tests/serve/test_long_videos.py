"""A long video by the service: it continues after its last clip when a rank is lost."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.dist import REPO
from tests.serve.serving import ServiceProcess, generate_frames, read_frames

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("serve"), pytest.mark.slow]
STAR = REPO / "examples" / "star.png"
PROMPTS = [f"a large yellow star moves {way} on a gray background" for way in ("left", "right") * 3]


def test_a_lost_rank_between_clips(tmp_path: Path) -> None:
    image = "data:image/png;base64," + base64.b64encode(STAR.read_bytes()).decode()
    request_fields = {"chain": "latent", "prompt": PROMPTS, "seed": 3, "input_reference": image}
    flags = ["--task", "i2v-A14B", "--comm_type", 1]
    with ServiceProcess(tmp_path / "jobs", 2, flags=flags) as served:
        created = served.request(
            "/v1/videos", request_fields | {"num_frames": 9, "num_inference_steps": 8}
        )[2]
        folder = served.folder / "jobs" / created["id"]
        served.wait((folder / "video.clips" / "0002.safetensors").exists, 90)
        os.kill(served.list_rank_pids()[-1], signal.SIGKILL)
        video = served.wait_for_video(created["id"])
        assert (video["status"], video["attempt"]) == ("completed", 2)
        assert "of 6 clips are in" in (served.folder / "ranks.log").read_text()
        assert not (folder / "video.clips").exists()
        refused = served.request("/v1/videos", request_fields | {"clips": 3})
        assert refused[0] == 400 and "number of prompt" in refused[2]["error"]["message"]
    generate_args = ["--task", "i2v-A14B", "--image", STAR, "--frame_num", 9, "--sample_steps", 8]
    generate_args += ["--chain", "latent", "--base_seed", 3, "--clip_prompts", *PROMPTS]
    plain, served_frames = (
        generate_frames(tmp_path / "plain.mp4", *generate_args),
        read_frames(folder / "video.mp4"),
    )
    assert served_frames.shape[0] == 9 + 5 * 4
    assert np.abs(served_frames.astype(int) - plain).max() <= 2
