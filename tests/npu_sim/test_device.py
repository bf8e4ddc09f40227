"""The npu as a device: what is set in which order, and one sentence for whatever is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from wan import device as devices
from wan.settings.errors import InputError

# In a fresh process: every step that matters is noted where it happens.
ORDER = """
import json, os, sys
import torch, torch_npu
noted = []
def note(name, function):
    def noting(*args, **named):
        noted.append([name, args and str(args[0]), "mindiesd" in sys.modules,
                      "mindiesd" in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "")])
        return function(*args, **named)
    return noting
torch.npu.set_device = note("set_device", torch.npu.set_device)
torch.npu.set_compile_mode = note("set_compile_mode", torch.npu.set_compile_mode)
torch.npu.config.allow_internal_format = False
import mindiesd
after_import = torch.npu.config.allow_internal_format
from wan import device
found = device.resolve("npu", 3)
print(json.dumps({
    "noted": noted, "after_import": after_import,
    "format": torch.npu.config.allow_internal_format, "modes": torch_npu.npu.compile_mode,
    "current": torch.npu.current_device(), "device": str(found.torch_device),
    "chip": found.can.name,
}))
"""


def test_settings_and_their_order() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORDER], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["after_import"] is True  # mindiesd allows internal formats; ours comes after it
    assert seen["format"] is False and seen["modes"] == {"jit_compile": False}
    assert seen["noted"] == [["set_compile_mode", [], True, True], ["set_device", "3", True, True]]
    assert (seen["current"], seen["device"], seen["chip"]) == (3, "npu:3", "A2")


def test_operator_paths_come_before_the_first_use_of_a_device() -> None:
    """The same, where nothing but `resolve` has imported mindiesd."""
    script = ORDER.replace("import mindiesd\n", "")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [step[2:] for step in seen["noted"]] == [[True, True], [True, True]]
    assert seen["format"] is False


@pytest.mark.parametrize("name", ["A2", "A3", "A5", "Duo"])
def test_chip_and_interface(name: str, chip) -> None:
    chip(name)
    device = devices.resolve("npu", 1)
    assert device.type == "npu" and device.torch_device == torch.device("npu", 1)
    assert device.can.name == name
    assert device.name().startswith("Ascend")
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory()
    assert device.peak_memory() == 0


def test_auto_takes_the_npu_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.resolve("auto", 2).torch_device == torch.device("npu", 2)
    monkeypatch.setenv("NPU_SIM_COUNT", "0")
    assert devices.resolve("auto").type == "cpu"


def refused(words: str, wish: str = "npu", index: int = 0) -> None:
    with pytest.raises(InputError, match=words) as caught:
        devices.resolve(wish, index)
    said = str(caught.value)
    assert "\n" not in said and said.endswith(".")


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_COUNT", "0")
    refused("sees no NPU here; .*npu-smi info.* or use device=cpu")


def test_rank_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_COUNT", "2")
    refused("NPU 2 does not exist; 2 do", index=2)


def test_unknown_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "230")
    refused("SoC version 230 is unknown to mindiesd")


@pytest.mark.parametrize("package", ["torch_npu", "mindiesd"])
def test_package_not_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself does to forbid an import
    refused(f"needs the Python package {package}, .*pip install -r requirements-npu.txt")


@pytest.mark.parametrize(
    ("package", "error", "words"),
    [
        # The first is what the real torch-npu 2.13.0 raises on a machine without CANN.
        (
            "torch_npu",
            'ImportError("libhccl.so: cannot open shared object file: No such file or directory")',
            r"CANN is missing \(libhccl.so: cannot .*; install CANN and source its set_env.sh",
        ),
        ("mindiesd", 'OSError("libascendcl.so: cannot open")', r"mindiesd does not load; .*libasc"),
        ("mindiesd", 'RuntimeError("Unsupported torch version")', r"must fit PyTorch .*Unsupp"),
    ],
)
def test_package_that_does_not_load(
    package: str, error: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package)
    refused(words)


def test_unknown_wish() -> None:
    refused("device=tpu is unknown; use auto, cpu, cuda or npu", wish="tpu")


def test_events_say_when() -> None:
    """Between two looks at the host's clock, in their order, also where they are read later."""
    clock = devices.resolve("npu").clock()
    assert clock.name == "device events"
    before = time.perf_counter_ns()
    clock.start()
    first, second = clock.now(), clock.now()
    clock.stop()
    after = time.perf_counter_ns()
    slack = 1_000_000  # the first event and the host's look at its clock are not one
    assert before - slack <= first() <= second() <= after + slack
    assert (first(), second()) == (first(), second())
