"""Power and clock of an Ascend NPU, from the vendor's command `npu-smi`.

Words of the tool: a board ("NPU ID") carries one or two dies ("Chip ID") and a controller ("Mcu").
A2: the die tells its power. A3: both dies tell that of their board; the table has it for the first
one and "-" for the second. 300I Duo: only the controller tells it, and the table says "NA". A5: a
board is a die, and the outputs name no Chip ID. Checked with outputs of npu-smi 20.2 to 26.0.
"""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wan.power.meter import MeterError, PowerSource, Sample

BELOW_RATED = "clock below the rated one"
_PATIENCE = 10.0  # seconds for one answer, which usually takes less than a half
_NUMBER = re.compile(r"\d+(\.\d+)?")
_POWER = ("NPU Real-time Power(W)", "Power Dissipation(W)")  # not the rated one


@dataclass(frozen=True)
class Place:
    """Where a die is."""

    board: int
    die: int


@dataclass(frozen=True)
class Reading:
    """What one output tells of a die, or of its board; None where it does not.

    busy: The die's cores were in use.
    """

    watts: float | None = None
    mhz: float | None = None
    rated_mhz: float | None = None
    busy: bool | None = None


def places(text: str) -> dict[int, Place]:
    """Of `npu-smi info -m`: PyTorch's number of each die -> where it is.

    Raises:
        MeterError: Where the text holds no such table.
    """
    lines = [re.split(r"\s{2,}", line.strip()) for line in _complete(text)]
    heads = [number for number, line in enumerate(lines) if {"NPU ID", "Chip ID"} <= {*line}]
    found = {}
    for head in heads[:1]:
        names = lines[head]
        for line in lines[head + 1 :]:
            row = dict(zip(names, line, strict=False))
            board, die = _whole(row.get("NPU ID")), _whole(row.get("Chip ID"))
            logic = _whole(row.get("Chip Logic ID", row.get("NPU ID")))  # an A5 names it so
            if board is not None and die is not None and logic is not None:  # no controller
                found[logic] = Place(board, die)
    if not found:
        raise MeterError(f"`npu-smi info -m` lists no NPU: {_begin(text)}")
    return found


def powers(text: str) -> dict[int, list[float | None]]:
    """Of `npu-smi info`: of each board, what the table has as the power of each of its dies.

    Raises:
        MeterError: Where the text holds no such table.
    """
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _table(text)]
    column = next((n for n, cell in enumerate(rows[0]) if cell.startswith("Power(W)")), None)
    found: dict[int, list[float | None]] = {}
    for first, second in zip(rows[1:], rows[2:], strict=False):  # the two lines of a die
        if column is None or len(first) != len(rows[0]) or len(second) != len(rows[0]):
            continue
        board = _whole("".join(first[0].split()[:1]))
        if board is not None and not _bus(first[1]) and _bus(second[1]):
            watts = _positive("".join(first[column].split()[:1]))
            found.setdefault(board, []).append(watts)
    if not found:
        raise MeterError(f"`npu-smi info` shows no power of NPUs: {_begin(text)}")
    return found


def from_table(text: str, place: Place) -> Reading:
    """Of `npu-smi info`: the power of a die, or of its board where only that is told.

    Raises:
        MeterError: As `powers`, and where the table has neither.
    """
    told = powers(text).get(place.board, [])
    own = told[place.die : place.die + 1]
    watts = next((watts for watts in (*own, *told) if watts is not None), None)
    if watts is None:
        raise MeterError(f"`npu-smi info` tells no power of NPU {place.board}")
    return Reading(watts=watts)


def from_fields(text: str, place: Place) -> Reading:
    """Of `npu-smi info -t common -i BOARD` or `-t power`: blocks of "name : value" lines.

    A block is a die's, with its Chip ID as the first or the last line, or the controller's.

    Raises:
        MeterError: Where the text tells no power.
    """
    blocks = [_fields(block) for block in re.split(r"\n\s*\n", "\n".join(_complete(text)))]
    own = next((block for block in blocks if _whole(block.get("Chip ID")) == place.die), None)
    if own is None:  # an A5 names none
        own = next((b for b in blocks if "Chip ID" not in b and "Chip Name" not in b and _w(b)), {})
    boards = (block for block in blocks if "Chip ID" not in block)  # the controller's
    watts = next((w for block in (own, *boards) if (w := _w(block)) is not None), None)
    if watts is None:
        raise MeterError(f"npu-smi tells no power of NPU {place.board}: {_begin(text)}")
    usage = _NUMBER.fullmatch(own.get("Aicore Usage Rate(%)", ""))
    return Reading(
        watts=watts,
        mhz=_positive(own.get("Aicore curFreq(MHZ)", "")),
        rated_mhz=_positive(own.get("Aicore Freq(MHZ)", "")),
        busy=None if usage is None else float(usage[0]) > 0,
    )


