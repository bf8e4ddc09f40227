"""--power with --device npu: which boards are measured, each only once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.npu_sim.latents import WAYS, make_arguments
from tests.npu_sim.test_commands import ULYSSES, Command
from tests.unit.test_npu_smi import install, make_tool, text

pytestmark = pytest.mark.dist


def test_boards_of_two_ranks(rig: Path, tmp_path: Path) -> None:
    """Logic IDs 0 and 1 are the two dies of board 0, 2 is on board 1."""
    tool = make_tool(tmp_path / "bin")
    install(tool, info__m=text("map_A3"), info=text("info_A3_25.2.0"))
    for board, watts in ((0, "74.0"), (1, "100.0")):  # both dies report their board's power
        sensor_text = text("common_two_dies").replace("69.0", watts).replace("74.0", watts)
        install(tool, **{f"info__t_common__i_{board}": sensor_text})
    argv = [
        *make_arguments(rig, WAYS["dense"]),
        *ULYSSES,
        "--power",
        "--size",
        "64*64",
        "--frame_num",
        "1",
    ]
    for visible, boards in (("1,0", [0]), ("1,2", [0, 1])):
        environ = {"PATH": f"{tool}:{os.environ['PATH']}", "ASCEND_RT_VISIBLE_DEVICES": visible}
        command = Command(tmp_path, 2, "A3", *argv, **environ)
        assert command.codes == [0, 0], command.output[-6000:]
        power = json.loads(command.video.with_suffix(".json").read_text())["power"]
        devices = power.get("devices", [power])
        assert sorted(device_power["device"] for device_power in devices) == [
            f"NPU {board}" for board in boards
        ]
        assert power["mean_w"] == pytest.approx(74 + 100 * (len(boards) - 1))
        assert power["joules"] == pytest.approx(
            sum(device_power["joules"] for device_power in devices), abs=0.01
        )
        assert power["covers"].startswith("text to decoded video, other ranks")
        assert "Power (npu-smi): mean " in command.output
