"""Command lines of tools and benchmarks: numbers have ranges, foreign files are kept."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import powercap_gpu, stable_diffusion_cpp
from tests.dist import REPO
from tests.refusals import check_refusals
from tools import make_sound
from tools.demo import export
from tools.demo.training import save_atomically
from wan.app.programs import make_argument_type, make_output_path_type, run_program
from wan.settings.attention_modes import MODES
from wan.settings.errors import InputError, WriteError
from wan.settings.values import integer
from wan.utils.files import make_marked_kind

BAD = ("-1", "nan", "inf", "1e308", str(10**30), "9" * 5000, "many", "")
NUMBERS = {  # module -> options with a number that is checked later | other required arguments
    "benchmarks.against": "--size",
    "benchmarks.power_model": "--tau --f_low --pfa --frame_num --sample_steps --ulysses_size",
    "tools.compare_videos": "--joins | a b",
    "tools.make_character": "--size --frames | moves",
    "wan.power.compare": "--repeats --modes --chunks --plan --order | --out o",
}
OUTPUTS = {  # module -> options that name a file | other required arguments
    "tools.check_device": "--json",
    "tools.make_sound": "",
    "tools.calibrate_mag": f"--out | --ckpt_dir {REPO}/examples/demo/t2v-A14B",
}


@pytest.fixture(scope="module")
def option_types() -> dict[str, Callable[[str], Any]]:
    """The functions that convert the text of an option, by program and option."""
    types, parsers = {}, []

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        parsers.append(parser)
        raise InterruptedError

    paths = [path for folder in ("benchmarks", "tools") for path in (REPO / folder).rglob("*.py")]
    names = [".".join(path.relative_to(REPO).with_suffix("").parts) for path in paths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        for name in names:
            start = getattr(importlib.import_module(name), "main", None)
            if start is None or not inspect.signature(start).parameters:
                continue
            with suppress(InterruptedError):
                start([])
            for action in parsers.pop()._actions if parsers else ():
                if action.type not in (None, str, Path):
                    types[f"{name} {action.dest}"] = action.type
    return types


def convert_or_none(convert: Callable[[str], Any], text: str) -> Any:
    try:
        return convert(text)
    except argparse.ArgumentTypeError as error:
        assert str(error) and "\n" not in str(error)
        return None


def collect_refusals(
    programs: dict[str, str], values: Sequence[object], capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Starts programs, which must refuse each of these values of their options in one sentence."""
    messages = {}
    for (module, usage), value in product(programs.items(), values):
        options, _, required = usage.partition("|")
        for option in options.split() or [""]:
            if (option, value) == ("--chunks", ""):
                continue  # none
            argument = f"{option}={value}" if option else str(value)
            capsys.readouterr()
            try:
                code = importlib.import_module(module).main([*required.split(), argument])
            except InputError as error:
                sentence = str(error)
            else:
                sentence = capsys.readouterr().err.strip()
                assert code == 2, argument
            assert sentence and "\n" not in sentence and len(sentence) < 700
            messages[f"{module} {option} {str(value)[:40] or 'nothing'}"] = sentence
    return messages


def test_numbers_have_ranges(capsys, tmp_path: Path, monkeypatch, option_types) -> None:
    monkeypatch.chdir(tmp_path)
    accepted, num_numbers = [], 0
    for name, convert in option_types.items():
        if isinstance(convert_or_none(convert, "1"), Path):
            continue
        num_numbers += 1
        accepted += [(name, v[:9]) for v in BAD if convert_or_none(convert, v) is not None]
    assert accepted == [("tools.compare_latents least", "-1")], "a cosine"
    assert num_numbers > 40
    messages = collect_refusals(NUMBERS, BAD, capsys)
    recorded = {
        case: message
        for case, message in messages.items()
        if case.startswith(("wan.", "benchmarks.power_model")) and case.endswith((" -1", " many"))
    }
    check_refusals("programs: numbers", recorded)
    assert not [*tmp_path.iterdir()]


def test_powercap_gpu_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    sizes = "--tokens 64 --heads 2 --head_dim 16 --hidden 64 --seconds 0.02 --rounds 1"
    powercap_gpu.main([*f"--device cpu --keep_clock {sizes} --json".split(), str(path)])
    [result] = json.loads(path.read_text())["results"]
    assert {row.name for row in MODES.values()} < result["variants"].keys()
    assert result["options"]["tokens"] == 64


def test_step_seconds_of_sd_cli() -> None:
    read = stable_diffusion_cpp.read_step_seconds
    end = "[INFO ] x.cpp:1 - sampling completed, taking 10.00s\n"
    slow = "\r  |==| 1/4 - 4.00s/it\x1b[K\r  |==| 2/4 - 3.00s/it\x1b[K"
    assert read(f"| 1/4 - 9.00MB/s\n{slow}\n{end}", 4) == {"first": 4.0, "step": 2.0}
    assert read(f"\r  |==| 1/4 - 4.00it/s\x1b[K\n{end}", 4) == {"first": 0.25, "step": 3.25}
    for output in (end, slow):
        with pytest.raises(InputError):
            read(output, 4)


