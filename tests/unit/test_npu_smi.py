"""npu-smi: recorded outputs of many versions, broken ones, and the tool as a process."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import check_refusals, get_refusal
from wan.device import Device
from wan.metering import npu_smi
from wan.metering.meter import open_power_source
from wan.metering.npu_smi import DieLocation, DieReading
from wan.metering.power_source import MeterError
from wan.settings.devices import get_capabilities
from wan.utils import system

FIXTURES = Path(__file__).parent / "fixtures" / "npu_smi"
POWERS: dict[str, dict[int, list[float | None]]] = {
    "info_910A_20.2.2": {0: [68.6], 1: [63.7]},
    "info_910A_21.0.4": {0: [70.9], 1: [67.2]},
    "info_910A_23.0.rc1": {0: [72.0], 1: [70.2]},
    "info_910B4_24.1.1": {0: [88.2], 1: [87.0]},
    "info_910B4-1_25.2.0": {0: [91.3], 1: [88.1]},
    "info_910B4_25.5.2": {5: [89.9]},
    "info_910B4_26.0.rc1": {0: [82.6]},
    "info_A3_24.1.rc3.7": {0: [178.8, None]},
    "info_A3_25.2.0": {0: [162.8, None], 1: [167.1, None]},
    "info_A3_25.3.rc1": {0: [199.1, None], 1: [200.3, None]},
    "info_A3_26.0.rc2": {0: [162.6, None]},
    "info_310P3": {0: [15.8], 1: [15.4]},
    "info_310P3_Duo_25.2.0": {2: [None, None]},
    "info_310B_25.2.0": {0: [10.4]},
}
READINGS = {
    ("common_910B_idle", 0): DieReading(93.4, 800, 1800, False),
    ("common_910B_busy", 0): DieReading(331.1, 1800, 1800, True),
    ("common_310P", 0): DieReading(13.4, 960, 1080, False),
    ("common_310P_Duo", 0): DieReading(45.2, 960, 1080, False),
    ("common_310P_Duo", 1): DieReading(45.2, 960, 1080, False),
    ("common_two_dies", 0): DieReading(69.0, 1000, 1000, False),
    ("common_two_dies", 1): DieReading(74.0, 1000, 1000, False),
    ("common_310B", 0): DieReading(13.3, None, None, False),
    ("common_A5", 0): DieReading(298.6, 100, 1650, False),
    ("power_910B", 0): DieReading(103.5),
    ("power_310B", 0): DieReading(9.1),
}
DIE_LOCATIONS = {
    "map_910B": {0: DieLocation(0, 0), 1: DieLocation(1, 0)},
    "map_A3": {0: DieLocation(0, 0), 1: DieLocation(0, 1), 2: DieLocation(1, 0)},
    "map_310P": {0: DieLocation(4, 0)},
    "map_310P_Duo": {
        0: DieLocation(1, 0),
        1: DieLocation(1, 1),
        2: DieLocation(2, 0),
        3: DieLocation(2, 1),
    },
}
ERRORS = ("error_8005", "error_8020")
A5_MAP = "".join(  # as the driver's source prints it
    "\t" + " ".join(f"{cell:<30}" for cell in row) + "\n"
    for row in (
        ("NPU ID", "Slot ID", "Chip ID", "Chip Phy-ID", "Chip Name"),
        ("0", "1", "0", "0", "Ascend950"),
        ("1", "2", "0", "1", "Ascend950"),
    )
)


def text(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def test_tables() -> None:
    assert {name: npu_smi.parse_die_powers(text(name)) for name in POWERS} == POWERS
    for name, boards in POWERS.items():
        for board, powers in boards.items():
            for die, power in enumerate(powers):
                table, location = text(name), DieLocation(board, die)
                if watts := power or powers[0]:
                    assert npu_smi.parse_power_table(table, location) == DieReading(watts), name
                else:
                    refusal = get_refusal(
                        npu_smi.parse_power_table, table, location, kind=MeterError
                    )
                    assert f"no power of NPU {board}" in refusal, name


def test_fields_and_mapping() -> None:
    for (name, die), reading in READINGS.items():
        assert npu_smi.parse_power_fields(text(name), DieLocation(0, die)) == reading, (name, die)
    locations = {name: npu_smi.parse_die_locations(text(name)) for name in DIE_LOCATIONS}
    assert locations == DIE_LOCATIONS
    assert npu_smi.parse_die_locations(A5_MAP) == {0: DieLocation(0, 0), 1: DieLocation(1, 0)}


def parse_or_none(parse: Any, broken: str) -> Any:
    """Returns the parsed text, or None after a MeterError with a message."""
    try:
        return parse(broken)
    except MeterError as reason:
        assert str(reason)
        return None


def test_outputs_that_break_off() -> None:
    """Text that is cut off at any character gives only values that the full text has."""
    for name, expected in (*POWERS.items(), *DIE_LOCATIONS.items()):
        output = text(name)
        parse = npu_smi.parse_die_powers if name in POWERS else npu_smi.parse_die_locations
        for end in range(len(output)):
            for key, value in (parse_or_none(parse, output[:end]) or {}).items():
                begins = isinstance(value, list) and value == expected[key][: len(value)]
                assert begins or value == expected[key], (name, end)
    for (name, die), expected in READINGS.items():
        output, location = text(name), DieLocation(0, die)
        powers = {r.watts for (n, _), r in READINGS.items() if n == name}
        powers |= {16.9} if name == "power_310B" else set()
        for end in range(len(output)):
            parse = partial(npu_smi.parse_power_fields, location=location)
            if reading := parse_or_none(parse, output[:end]):
                assert reading.watts in powers, (name, end)
                assert reading.mhz in (None, expected.mhz), (name, end)


BROKEN = {
    "nothing": "",
    "blank lines": "\n\n\n",
    "other columns": text("info_A3_25.2.0").replace("Power(W)", "Leistung"),
    "a column less": re.sub(r"\| (OK|Health) +", "", text("info_910B4_24.1.1")),
    "one line of two": re.sub(r"(?m)^\| 0 {25,}.*\n", "", text("info_910B4_24.1.1")),
    "translated": "NPU 编号：0\n芯片数量：1\n\n芯片编号：0\nNPU 实时功率(W)：93.4\n",
    "translated table": "| NPU 名称 | 健康 | 功率(W) |\n| 芯片 | 总线 | - |\n| 0 910B | - | 93 |\n",
    "help": "Usage: npu-smi info <watch|proc|-h|-m|-l|-t type> [Options...]\n",
    "no boards": "There is no NPU card on this server.\n",
    "bytes": "\x00\ufffd\x1b[31m| NPU Name | Health | Power(W) |\n" * 3,
    "html": "<html><body>502 Bad Gateway</body></html>\n",
    **{name: text(name) for name in ERRORS},
}


def test_outputs_that_cannot_be_used() -> None:
    location = DieLocation(0, 0)
    calls = {
        "boards": npu_smi.parse_die_powers,
        "mapping": npu_smi.parse_die_locations,
        "table": lambda t: npu_smi.parse_power_table(t, location),
        "fields": lambda t: npu_smi.parse_power_fields(t, location),
    }
    messages = {
        f"{read}: {name}": get_refusal(parse, broken, kind=MeterError)
        for read, parse in calls.items()
        for name, broken in BROKEN.items()
    }
    assert not {case: text for case, text in messages.items() if "it says " not in text}
    recorded = [case for case in messages if "boards:" in case or case.endswith(": help")]
    check_refusals("npu-smi", {case: f"{messages[case]}." for case in recorded})


def test_refused_power_values() -> None:
    for value in ("0", "0.0", "-", "NA", "N/A", "nan", "inf", "-5.0", "1e3", "²", ""):
        output = text("power_910B").replace("103.5", value)
        parse = partial(npu_smi.parse_power_fields, location=DieLocation(0, 0))
        assert get_refusal(parse, output, kind=MeterError), value


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH with an npu-smi that prints files: `info`, `info_-m`, ..."""
    script = tmp_path / "npu-smi"
    script.write_text(
        "#!/bin/sh\n"
        f'cd {tmp_path}; name=$(echo "$*" | tr " " _)\n'
        'if [ -f "$name" ]; then cat "$name"; else cat fails 2>/dev/null; exit 187; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def install(tool: Path, **files: str) -> None:
    for name, content in files.items():
        (tool / name.replace("__", "_-")).write_text(content)


def test_npu_smi_on_an_a2(tool: Path) -> None:
    busy = text("common_910B_busy").replace(
        "curFreq(MHZ)            : 1800", "curFreq(MHZ)  : 1400"
    )
    install(tool, info__m=text("map_910B"), info=text("info_910B4_24.1.1"))
    install(tool, info__t_common__i_1=busy)
    source = npu_smi.NpuSmi(1)
    assert (source.device, source.rated_mhz) == ("NPU 1", 1800)
    sample = source.read_sample()
    assert (sample.watts, sample.mhz) == (331.1, 1400)
    assert sample.reasons == {npu_smi.BELOW_RATED} and source.external_cpu_seconds > 0
    install(tool, info__t_common__i_1=text("common_910B_idle"))
    assert source.read_sample().reasons == frozenset(), "idle, a low clock is no loss"
    (tool / "info_-t_common_-i_1").unlink()
    install(tool, fails=text("error_8020"))
    with pytest.raises(MeterError, match=r"failed: dcmi model .* ret is -8020"):
        source.read_sample()


def test_two_dies_of_a_board_are_one_device(tool: Path) -> None:
    """On an A3 both dies report the board's power, and the table has it once."""
    install(tool, info__m=text("map_A3"), info=text("info_A3_25.2.0"))
    install(tool, info__t_common__i_0=text("common_two_dies"))
    assert [npu_smi.NpuSmi(index).device for index in (0, 1)] == ["NPU 0", "NPU 0"]
    install(tool, info=text("info_A3_25.2.0").replace("-           37 ", "74.0        37 ", 1))
    dies = [npu_smi.NpuSmi(index) for index in (0, 1)]
    assert [die.device for die in dies] == ["NPU 0 die 0", "NPU 0 die 1"]
    assert [die.read_sample().watts for die in dies] == [69.0, 74.0]


@pytest.mark.parametrize(
    ("visible", "device"), [("1,2", "NPU 1"), ("2,1", "NPU 0"), (None, "NPU 0"), ("2", "none")]
)
def test_the_second_visible_npu_is_measured(
    tool: Path, visible: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logic IDs 0 and 1 are dies of board 0, 2 is on board 1."""
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    install(tool, info__m=text("map_A3"), info=text("info_A3_25.2.0"))
    for board in (0, 1):
        install(tool, **{f"info__t_common__i_{board}": text("common_two_dies")})
    # Only the index of the device is read, and PyTorch knows the name "npu" with torch-npu only.
    source = open_power_source(Device(torch.device("cuda", 1), get_capabilities("npu", 250)))
    assert (source.device or source.name) == device


def test_other_ways_where_one_tells_no_power(tool: Path) -> None:
    without = text("common_910B_idle").replace("Real-time Power", "Rated Power")
    install(tool, info__m=text("map_910B"), info__t_common__i_0=without)
    install(tool, info=text("info_910B4_24.1.1"))
    assert npu_smi.NpuSmi(0).read_sample().watts == 88.2
    install(tool, info__t_power__i_0=text("power_910B"))
    assert npu_smi.NpuSmi(0).read_sample().watts == 103.5
    install(tool, info__m=text("map_310P_Duo"), info__t_common__i_1=text("common_310P_Duo"))
    install(tool, info=text("info_310P3_Duo_25.2.0").replace("| 2  ", "| 1  "))
    duo = npu_smi.NpuSmi(1)
    assert (duo.device, duo.read_sample().watts) == ("NPU 1", 45.2)


def test_npu_smi_that_cannot_be_used(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tool, fails=text("error_8005"))
    with pytest.raises(MeterError, match=r"npu-smi info -m failed: dcmi .* ret is -8005"):
        npu_smi.NpuSmi(0)
    install(tool, info__m=text("map_910B"))
    with pytest.raises(MeterError, match="no NPU with the logic ID 5"):
        npu_smi.NpuSmi(5)
    install(tool, info__t_common__i_0="", info__t_power__i_0="", info="")
    with pytest.raises(MeterError, match="no power of NPU 0: it says nothing"):
        npu_smi.NpuSmi(0)
    (tool / "npu-smi").chmod(0o644)
    monkeypatch.setenv("PATH", str(tool))
    with pytest.raises(MeterError, match=r"npu-smi (on the PATH|info -m cannot be called)"):
        npu_smi.NpuSmi(0)
    (tool / "npu-smi").unlink()
    with pytest.raises(MeterError, match="no npu-smi on the PATH"):
        npu_smi.NpuSmi(0)


def test_renumbered_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    monkeypatch.delenv(variable, raising=False)
    assert system.find_machine_index(variable, 3) == 3
    numbers = {("0,1", 1): 1, ("6, 4", 0): 6, ("6,4", 2): None, ("", 0): None, ("x", 0): None}
    indices = {}
    for value, index in numbers:
        monkeypatch.setenv(variable, value)
        indices[value, index] = system.find_machine_index(variable, index)
    assert indices == numbers
