"""`python -m wan.power compare`: the modes side by side on this machine, and a recommendation.

    torchrun --nproc_per_node=8 -m wan.power compare --out DIR -- ARGUMENTS OF generate.py

Networks are loaded once and stay. After a warm-up of both experts, every variant makes the same
video in every round, in random order; the baseline's times of a round are what the others' are
compared with. Two controls tell rest from overlap. One short traced run of each variant shows its
schedule and the lengths of its rests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from wan import env, log
from wan.cli import main as command
from wan.cli.flags import Parser, parse
from wan.log import logger
from wan.modules.schedule import MODES
from wan.power.side_by_side import Variant, variants
from wan.run import Run
from wan.settings.errors import InputError
from wan.settings.values import Reader, choice, integer

if TYPE_CHECKING:
    from wan.distributed.mesh import Team

PRESETS = {  # of the arguments behind --; what is given there comes after and wins
    "mlperf": [  # Inference v6.0, text to video
        *("--task", "t2v-A14B", "--size", "1280*720", "--frame_num", "81"),
        *("--sample_steps", "20", "--sample_guide_scale", "3.0,4.0", "--base_seed", "42"),
    ],
}
_DECIDED = (
    *("comm_type", "chunks", "fa_alltoall_overlap", "power", "trace", "plan", "compile"),
    *("decode_latents", "from_json", "use_prompt_extend", "prompt_file", "skip_existing"),
)


@dataclass(frozen=True)
class Options:
    """Of the comparison itself.

    Attributes:
        out: Folder of the results.
        repeats: Rounds.
        variants: What is compared, the baseline first.
        order: Seed of the order in a round.
        words: The command line, for the report.
    """

    out: Path
    repeats: int
    variants: tuple[Variant, ...]
    order: int
    words: str


def main(argv: Sequence[str]) -> int:
    """Exit codes are those of generate.py."""
    log.setup(env.rank() == 0)
    options, arguments = _options(argv)
    given = parse(arguments)
    for name in _DECIDED:
        if name in given:
            raise InputError(f"--{name} is not for compare, which decides about it; drop it.")
    if env.world_size() == 1:
        raise InputError(
            "compare needs exchanges to compare, and one process has none: start it as torchrun "
            "--nproc_per_node=2 -m wan.power compare ..., with as many processes as devices."
        )
    if "offload_model" not in given:  # networks stay between the runs
        arguments += ["--offload_model", "false"]
    if find_spec("matplotlib") is None:
        raise InputError("compare draws plots: pip install -r requirements-power.txt")
    _make_folder(options.out)
    arguments += ["--save_file", str(options.out / "baseline.mp4")]
    return command.carry_out(arguments, partial(_compare, options))


def _compare(options: Options, run: Run, team: Team | None) -> int:
    assert team is not None
    if run.setup.parallel.ulysses_size == 1:
        raise InputError(
            "compare needs --ulysses_size above 1: the modes differ in the exchanges of heads."
        )
    from wan.power.rounds import Rounds
    from wan.power.summary import Summary

    attention, compared = run.setup.attention, options.variants
    if attention.quant_alltoall or attention.use_rainfusion:  # which go with a call's exchanges
        logger.info("No run with rests alone: not with --quant_alltoall or --use_rainfusion.")
        compared = tuple(variant for variant in compared if not variant.rests)
    rounds = Rounds(run, team, compared, options.out)
    rounds.prepare()
    shuffled = random.Random(options.order)
    for number in range(options.repeats):
        order = shuffled.sample(rounds.variants, len(rounds.variants))
        for variant in order:
            seconds = rounds.measure(variant)
            place = number + 1, options.repeats
            logger.info("Round %d of %d, %s: %.2f s (measured).", *place, variant.name, seconds)
    rounds.calibration()
    rounds.close()
    if team.is_main:
        Summary(options, run, rounds.found, team.device.name()).write()
    return 0


def _options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Those of the comparison, and those of generate.py."""
    own, behind = list(argv), []
    if "--" in argv:
        cut = own.index("--")
        own, behind = own[:cut], own[cut + 1 :]
    parser = Parser(
        prog="wan.power compare",
        description=(__doc__ or "").splitlines()[0],
        usage="torchrun --nproc_per_node=N -m wan.power compare --out DIR [...] -- ARGUMENTS",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--repeats", default="5", metavar="N", help="rounds, from 5 (default)")
    parser.add_argument("--modes", default="0,1,2", metavar="LIST", help="default 0,1,2")
    parser.add_argument("--chunks", metavar="LIST", help="also InsertComm in so many head chunks")
    parser.add_argument("--preset", choices=PRESETS, help="a published workload")
    parser.add_argument("--order", default="0", metavar="SEED", help="of the random order")
    options = parser.parse_args(own)
    chunks = _each(integer(1, 4096), "--chunks", options.chunks) if options.chunks else ()
    found = variants(_each(choice(*MODES), "--modes", options.modes), chunks)
    made = Options(
        out=options.out,
        repeats=integer(5, 10_000)("--repeats", options.repeats),
        variants=tuple(found),
        order=integer(0, 2**32)("--order", options.order),
        words=f"compare {' '.join(argv)}",
    )
    return made, [*PRESETS.get(options.preset, ()), *behind]


def _each(read: Reader, name: str, listed: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(read(name, part) for part in listed.split(",")))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {folder} cannot be made ({error.strerror}); name another folder."
        ) from error
