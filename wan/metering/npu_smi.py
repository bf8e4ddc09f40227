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

from wan.metering.power_source import MeterError, PowerSource, Sample

BELOW_RATED = "clock below the rated one"
_TIMEOUT_SECONDS = 10.0  # a call usually takes less than half a second
_NUMBER_PATTERN = re.compile(r"\d+(\.\d+)?")
_TABLE_HEADER_PATTERN = re.compile(r"^\| NPU +Name +\| Health +\| Power\(W\) ", re.MULTILINE)
_DIE_ROW_PATTERN = (
    re.compile(  # two lines per die: board | health | power, and die | bus | core usage
        r"^\| (\d+) [^|]*\|[^|]*\| (\S+) [^|]*\|\n\| \d+ [^|]*\| (?:NA|[^|]*:[^|]*) *\|[^|]*\|$",
        re.MULTILINE | re.ASCII,
    )
)


class DieLocation(NamedTuple):
    """Board and die number of an NPU."""

    board: int
    die: int


class DieReading(NamedTuple):
    """Power and clock of a die or its board; values missing from the output are None."""

    watts: float | None = None
    mhz: float | None = None
    rated_mhz: float | None = None
    busy: bool | None = None  # AI core usage is above 0


def parse_die_locations(text: str) -> dict[int, DieLocation]:
    """Parses `npu-smi info -m` into {PyTorch's device index: location}.

    Raises:
        MeterError: The text has no such table.
    """
    header: list[str] = []
    locations = {}
    for line in _split_complete_lines(text):
        cells = re.split(r"\s{2,}", line)
        if not header and {"NPU ID", "Chip ID"} <= {*cells}:
            header = cells
        row = dict(zip(header, cells, strict=False))
        logic_id = row.get("Chip Logic ID", row.get("NPU ID"))  # A5
        board, die, index = (
            _parse_whole_number(x) for x in (row.get("NPU ID"), row.get("Chip ID"), logic_id)
        )
        if board is not None and die is not None and index is not None:  # skips controllers
            locations[index] = DieLocation(board, die)
    if not locations:
        raise MeterError(f"npu-smi info -m lists no NPU: {_quote_first_line(text)}")
    return locations


def parse_die_powers(text: str) -> dict[int, list[float | None]]:
    """Parses `npu-smi info` into {board: power of each die in watts, or None}.

    Raises:
        MeterError: The text has no such table.
    """
    lines = "\n".join(_split_complete_lines(text))
    header_match = _TABLE_HEADER_PATTERN.search(lines)
    powers_by_board: dict[int, list[float | None]] = {}
    for board, watts in _DIE_ROW_PATTERN.findall(lines, header_match.end()) if header_match else ():
        powers_by_board.setdefault(int(board), []).append(_parse_positive_number(watts))
    if not powers_by_board:
        raise MeterError(f"npu-smi info shows no power of NPUs: {_quote_first_line(text)}")
    return powers_by_board


def parse_power_table(text: str, location: DieLocation) -> DieReading:
    """Parses the power of a die, or else of its board, from `npu-smi info`.

    Raises:
        MeterError: The text has no such table, or the table has neither power.
    """
    die_powers = parse_die_powers(text).get(location.board, [])
    powers = (*die_powers[location.die : location.die + 1], *die_powers)
    watts = next((w for w in powers if w is not None), None)
    if watts is None:
        raise MeterError(f"npu-smi info has no power of NPU {location.board}")
    return DieReading(watts)


