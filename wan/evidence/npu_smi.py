"""Power and clock of an Ascend NPU, from the vendor's command `npu-smi`.

In the tool's output a board ("NPU ID") has one or two dies ("Chip ID") and a controller ("Mcu").
A2: each die reports its power. A3: both dies report the power of their board; the table has it for
the first die and "-" for the second. 300I Duo: only the controller reports power, and the table has
"NA". A5: a board is one die, and the outputs have no Chip ID. The parsers were checked with outputs
of npu-smi 20.2 to 26.0.
"""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

from wan.evidence.meter import MeterError, PowerSource, Sample

BELOW_RATED = "clock below the rated one"
_PATIENCE = 10.0  # a call usually takes less than half a second
_NUMBER = re.compile(r"\d+(\.\d+)?")
_HEADINGS = re.compile(r"^\| NPU +Name +\| Health +\| Power\(W\) ", re.MULTILINE)
_DIE = re.compile(  # two lines per die: board | health | power, and die | bus | core usage
    r"^\| (\d+) [^|]*\|[^|]*\| (\S+) [^|]*\|\n\| \d+ [^|]*\| (?:NA|[^|]*:[^|]*) *\|[^|]*\|$",
    re.MULTILINE | re.ASCII,
)


class Place(NamedTuple):
    """Board and die number of an NPU."""

    board: int
    die: int


class Reading(NamedTuple):
    """Power and clock of a die or its board; values missing from the output are None."""

    watts: float | None = None
    mhz: float | None = None
    rated_mhz: float | None = None
    busy: bool | None = None  # AI core usage is above 0


def places(text: str) -> dict[int, Place]:
    """Parses `npu-smi info -m` into {PyTorch's device index: location}.

    Raises:
        MeterError: The text has no such table.
    """
    names: list[str] = []
    found = {}
    for line in _complete(text):
        cells = re.split(r"\s{2,}", line)
        if not names and {"NPU ID", "Chip ID"} <= {*cells}:
            names = cells
        row = dict(zip(names, cells, strict=False))
        logic = row.get("Chip Logic ID", row.get("NPU ID"))  # A5
        board, die, index = (_whole(x) for x in (row.get("NPU ID"), row.get("Chip ID"), logic))
        if board is not None and die is not None and index is not None:  # skips controllers
            found[index] = Place(board, die)
    if not found:
        raise MeterError(f"npu-smi info -m lists no NPU: {_begin(text)}")
    return found


def powers(text: str) -> dict[int, list[float | None]]:
    """Parses `npu-smi info` into {board: power of each die in watts, or None}.

    Raises:
        MeterError: The text has no such table.
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
    """Parses the power of a die, or else of its board, from `npu-smi info`.

    Raises:
        MeterError: The text has no such table, or the table has neither power.
    """
    dies = powers(text).get(place.board, [])
    watts = next((w for w in (*dies[place.die : place.die + 1], *dies) if w is not None), None)
    if watts is None:
        raise MeterError(f"npu-smi info has no power of NPU {place.board}")
    return Reading(watts)


def from_fields(text: str, place: Place) -> Reading:
    """Parses `npu-smi info -t common -i BOARD` or `-t power`: blocks of "name : value" lines.

    A die's block has its Chip ID in the first or the last line; the controller's has none.

    Raises:
        MeterError: The text has no power.
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
    if own is None:  # A5
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
    """Reads an NPU by one npu-smi call per sample; dies that share one power are one device."""

    name = "npu-smi"
    power_is = "the tool's latest value"
    period = 1.0  # the tool refreshes no faster, and each call starts a process

    def __init__(self, index: int) -> None:
        """Finds the npu-smi query that reports the power of an NPU.

        Args:
            index: Index among all NPUs of the machine, also invisible ones.

        Raises:
            MeterError: npu-smi is missing, is not permitted, or reports no power.
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
        if len(dies) > 1 and None not in dies:  # power is measured per die
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
            lowered = found.busy and found.mhz < found.rated_mhz  # idle is not throttling
            reasons = frozenset({BELOW_RATED} if lowered else ())
        return Sample(watts=found.watts, mhz=found.mhz, reasons=reasons)

    def _reading(self) -> Reading:
        return self._parse(self._answer(*self._arguments), self._place)

    def _answer(self, *arguments: str) -> str:
        """Returns npu-smi's output; raises MeterError if it cannot be called or fails."""
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
    """Splits into stripped lines, without an unterminated last line: its value may be cut."""
    return [line.strip() for line in text[: text.rfind("\n") + 1].splitlines()]


def _watts(block: Mapping[str, str]) -> float | None:
    """Returns the measured power of a block in watts, not its rated power."""
    names = ("NPU Real-time Power(W)", "Power Dissipation(W)")
    return next((w for name in names if (w := _positive(block.get(name, ""))) is not None), None)


def _positive(text: str) -> float | None:
    """Parses a number above 0; None for 0 (a virtual NPU's unknown value), "-" and "NA"."""
    return float(text) or None if _NUMBER.fullmatch(text) else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _begin(text: str) -> str:
    """Quotes the first line of an unusable output, for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("+-=|")]
    return f"it says {lines[0][:60]!r}" if lines else "it says nothing"
