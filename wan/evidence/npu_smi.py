"""Power and clock of an Ascend NPU, from the vendor's command `npu-smi`.

In the tool's words a board ("NPU ID") carries one or two dies ("Chip ID") and a controller ("Mcu").
On an A2 each die reports its power. On an A3 both dies report the power of their board; the table
has it for the first die and "-" for the second. On a 300I Duo only the controller reports it, and
the table has "NA". On an A5 a board is a die, and the outputs have no Chip ID. The parsers were
checked with outputs of npu-smi 20.2 to 26.0.
"""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

from wan.evidence.meter import MeterError, PowerSource, Sample

BELOW_RATED = "clock below the rated one"
_PATIENCE = 10.0  # seconds for one answer, which usually takes less than half a second
_NUMBER = re.compile(r"\d+(\.\d+)?")
_HEADINGS = re.compile(r"^\| NPU +Name +\| Health +\| Power\(W\) ", re.MULTILINE)
_DIE = (
    re.compile(  # the two lines of a die: board | health | power, and die | bus | use of its cores
        r"^\| (\d+) [^|]*\|[^|]*\| (\S+) [^|]*\|\n\| \d+ [^|]*\| (?:NA|[^|]*:[^|]*) *\|[^|]*\|$",
        re.MULTILINE | re.ASCII,
    )
)


class Place(NamedTuple):
    """Where a die is."""

    board: int
    die: int


class Reading(NamedTuple):
    """What one output reports of a die, or of its board; a value that it lacks is None."""

    watts: float | None = None
    mhz: float | None = None
    rated_mhz: float | None = None
    busy: bool | None = None  # the die's cores were in use


def places(text: str) -> dict[int, Place]:
    """Parses `npu-smi info -m`: PyTorch's number of each die -> where it is.

    Raises:
        MeterError: The text holds no such table.
    """
    names: list[str] = []
    found = {}
    for line in _complete(text):
        cells = re.split(r"\s{2,}", line)
        if not names and {"NPU ID", "Chip ID"} <= {*cells}:
            names = cells
        row = dict(zip(names, cells, strict=False))
        logic = row.get("Chip Logic ID", row.get("NPU ID"))  # an A5 names it so
        board, die, index = (_whole(x) for x in (row.get("NPU ID"), row.get("Chip ID"), logic))
        if board is not None and die is not None and index is not None:  # no controller
            found[index] = Place(board, die)
    if not found:
        raise MeterError(f"npu-smi info -m lists no NPU: {_begin(text)}")
    return found


def powers(text: str) -> dict[int, list[float | None]]:
    """Parses `npu-smi info`: board -> what the table has as the power of each of its dies.

    Raises:
        MeterError: The text holds no such table.
    """
    lines = "\n".join(_complete(text))
    headings = _HEADINGS.search(lines)
    found: dict[int, list[float | None]] = {}
    for board, watts in _DIE.findall(lines, headings.end()) if headings else ():
        found.setdefault(int(board), []).append(_positive(watts))
    if not found:
        raise MeterError(f"npu-smi info shows no power of NPUs: {_begin(text)}")
    return found


def from_table(text: str, place: Place) -> Reading:
    """Parses `npu-smi info`: the power of a die, or of its board where only that is reported.

    Raises:
        MeterError: As `powers`, and where the table has neither.
    """
    dies = powers(text).get(place.board, [])
    watts = next((w for w in (*dies[place.die : place.die + 1], *dies) if w is not None), None)
    if watts is None:
        raise MeterError(f"npu-smi info has no power of NPU {place.board}")
    return Reading(watts)


