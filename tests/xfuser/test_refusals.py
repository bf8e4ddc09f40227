"""Refusals before any weight is read, with xfuser installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.conftest import Refusals, Tiny
from tests.dist import REPO
from wan.cli import main as generate

CPU = ["--device", "cpu", "--size", "64*48", "--frame_num", "5", "--sample_steps", "2"]
REFUSED_FLAGS = {
    "no operator": ["sdpa_efficient"],
    "no precision": ["sdpa_flash"],
    "no GPU": ["flash"],
    "FP8": ["sdpa_math", "--fa_quant", "fp8"],
    "compiled": ["sdpa_math", "--compile"],
}


def test_refused_before_any_weight_is_read(tiny: Tiny, refusals: Refusals) -> None:
    common = ["--ckpt_dir", str(tiny("t2v-A14B")), *CPU, "--attention_backend"]
    hidden = r"(?<=Could not run 'aten::_scaled_dot).*(?=\))"
    cases = {name: [*common, *argv] for name, argv in REFUSED_FLAGS.items()}
    assert generate.main(cases["no operator"]) == 2  # libraries write while they are imported
    refusals("xfuser: flags", cases, hide=[hidden])


def test_a_pytorch_for_cpus_alone_is_refused_in_words(tiny, tmp_path: Path) -> None:
    """The installed xfuser without the rig: it does not load."""
    installed = Path(str(find_spec("xfuser").origin)).parents[1]
    argv = ["--ckpt_dir", str(tiny("t2v-A14B")), *CPU, "--attention_backend", "sdpa_math"]
    process = subprocess.run(
        [sys.executable, REPO / "generate.py", *argv, "--save_file", tmp_path / "v.mp4"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": f"{REPO}:{installed}", "PATH": "/usr/bin:/bin"},
    )
    lines = [line for line in process.stderr.splitlines() if line.startswith("generate.py: ")]
    assert process.returncode == 2 and len(lines) == 1, process.stderr
    assert "xfuser, which does not load here: it needs a PyTorch for CUDA or ROCm" in lines[0]
