"""Named ranges of a sampling step, on request: its exchanges, kernels, products and decisions.

Code says what it does by `with trace.span("a2a", x, what="q"):`. While nothing records, which is
nearly always, that is one comparison and a shared context manager that does nothing. A `Recorder`
is installed around a run and records the steps that it wants. Its clock is the host's or, on
accelerators, events on the stream, which are read when the step has ended: nothing waits inside it.

Importing it imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Facts = dict[str, object]
"""What is known of a range, as JSON has it; a callable is called when the step has ended."""
Later = Callable[[], int]
"""A point in time, nanoseconds of `time.perf_counter_ns`; known when the step has ended."""

_NOTHING = nullcontext()
PLACES = ("step", "expert", "branch", "layer", "chunk", "block")
"""Facts that also hold for the ranges inside."""


@dataclass(frozen=True, slots=True)
class Event:
    """A range that has ended.

    Attributes:
        kind: What was done.
        facts: Where and with what, `PLACES` among them.
        begin: Nanoseconds of the clock.
        end: Likewise.
        issued: When the host came to it; `begin` where the host's clock counts.
    """

    kind: str
    facts: Facts
    begin: int
    end: int
    issued: int

    @property
    def length(self) -> int:
        """Nanoseconds."""
        return self.end - self.begin


class Clock(Protocol):
    """When things happen, on the host or on a device."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    def start(self) -> None:
        """A recorded step begins; this may wait for the device."""
        ...

    def now(self) -> Later: ...

    def stop(self) -> None:
        """The step has been given to the device; waits for its end."""
        ...


class HostClock:
    """Implements `Clock` where a call returns when it is done."""

    name = "host clock"

    def start(self) -> None: ...

    def now(self) -> Later:
        found = time.perf_counter_ns()
        return lambda: found

    def stop(self) -> None: ...


class Recorder:
    """Records the ranges of some steps.

    Args:
        steps: Which ones.
        clock: Says when.
        done: Gets the events of a step, in the order in which they began, when it has ended.
        around: around(step) is entered around a recorded step.
        ranges: ranges(name) is entered in every range, for a profiler that runs meanwhile.
    """

    def __init__(
        self,
        steps: Collection[int],
        clock: Clock,
        done: Callable[[list[Event]], None],
        around: Callable[[int], AbstractContextManager[None]] = lambda _: _NOTHING,
        ranges: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.steps, self.clock, self._ranges = steps, clock, ranges
        self._done, self._around = done, around
        self._spans: list[_Span] = []
        self._places: list[Facts] = [{}]

    @contextmanager
    def step(self, index: int, expert: str) -> Iterator[None]:
        """Records what happens inside."""
        global _active
        with self._around(index):
            self.clock.start()
            self._spans, self._places, _active = [], [{}], self
            try:
                with span("step", step=index, expert=expert):
                    yield
            finally:
                _active = None
            self.clock.stop()
        self._done([one.event() for one in self._spans])

    def shown(self, name: str) -> AbstractContextManager[object]:
        """The same range for a profiler."""
        return _NOTHING if self._ranges is None else self._ranges(name)

    def enter(self, places: Facts, begun: _Span | None = None) -> Facts:
        """A range begins, or only its places hold; returns what holds outside."""
        outside = self._places[-1]
        self._places.append({**outside, **places})
        if begun is not None:
            self._spans.append(begun)
        return outside

    def leave(self) -> None:
        self._places.pop()


class _Span:
    """A range while it is recorded."""

    __slots__ = ("_begin", "_end", "_facts", "_issued", "_kind", "_range", "_recorder")

    def __init__(self, recorder: Recorder, kind: str, facts: Facts) -> None:
        self._recorder, self._kind, self._facts = recorder, kind, facts

    def __enter__(self) -> None:
        places = {name: value for name, value in self._facts.items() if name in PLACES}
        self._range = self._recorder.shown(label(self._kind, self._facts))
        self._range.__enter__()
        self._facts = {**self._recorder.enter(places, self), **self._facts}
        self._issued = time.perf_counter_ns()
        self._begin = self._end = self._recorder.clock.now()

    def __exit__(self, *_: object) -> None:
        self._end = self._recorder.clock.now()
        self._recorder.leave()
        self._range.__exit__(None, None, None)

    def event(self) -> Event:
        facts = {name: x() if callable(x) else x for name, x in self._facts.items()}
        return Event(self._kind, facts, self._begin(), self._end(), self._issued)


def label(kind: str, facts: Facts) -> str:
    """What a viewer writes on a range: `a2a q`, `layer 3`."""
    known = {"step", "branch", "layer"} & {kind} | {"what", "decision"}
    return " ".join([kind, *(str(facts[name]) for name in sorted(known) if name in facts)])


class _Surroundings:
    """Facts that hold inside, without a range of their own."""

    def __init__(self, recorder: Recorder, facts: Facts) -> None:
        self._recorder, self._facts = recorder, facts

    def __enter__(self) -> None:
        self._recorder.enter(self._facts)

    def __exit__(self, *_: object) -> None:
        self._recorder.leave()


_installed: Recorder | None = None  # waits for its steps
_active: Recorder | None = None  # is in one


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Inside, this recorder is asked at every step; None: nothing is recorded."""
    global _installed
    outside, _installed = _installed, recorder
    try:
        yield
    finally:
        _installed = outside


def step(index: int, expert: str) -> AbstractContextManager[None]:
    """A sampling step, from the first forward pass to the solver's result."""
    if _installed is None or index not in _installed.steps:
        return _NOTHING
    return _installed.step(index, expert)


def span(
    kind: str, tensor: Tensor | None = None, /, **facts: object
) -> AbstractContextManager[None]:
    """A range. tensor: what is sent or computed with; its bytes, shape and dtype are noted."""
    if _active is None:
        return _NOTHING
    if tensor is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts |= {"bytes": tensor.nbytes, "shape": list(tensor.shape), "dtype": dtype}
    return _Span(_active, kind, facts)


def place(**facts: object) -> AbstractContextManager[None]:
    """Some of `PLACES`, which hold for all ranges inside."""
    return _NOTHING if _active is None else _Surroundings(_active, facts)


def mark(kind: str, **facts: object) -> None:
    """A point in time: something was decided."""
    with span(kind, **facts):
        pass