def parse_power_fields(text: str, location: DieLocation) -> DieReading:
    """Parses `npu-smi info -t common -i BOARD` or `-t power`: blocks of "name : value" lines.

    A die's block has its Chip ID in the first or the last line; the controller's has none.

    Raises:
        MeterError: The text has no power.
    """
    blocks: list[dict[str, str]] = [{}]
    for line in _split_complete_lines(text):
        name, colon, value = line.partition(":")
        if colon:
            blocks[-1][" ".join(name.split())] = value.strip()
        elif not line:
            blocks.append({})
    die_blocks = (b for b in blocks if _parse_whole_number(b.get("Chip ID")) == location.die)
    die_block = next(die_blocks, None)
    board_blocks = [
        block for block in blocks if "Chip ID" not in block and _read_block_power(block) is not None
    ]
    if die_block is None:  # A5
        die_block = next((block for block in board_blocks if "Chip Name" not in block), {})
    powers = map(_read_block_power, (die_block, *board_blocks))
    watts = next((w for w in powers if w is not None), None)
    if watts is None:
        raise MeterError(f"npu-smi has no power of NPU {location.board}: {_quote_first_line(text)}")
    usage = _NUMBER_PATTERN.fullmatch(die_block.get("Aicore Usage Rate(%)", ""))
    return DieReading(
        watts=watts,
        mhz=_parse_positive_number(die_block.get("Aicore curFreq(MHZ)", "")),
        rated_mhz=_parse_positive_number(die_block.get("Aicore Freq(MHZ)", "")),
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
        self.external_cpu_seconds = 0.0
        locations = parse_die_locations(self._run_npu_smi("info", "-m"))
        if index not in locations:
            raise MeterError(f"npu-smi lists no NPU with the logic ID {index}")
        self._location = locations[index]
        board = str(self._location.board)
        self.device = f"NPU {board}"
        try:
            die_powers = parse_die_powers(self._run_npu_smi("info")).get(self._location.board, [])
        except MeterError:
            die_powers = []
        if len(die_powers) > 1 and None not in die_powers:  # power is measured per die
            self.device += f" die {self._location.die}"
        errors = []
        queries: tuple[tuple[Callable[[str, DieLocation], DieReading], tuple[str, ...]], ...] = (
            (parse_power_fields, ("info", "-t", "common", "-i", board)),
            (parse_power_fields, ("info", "-t", "power", "-i", board)),
            (parse_power_table, ("info",)),
        )
        for self._parse, self._arguments in queries:
            try:
                self.rated_mhz = self._take_reading().rated_mhz
                return
            except MeterError as error:
                errors.append(error)
        raise errors[0]

    def read_sample(self) -> Sample:
        reading, reasons = self._take_reading(), None
        if reading.mhz is not None and reading.rated_mhz is not None and reading.busy is not None:
            is_lowered = reading.busy and reading.mhz < reading.rated_mhz  # idle is not throttling
            reasons = frozenset({BELOW_RATED} if is_lowered else ())
        return Sample(watts=reading.watts, mhz=reading.mhz, reasons=reasons)

    def _take_reading(self) -> DieReading:
        return self._parse(self._run_npu_smi(*self._arguments), self._location)

    def _run_npu_smi(self, *arguments: str) -> str:
        """Returns npu-smi's output; raises MeterError if it cannot be called or fails."""
        command = " ".join(["npu-smi", *arguments])
        usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            result = subprocess.run(
                ["npu-smi", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_SECONDS,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise MeterError(
                "there is no npu-smi on the PATH; in a container, mount /usr/local/bin/npu-smi and "
                "/usr/local/dcmi"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise MeterError(f"{command} has not answered within {_TIMEOUT_SECONDS:g} s") from error
        except OSError as error:
            raise MeterError(f"{command} cannot be called ({error.strerror or error})") from error
        finally:
            usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
            self.external_cpu_seconds += usage_after.ru_utime - usage_before.ru_utime
            self.external_cpu_seconds += usage_after.ru_stime - usage_before.ru_stime
        if result.returncode != 0:
            last_line = (result.stdout.strip() or f"exit code {result.returncode}").splitlines()[-1]
            raise MeterError(f"{command} failed: {last_line.strip()}")
        return result.stdout


def _split_complete_lines(text: str) -> list[str]:
    """Splits into stripped lines, without an unterminated last line: its value may be cut."""
    return [line.strip() for line in text[: text.rfind("\n") + 1].splitlines()]


def _read_block_power(block: Mapping[str, str]) -> float | None:
    """Returns the measured power of a block in watts, not its rated power."""
    names = ("NPU Real-time Power(W)", "Power Dissipation(W)")
    numbers = (_parse_positive_number(block.get(name, "")) for name in names)
    return next((number for number in numbers if number is not None), None)


def _parse_positive_number(text: str) -> float | None:
    """Parses a number above 0; None for 0 (a virtual NPU's unknown value), "-" and "NA"."""
    return float(text) or None if _NUMBER_PATTERN.fullmatch(text) else None


def _parse_whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _quote_first_line(text: str) -> str:
    """Quotes the first line of an unusable output, for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("+-=|")]
    return f"it says {lines[0][:60]!r}" if lines else "it says nothing"
