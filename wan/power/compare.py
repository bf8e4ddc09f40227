"""`python -m wan.power compare`: compares the modes on this machine and recommends one.

    torchrun --nproc_per_node=8 -m wan.power compare --out DIR -- ARGUMENTS OF generate.py

Networks are loaded once and stay in memory. After a warm-up of both experts every variant makes the
same video in every round, in random order, and its time is divided by the time of the baseline in
the same round. Two controls show whether the rests help or the order of exchanges. A short traced
run of each variant shows its order and the lengths of its rests.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wan import env, log
from wan.cli import main as command
from wan.cli.flags import Parser, parse
from wan.log import logger
from wan.modules.schedule import MODES
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
"""Flags of generate.py that a comparison sets itself, or that do not go with it."""


@dataclass(frozen=True)
class Variant:
    """One way of making the video that is compared.

    Attributes:
        name: For tables and files.
        comm_type: A key of `schedule.MODES`.
        chunks: Most head chunks of a call; None: the number of the mode.
        rests: This is the control with the baseline's exchanges and rests between head chunks.
        locked: This is the control with the baseline at a locked clock.
    """

    name: str
    comm_type: int
    chunks: int | None = None
    rests: bool = False
    locked: bool = False

    @property
    def is_control(self) -> bool:
        return self.rests or self.locked

    @property
    def slug(self) -> str:
        """The name in files and folders."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")


def variants(modes: Sequence[int], chunks: Sequence[int]) -> list[Variant]:
    """The baseline, the modes, InsertComm with other numbers of chunks, and the controls."""
    found = [Variant(MODES[mode].name, mode) for mode in sorted({0, *modes})]
    found += [Variant(f"InsertComm, {n} chunks", 1, n) for n in chunks]
    if 1 in modes:  # whose rests the control has
        found.append(Variant("control: rests without exchanges", 0, rests=True))
    return [*found, Variant("control: baseline, locked clock", 0, locked=True)]


@dataclass(frozen=True)
class Options:
    """Options of the comparison itself.

    Attributes:
        out: Folder of the results.
        repeats: Number of rounds.
        variants: What is compared, the baseline first.
        order: Seed of the random order.
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
            raise InputError(f"`{name}`", None, "is set by compare itself", "drop it")
    if env.world_size() == 1:
        raise InputError(
            "One process",
            None,
            "has no exchanges to compare",
            "start torchrun --nproc_per_node=2 -m wan.power compare ..., a process for each device",
        )
    if "offload_model" not in given:  # networks stay between the runs
        arguments += ["--offload_model", "false"]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise InputError("--out", options.out, why, "name another folder") from error
    arguments += ["--save_file", str(options.out / "baseline.mp4")]
    return command.carry_out(arguments, partial(_compare, options))


def _compare(options: Options, run: Run, team: Team | None) -> int:
    assert team is not None
    if run.setup.parallel.ulysses_size == 1:
        raise InputError("`ulysses_size`", 1, "has no exchanges to compare", "give a larger one")
    from wan.power.rounds import Rounds
    from wan.power.summary import write

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
    rounds.close()
    if team.is_main:
        write(options, run, rounds.found, team.device.name())
    return 0


def _options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The options of the comparison, and the arguments of generate.py behind "--"."""
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

    def each(read: Reader, name: str, listed: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(read(name, part) for part in listed.split(",")))

    chunks = each(integer(1, 4096), "--chunks", options.chunks) if options.chunks else ()
    found = variants(each(choice(*MODES), "--modes", options.modes), chunks)
    made = Options(
        out=options.out,
        repeats=integer(5, 10_000)("--repeats", options.repeats),
        variants=tuple(found),
        order=integer(0, 2**32)("--order", options.order),
        words=f"compare {' '.join(argv)}",
    )
    return made, [*PRESETS.get(options.preset, ()), *behind]
