"""The device check on the simulated NPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.dist import REPO, TORCHRUN

# Those that call the vendor's operators; what the CPU has as well is checked there.
STEPS = "machine,attention,lse,merge,modes,methods,int8,forward,compiled,npu"


def test_check(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, str(REPO / "tools" / "check_device.py")),
            *("--device", "npu", "--only", STEPS, "--json", str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **TORCHRUN, "NPU_SIM_SOC": "220"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["facts"]["name"] == "Ascend910B3" and not record["facts"]["large"]
    found = {step["name"]: step for step in record["steps"]}
    assert found["compiled"]["words"] == "--compile does not work on A2"
    lines = {line["what"]: line["verdict"] for step in found.values() for line in step["lines"]}
    assert lines["RoPE, --fused_ops rope"] == lines["npu_fusion_attention, BNSD"] == "ok"
    fp8 = next(verdict for what, verdict in lines.items() if what.startswith("FP8"))
    assert fp8 == "not available"