def from_fields(text: str, place: Place) -> Reading:
    """Parses `npu-smi info -t common -i BOARD` or `-t power`: blocks of "name : value" lines.

    A block is a die's, with its Chip ID as the first or the last line, or the controller's.

    Raises:
        MeterError: The text holds no power.
    """
    blocks: list[dict[str, str]] = [{}]
    for line in _complete(text):
        name, colon, value = line.partition(":")
        if colon:
            blocks[-1][" ".join(name.split())] = value.strip()
        elif not line:
            blocks.append({})
    own = next((block for block in blocks if _whole(block.get("Chip ID")) == place.die), None)
    boards = [block for block in blocks if "Chip ID" not in block and _watts(block) is not None]
    if own is None:  # on an A5
        own = next((block for block in boards if "Chip Name" not in block), {})
    watts = next((w for block in (own, *boards) if (w := _watts(block)) is not None), None)
    if watts is None:
        raise MeterError(f"npu-smi has no power of NPU {place.board}: {_begin(text)}")
    usage = _NUMBER.fullmatch(own.get("Aicore Usage Rate(%)", ""))
    return Reading(
        watts=watts,
        mhz=_positive(own.get("Aicore curFreq(MHZ)", "")),
        rated_mhz=_positive(own.get("Aicore Freq(MHZ)", "")),
        busy=None if usage is None else float(usage[0]) > 0,
    )


class NpuSmi(PowerSource):
    """Calls npu-smi once for each reading. Dies that report one power are one device."""

    name = "npu-smi"
    power_is = "the tool's latest value"
    period = 1.0  # the tool refreshes no faster, and a call of it is a process

    def __init__(self, index: int) -> None:
        """Finds out which output of npu-smi has the power of an NPU.

        Args:
            index: The NPU's number among all of the machine.

        Raises:
            MeterError: npu-smi is not there, may not be used, or reports no power.
        """
        self.cpu_elsewhere = 0.0
        found = places(self._answer("info", "-m"))
        if index not in found:
            raise MeterError(f"npu-smi lists no NPU with the logic ID {index}")
        self._place = found[index]
        board = str(self._place.board)
        self.device = f"NPU {board}"
        try:
            dies = powers(self._answer("info")).get(self._place.board, [])
        except MeterError:
            dies = []
        if len(dies) > 1 and None not in dies:  # each has a power of its own
            self.device += f" die {self._place.die}"
        refusals = []
        ways: tuple[tuple[Callable[[str, Place], Reading], tuple[str, ...]], ...] = (
            (from_fields, ("info", "-t", "common", "-i", board)),
            (from_fields, ("info", "-t", "power", "-i", board)),
            (from_table, ("info",)),
        )
        for self._parse, self._arguments in ways:
            try:
                self.rated_mhz = self._reading().rated_mhz
                return
            except MeterError as reason:
                refusals.append(reason)
        raise refusals[0]

    def read(self) -> Sample:
        found, reasons = self._reading(), None
        if found.mhz is not None and found.rated_mhz is not None and found.busy is not None:
            lowered = found.busy and found.mhz < found.rated_mhz  # idle, a low clock is no loss
            reasons = frozenset({BELOW_RATED} if lowered else ())
        return Sample(watts=found.watts, mhz=found.mhz, reasons=reasons)

    def _reading(self) -> Reading:
        return self._parse(self._answer(*self._arguments), self._place)

    def _answer(self, *arguments: str) -> str:
        """Returns what npu-smi prints; raises MeterError where it cannot be called or fails."""
        command = " ".join(["npu-smi", *arguments])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
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
        finally:
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.cpu_elsewhere += after.ru_utime - before.ru_utime
            self.cpu_elsewhere += after.ru_stime - before.ru_stime
        if done.returncode != 0:
            last = (done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise MeterError(f"{command} failed: {last.strip()}")
        return done.stdout


def _complete(text: str) -> list[str]:
    """Returns the lines that have their end: a value that is cut off would be another one."""
    return [line.strip() for line in text[: text.rfind("\n") + 1].splitlines()]


def _watts(block: Mapping[str, str]) -> float | None:
    """Returns the power in a block; the rated power has another name and is not looked for."""
    names = ("NPU Real-time Power(W)", "Power Dissipation(W)")
    return next((w for name in names if (w := _positive(block.get(name, ""))) is not None), None)


def _positive(text: str) -> float | None:
    """Returns a value above 0: virtual NPUs show 0 where they do not know it; others "-", "NA"."""
    return float(text) or None if _NUMBER.fullmatch(text) else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _begin(text: str) -> str:
    """Returns how an answer that cannot be used begins, for an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("+-=|")]
    return f"it says {lines[0][:60]!r}" if lines else "it says nothing"
