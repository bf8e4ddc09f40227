"""Random input of the command line is accepted, or refused in a sentence without a traceback."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.pipelines import fail_on_demo
from wan.app import flag_parser, prompt_file
from wan.app.resolve import ResolveContext, resolve_video
from wan.app.run import Run
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS
from wan.settings.layers import Layer
from wan.testing.random_checkpoint import make_checkpoint

ODD = (
    *("", " ", "0", "1", "-1", "2", "3.5", "nan", "inf", "-inf", "1e308", "5e-324", "9" * 5000),
    *("true", "false", "none", "auto", "\0", "\udcff", "`size`", "{x}", "%s", "a=b", "../..", "~x"),
    *("1,2", "4,3", "1000,500", "0-3,7", "3-", "832*480", "64x64", "1*1", "é" * 300, "/proc/self"),
)
RAW: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 2.5, 1e400, 10**400, [], {}, [1], [[]], [None], {"a": 1}),
    *ODD,
)
EXCLUDED_FLAGS = {"use_prompt_extend", "decode_latents", "from_json", "prompt_file", "trace"}
NAMES = [name for name in FLAGS if name not in EXCLUDED_FLAGS]
_DEFECT = re.compile(r"\b\w+(Error|Exception)\(")


def draw_value(name: str, draw: random.Random) -> str:
    """Draws a value of a flag that may be valid, or an odd one."""
    choices = FLAGS[name].reader.choices
    if choices and draw.random() < 0.8:
        return draw.choice(choices)
    return draw.choice(ODD)


def resolve_plan(*layers: Layer) -> Run:
    return resolve_video(ResolveContext(plan=True, make_demo=fail_on_demo), *layers)


def damage_bytes(content: bytes, draw: random.Random) -> bytes:
    """Changes or removes some bytes, or cuts the end off."""
    damaged_content = bytearray(content)
    for _ in range(draw.choice((0, 1, 1, 3, 20))):
        index = draw.randrange(len(damaged_content))
        damaged_content[index : index + draw.choice((0, 1, 4))] = draw.randbytes(
            draw.choice((0, 1, 4))
        )
    return bytes(
        damaged_content[: draw.choice((None, None, None, draw.randrange(len(damaged_content) + 1)))]
    )


class Attacks:
    """One method for each kind of input; each call makes one random input of that kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = make_checkpoint("t2v-A14B", folder / "tiny")

    def flags(self, draw: random.Random) -> None:
        names = draw.sample(NAMES, draw.randint(1, 5))
        argv = [part for name in names for part in (f"--{name}", draw_value(name, draw))]
        resolve_plan(flag_parser.parse_flags(["--plan", *argv]))

    def record(self, draw: random.Random) -> None:
        names = [*draw.sample([*FLAGS], draw.randint(0, 4)), *draw.sample(("x", "seed"), 1)]
        settings: Any = {name: draw.choice(RAW) for name in names if draw.random() < 0.8}
        path = self.folder / "record.json"
        path.write_text(json.dumps({"settings": draw.choice((settings, settings, [], "x"))}))
        resolve_plan(flag_parser.parse_flags(["--plan", "--from_json", str(path)]))

    def line(self, draw: random.Random) -> None:
        names = draw.sample(["seed", "seeds", "save_file", *FLAGS], draw.randint(1, 4))
        line = json.dumps({name: draw.choice(RAW) for name in names})
        path = self.folder / "prompts.txt"
        path.write_text(draw.choice((line, line[:-1], "[" * 2000, "a fox", "# a")) + "\n")
        arguments = flag_parser.parse_flags(
            ["--prompt_file", str(path), "--save_file", str(self.folder)]
        )
        prompt_file.resolve_prompt_file(
            arguments, lambda shared: lambda line: resolve_plan(line, shared)
        )

    def latents(self, draw: random.Random) -> None:
        settings: Any = {"task": "t2v-A14B", "ckpt_dir": str(self.checkpoint)}
        for name in draw.sample([*FLAGS, "x"], draw.randint(0, 3)):
            settings[name] = draw.choice(RAW)
        shape = draw.choice(((16, 1, 8, 8), (16, 2, 4, 8), (48, 1, 4, 4), (16, 1, 3, 3), (0,)))
        text = json.dumps(draw.choice((settings, settings, settings, [], "x")))
        content = save({"latents": torch.zeros(shape)}, {"settings": text})
        path = self.folder / "l.safetensors"
        path.write_bytes(damage_bytes(content, draw))
        resolve_video(
            ResolveContext(make_demo=fail_on_demo),
            flag_parser.parse_flags(["--decode_latents", str(path)]),
        )

    def any(self, draw: random.Random) -> tuple[str, bool]:
        """Makes one random input; returns its kind and whether it was accepted."""
        kind = draw.choice(KINDS)
        try:
            attack: Callable[[random.Random], None] = getattr(self, kind)
            attack(draw)
        except InputError as error:
            text = str(error)
            assert text.endswith((".", "?", "!")) and len(text) < 5000, text
            assert not _DEFECT.search(text), text
            return kind, False
        return kind, True


KINDS = ("flags", "record", "line", "latents")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_input(seed: int, tmp_path: Path) -> None:
    draw, attacks = random.Random(seed), Attacks(tmp_path)
    outcomes = Counter(attacks.any(draw) for _ in range(500))
    assert all(outcomes[kind, False] for kind in KINDS), outcomes
