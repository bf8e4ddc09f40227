"""Random command lines, records and lines of prompt files: resolved or refused, never a traceback.

python tests/cli/test_fuzz.py 20000
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from wan.cli import flags, prompt_file
from wan.cli.resolve import resolve
from wan.run import Run
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS

ODD = (
    *("", " ", "0", "1", "-1", "2", "3.5", "nan", "inf", "-inf", "1e308", "5e-324", "9" * 5000),
    *("true", "false", "none", "auto", "\0", "\udcff", "`size`", "{x}", "%s", "a=b", "../..", "~x"),
    *("1,2", "4,3", "1000,500", "0-3,7", "3-", "832*480", "64x64", "1*1", "é" * 300, "/proc/self"),
)
RAW: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 2.5, 1e400, 10**400, [], {}, [1], [[]], [None], {"a": 1}),
    *ODD,
)
LEFT_OUT = {"use_prompt_extend", "decode_latents", "from_json", "prompt_file", "trace"}
NAMES = [name for name in FLAGS if name not in LEFT_OUT]


def value(name: str, draw: random.Random) -> str:
    """One that may be right, or an odd one."""
    choices = FLAGS[name].read.choices
    if choices and draw.random() < 0.8:
        return draw.choice(choices)
    return draw.choice(ODD)


def no_demo(*_: object) -> None:
    raise AssertionError("nothing is made for a plan")


def planned(given: dict[str, Any]) -> Run:
    return resolve(given, no_demo, plan=True)


def attack(draw: random.Random, folder: Path) -> bool:
    """One random input; whether it was accepted. Anything but a refusal is raised."""
    kind = draw.choice(("flags", "record", "line"))
    try:
        if kind == "flags":
            names = draw.sample(NAMES, draw.randint(1, 5))
            argv = [part for name in names for part in (f"--{name}", value(name, draw))]
            planned(flags.parse(["--plan", *argv]))
        elif kind == "record":
            names = [*draw.sample([*FLAGS], draw.randint(0, 4)), *draw.sample(("x", "seed"), 1)]
            settings: Any = {name: draw.choice(RAW) for name in names if draw.random() < 0.8}
            path = folder / "record.json"
            path.write_text(json.dumps({"settings": draw.choice((settings, settings, [], "x"))}))
            planned(flags.parse(["--plan", "--from_json", str(path)]))
        else:
            names = draw.sample(["seed", "save_file", *FLAGS], draw.randint(1, 4))
            line = json.dumps({name: draw.choice(RAW) for name in names})
            path = folder / "prompts.txt"
            path.write_text(draw.choice((line, line[:-1], "[" * 2000, "a fox")) + "\n")
            given = flags.parse(["--prompt_file", str(path), "--save_file", str(folder)])
            prompt_file.resolved(given, planned)
    except InputError as error:
        text = str(error)
        assert text.endswith((".", "?", "!")) and len(text) < 5000, text
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_input(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    accepted = sum(attack(draw, tmp_path) for _ in range(500))
    assert 10 < accepted < 490


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        draw = random.Random(7)
        found = [attack(draw, Path(name)) for _ in range(int(sys.argv[1]))]
    print(f"{len(found)} inputs, {sum(found)} accepted, the others refused")
