"""The device check on the simulated NPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import slow
from tools.check_device import main

# Steps that call the vendor's operators; the other steps are tested on the CPU.
QUICK = "methods,compiled,npu"
STEPS = [QUICK, slow(f"{QUICK},attention,lse,int8")]


@pytest.mark.parametrize("steps", STEPS)
def test_check(
    steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "220")
    file = tmp_path / "report.json"
    code = main(["--device", "npu", "--only", steps, "--json", str(file)])
    assert code == 0, capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["facts"]["name"] == "Ascend910B3" and not record["facts"]["large"]
    steps_by_name = {step["name"]: step for step in record["steps"]}
    assert steps_by_name["compiled"]["words"] == "--compile does not work on A2"
    lines = {
        line["what"]: line["verdict"] for step in steps_by_name.values() for line in step["lines"]
    }
    assert lines["RoPE, --fused_ops rope"] == lines["npu_fusion_attention, BNSD"] == "ok"
    fp8 = next(verdict for check_name, verdict in lines.items() if check_name.startswith("FP8"))
    assert fp8 == "not available"