def run(*arguments: str) -> str:
    """What npu-smi answers. MeterError where it cannot be called or fails."""
    command = f"`npu-smi {' '.join(arguments)}`"
    try:
        done = subprocess.run(
            ["npu-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise MeterError(
            "there is no npu-smi on the PATH; in a container, mount /usr/local/bin/npu-smi and "
            "/usr/local/dcmi"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MeterError(f"{command} has not answered within {_PATIENCE:g} s") from error
    except OSError as error:
        raise MeterError(f"{command} cannot be called ({error.strerror or error})") from error
    if done.returncode != 0:
        last = [line.strip() for line in done.stdout.splitlines() if line.strip()][-1:]
        raise MeterError(f"{command} failed: {''.join(last) or f'exit code {done.returncode}'}")
    return done.stdout


class NpuSmi(PowerSource):
    """One call of npu-smi per reading. Dies that are told one power are one device."""

    name = "npu-smi"
    power_is = "the tool's latest value"
    period = 1.0  # the tool refreshes no faster, and a call of it is a process

    def __init__(self, index: int) -> None:
        """index: of the NPU among all that this process could see.

        Raises:
            MeterError: Where npu-smi is not there, may not be used, or tells no power.
        """
        self.cpu_elsewhere = 0.0
        found = places(self._answer("info", "-m"))
        if index not in found:
            raise MeterError(f"npu-smi lists no NPU with the logic ID {index}")
        self._place = found[index]
        board = str(self._place.board)
        self.device = f"NPU {board}"
        if self._alone():
            self.device += f" die {self._place.die}"
        ways: tuple[tuple[Callable[[str, Place], Reading], tuple[str, ...]], ...] = (
            (from_fields, ("info", "-t", "common", "-i", board)),
            (from_fields, ("info", "-t", "power", "-i", board)),
            (from_table, ("info",)),
        )
        refusals = []
        for self._parse, self._arguments in ways:
            try:
                self.rated_mhz = self._reading().rated_mhz
                return
            except MeterError as reason:
                refusals.append(str(reason))
        raise MeterError(refusals[0])

    def _alone(self) -> bool:
        """Whether the die's power is its own, though another die is on its board."""
        try:
            told = powers(self._answer("info")).get(self._place.board, [])
        except MeterError:
            return False
        return len(told) > 1 and None not in told

    def read(self) -> Sample:
        found, reasons = self._reading(), None
        if found.mhz is not None and found.rated_mhz is not None and found.busy is not None:
            lowered = found.busy and found.mhz < found.rated_mhz  # idle, a low clock is no loss
            reasons = frozenset({BELOW_RATED} if lowered else ())
        return Sample(watts=found.watts, mhz=found.mhz, reasons=reasons)

    def _reading(self) -> Reading:
        return self._parse(self._answer(*self._arguments), self._place)

    def _answer(self, *arguments: str) -> str:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            return run(*arguments)
        finally:
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.cpu_elsewhere += after.ru_utime - before.ru_utime
            self.cpu_elsewhere += after.ru_stime - before.ru_stime


def _table(text: str) -> Sequence[str]:
    """The lines of the table of NPUs without its rules, from its headings on."""
    lines = [line.strip() for line in _complete(text) if line.strip().startswith("|")]
    heads = [n for n, line in enumerate(lines) if "Health" in line and "Name" in line]
    if not heads:
        raise MeterError(f"`npu-smi info` shows no table of NPUs: {_begin(text)}")
    ends = [n for n, line in enumerate(lines) if "Process" in line and n > heads[0]]
    return lines[heads[0] : ends[0] if ends else None]


def _bus(cell: str) -> bool:
    return ":" in cell or cell == "NA"


def _complete(text: str) -> Sequence[str]:
    """The lines that have their end: a value that is cut off would be another one."""
    return text[: text.rfind("\n") + 1].splitlines()


def _fields(block: str) -> Mapping[str, str]:
    pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
    return {" ".join(name.split()): value.strip() for name, value in pairs}


def _w(block: Mapping[str, str]) -> float | None:
    return next((w for name in _POWER if (w := _positive(block.get(name, ""))) is not None), None)


def _positive(text: str) -> float | None:
    """A value above 0: virtual NPUs show 0 where they do not know it; others "-" or "NA"."""
    found = _NUMBER.fullmatch(text)
    return float(text) or None if found else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _begin(text: str) -> str:
    """How an answer that cannot be used begins, for a reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("+-=|")]
    return f"it says {lines[0][:60]!r}" if lines else "it says nothing"
