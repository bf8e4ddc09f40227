"""The NPU device: order of its settings, and refusals of missing or unusable parts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import Ranks
from tests.npu_sim.ranks import SOC
from tests.refusals import check_refusals
from wan import device as devices
from wan.settings.errors import InputError


def check_order_of_settings() -> int:
    """In a new process: record the order of the device settings and imports."""
    import torch_npu

    records = []

    def record_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def recording_call(*args: Any, **kwargs: Any) -> Any:
            path = os.environ.get("ASCEND_CUSTOM_OPP_PATH", "")
            records.append((function.__name__, args[:1], "mindiesd" in sys.modules, bool(path)))
            return function(*args, **kwargs)

        return recording_call

    torch.npu.set_device = record_calls(torch.npu.set_device)
    torch.npu.set_compile_mode = record_calls(torch.npu.set_compile_mode)
    torch.npu.config.allow_internal_format = True  # as mindiesd's import leaves it
    assert "mindiesd" not in sys.modules
    device = devices.select_device("npu", 3)
    assert [name for name, *_ in records] == ["set_compile_mode", "set_device"]
    assert all(imported and path for *_, imported, path in records), records
    assert torch_npu.npu.compile_mode == {"jit_compile": False}
    assert not torch.npu.config.allow_internal_format
    assert torch.npu.current_device() == 3 and device.torch_device == torch.device("npu", 3)
    return 0


@pytest.mark.dist
def test_operator_paths_come_before_the_first_use_of_a_device() -> None:
    with Ranks([{"ASCEND_CUSTOM_OPP_PATH": ""}], check_order_of_settings) as process:
        assert process.wait_for_exit() == [0], process.format_outputs()


def test_chip_and_interface(chip: Callable[[str], None]) -> None:
    for name in SOC:
        chip(name)
        device = devices.select_device("npu", 1)
        assert device.type == "npu" and device.torch_device == torch.device("npu", 1)
        assert device.capabilities.name == name
        assert device.name().startswith("Ascend")
        device.synchronize()
        device.empty_cache()
        device.reset_peak_memory()
        assert device.peak_memory() == 0


def test_auto_takes_the_npu_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.select_device("auto", 2).torch_device == torch.device("npu", 2)
    monkeypatch.setenv("NPU_SIM_COUNT", "0")
    assert devices.select_device("auto").type == "cpu"


def collect_refusal(device_name: str = "npu", index: int = 0) -> str:
    try:
        devices.select_device(device_name, index)
    except InputError as error:
        return str(error)
    return ""


FAILING = {  # the first error is that of torch-npu 2.13.0 on a machine without CANN
    "torch_npu": (
        'ImportError("libhccl.so: cannot open shared object file: No such file or directory")'
    ),
    "mindiesd": 'OSError("libascendcl.so: cannot open")',
    "mindiesd for another PyTorch": 'RuntimeError("Unsupported torch version")',
}


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    messages = {"unknown device": collect_refusal("tpu")}
    for case, variable, value, index in (
        ("no NPU", "NPU_SIM_COUNT", "0", 0),
        ("no such rank", "NPU_SIM_COUNT", "2", 2),
        ("unknown chip", "NPU_SIM_SOC", "230", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            messages[case] = collect_refusal(index=index)
    for package in ("torch_npu", "mindiesd"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)  # as Python itself forbids an import
            messages[f"{package} is not installed"] = collect_refusal()
    for number, (case, error) in enumerate(FAILING.items()):
        package, folder = case.partition(" ")[0], tmp_path / str(number)
        folder.mkdir()
        (folder / f"{package}.py").write_text(f"raise {error}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            patch.delitem(sys.modules, package)
            messages[f"{case} does not load"] = collect_refusal()
    check_refusals("npu: devices", messages, hide=[re.escape(torch.__version__)])