def test_foreign_files_are_no_outputs(capsys, tmp_path: Path, monkeypatch, option_types) -> None:
    """A foreign file, a link and a device are refused before the work."""
    monkeypatch.chdir(tmp_path)
    foreign, link = tmp_path / "mine.json", tmp_path / "link.json"
    foreign.write_text('{"settings": {}}')
    link.symlink_to(foreign)
    paths = (foreign, link, Path("/dev/null"))
    assert collect_refusals(OUTPUTS, paths, capsys)
    outputs = [n for n, x in option_types.items() if isinstance(convert_or_none(x, "new"), Path)]
    accepted = {n for n in outputs for p in paths if convert_or_none(option_types[n], str(p))}
    folders = {"quantize_dit ckpt_dir", "quantize_dit out", "calibrate_mag out"}
    assert accepted == {f"tools.{name}" for name in (*folders, "compare_versions keep")}
    assert len(outputs) > 15
    assert foreign.read_text() == '{"settings": {}}' and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, foreign]


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path, capsys, monkeypatch) -> None:
    path = tmp_path / "mine.wav"
    path.write_text("precious")
    for arguments in ([str(path)], [str(tmp_path / "new.wav"), "--rate", "1e308"]):
        monkeypatch.setattr(sys, "argv", ["make_sound.py", *arguments])
        with pytest.raises(SystemExit, match=r"^2$"):
            runpy.run_path(str(REPO / "tools" / "make_sound.py"), run_name="__main__")
        message = capsys.readouterr().err
        assert message.startswith("make_sound.py: ") and message.count("\n") == 1
    assert path.read_text() == "precious" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=str
)
def test_text_in_any_locale(locale: dict[str, str], tmp_path: Path) -> None:
    """Arguments and names of files are UTF-8; what an output cannot encode is escaped."""
    text = "狐狸 é"
    (program := tmp_path / "program.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom wan.app.programs import run_program\n"
        "def main():\n    print(sys.argv[1], '\\udcff')\n"
        "    Path(sys.argv[1]).write_text(sys.argv[1])\n"
        "sys.exit(run_program(main))\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [sys.executable, program, text],
        env=environ | {"PYTHONPATH": str(REPO)} | locale,
        cwd=tmp_path,
        capture_output=True,
    )
    assert result.returncode == 0 and result.stderr == b"", result
    encoding = locale.get("PYTHONIOENCODING", "ascii")
    assert result.stdout.decode(encoding) == (
        f"{text} \udcff\n".encode(encoding, "backslashreplace").decode(encoding)
    )
    assert (tmp_path / text).read_text(encoding="utf-8") == text


def test_types_of_options(tmp_path: Path, capsys) -> None:
    kind = make_marked_kind("a text", b"ours")
    assert (
        make_argument_type(integer(1, 3))("2") == 2
        and make_output_path_type(kind)(str(tmp_path / "x")).name == "x"
    )

    def fail() -> None:
        raise WriteError("x could not be written.")

    assert run_program(lambda: None) == 0 and run_program(lambda: 3) == 3
    assert run_program(fail, "program") == 1
    assert capsys.readouterr().err == "program: x could not be written.\n"
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback
        run_program(lambda: 1 // 0)


def test_outputs_are_known_again(tmp_path: Path) -> None:
    """A second run replaces the files of the first run."""
    sound, state = tmp_path / "a.wav", tmp_path / "a.pt"
    for _ in range(2):
        make_sound.write_wav(sound, 0.1)
        save_atomically({"step": 1}, state)
    assert torch.load(state, mmap=True) == {"step": 1}
    torch.save({"step": 1}, state)  # somebody else's
    content = state.read_bytes()
    with pytest.raises(WriteError):
        save_atomically({}, state)
    assert state.read_bytes() == content


def test_only_an_export_of_the_demo_is_removed(tmp_path: Path) -> None:
    demo, out = REPO / "examples" / "demo", tmp_path / "out"
    more = [f"google/umt5-xxl/{name}" for name in ("special_tokens_map.json", "tokenizer.json")]
    more += ["google/umt5-xxl/tokenizer_config.json"]
    export.check_export(demo / "t2v-A14B", more)
    export.check_export(demo / "i2v-A14B", ["google/umt5-xxl"])
    out.mkdir()
    export.check_export(out, [])
    (out / "configuration.json").write_text('{"framework": "Pytorch"}')
    with pytest.raises(InputError):
        export.remove_export(out, [])
    for name in export.EXPORTED:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("{}")
    with pytest.raises(InputError):  # with other settings
        export.remove_export(out, [])
    source = demo / "t2v-A14B" / "generation_config.json"
    (out / source.name).write_bytes(source.read_bytes())
    (out / "notes").write_text("mine")
    with pytest.raises(InputError):
        export.remove_export(out, [])
    (out / "notes").unlink()
    export.remove_export(out, [])
    assert not out.exists()


def hide_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets imports of a package and of its modules fail, also of those that are imported."""
    for module in {name, *(x for x in sys.modules if x.startswith(f"{name}."))}:
        monkeypatch.setitem(sys.modules, module, None)


def test_a_missing_package_of_a_program_that_runs(monkeypatch, capsys) -> None:
    """Other missing modules are defects, with a traceback."""
    hide_package("matplotlib", monkeypatch)
    monkeypatch.setitem(sys.modules, "json.nothing", None)
    assert run_program(lambda: importlib.import_module("matplotlib.figure") and 0, "plot") == 2
    assert capsys.readouterr().err.startswith("plot: The package matplotlib is not installed")
    with pytest.raises(ModuleNotFoundError):
        run_program(lambda: importlib.import_module("json.nothing") and 0)
