"""Records named spans of a sampling step: exchanges, kernels, matrix products and decisions.

Instrumented code is `with trace.record_span("a2a", x, what="q"):`. Without an active recorder that
is one comparison and a shared null context. `use_recorder` installs a `Recorder` for a run, which
records some of its steps. Its clock is the host's or, on accelerators, events on the stream, which
are read after the step, so that the step is not synchronized.

Importing this module imports no torch.
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
"""JSON attributes of a span; a callable is evaluated after the step."""
Later = Callable[[], int]
"""Returns a time in nanoseconds of `time.perf_counter_ns`; to be called after the step."""

_NOTHING = nullcontext()
PLACES = ("step", "expert", "branch", "layer", "chunk", "block")
"""Attributes that nested spans inherit."""


@dataclass(frozen=True, slots=True)
class Event:
    """A finished span.

    Attributes:
        kind: Name of the operation.
        attributes: Its attributes, with the inherited ones (`CONTEXT_KEYS`).
        begin: Nanoseconds of the recorder's clock.
        end: Nanoseconds of the recorder's clock.
        issued: Host time in nanoseconds at which the span was entered.
    """

    kind: str
    facts: Facts
    begin: int
    end: int
    issued: int

    @property
    def length(self) -> int:
        """Duration in nanoseconds."""
        return self.end - self.begin


class Clock(Protocol):
    """Measures times on the host or on a device."""

    @property
    def name(self) -> str:
        """Name of the clock in reports."""
        ...

    def start(self) -> None:
        """Starts a recorded step; may synchronize the device."""
        ...

    def now(self) -> Later: ...

    def stop(self) -> None:
        """Ends a recorded step; waits until the device has finished it."""
        ...


class HostClock:
    """Implements `Clock` for devices without asynchronous execution."""

    name = "host clock"

    def start(self) -> None: ...

    def now(self) -> Later:
        found = time.perf_counter_ns()
        return lambda: found

    def stop(self) -> None: ...


class Recorder:
    """Records the spans of some steps.

    Args:
        steps: Indices of the recorded steps.
        on_step_end: Called after each recorded step with its events in the order of their begin.
        step_context: step_context(step) is entered around each recorded step.
        profiler_range: profiler_range(name) is entered in every span, for a running profiler.
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
        """Records the spans of a step inside the block."""
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
        """Returns a profiler's range for a span."""
        return _NOTHING if self._ranges is None else self._ranges(name)

    def enter(self, places: Facts, begun: _Span | None = None) -> Facts:
        """Pushes inherited attributes and appends a span, if any; returns the outer attributes."""
        outside = self._places[-1]
        self._places.append({**outside, **places})
        if begun is not None:
            self._spans.append(begun)
        return outside

    def leave(self) -> None:
        self._places.pop()


class _Span:
    """A span that is being recorded."""

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
    """Returns a span's label in a trace viewer: `a2a q`, `layer 3`."""
    known = {"step", "branch", "layer"} & {kind} | {"what", "decision"}
    return " ".join([kind, *(str(facts[name]) for name in sorted(known) if name in facts)])


class _Surroundings:
    """Attributes that the spans inside inherit, without a span."""

    def __init__(self, recorder: Recorder, facts: Facts) -> None:
        self._recorder, self._facts = recorder, facts

    def __enter__(self) -> None:
        self._recorder.enter(self._facts)

    def __exit__(self, *_: object) -> None:
        self._recorder.leave()


_installed: Recorder | None = None  # records its steps
_active: Recorder | None = None  # inside a recorded step


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Installs a recorder for the steps inside the block; None records nothing."""
    global _installed
    outside, _installed = _installed, recorder
    try:
        yield
    finally:
        _installed = outside


def step(index: int, expert: str) -> AbstractContextManager[None]:
    """Records a sampling step: forward passes and solver step."""
    if _installed is None or index not in _installed.steps:
        return _NOTHING
    return _installed.step(index, expert)


def span(
    kind: str, tensor: Tensor | None = None, /, **facts: object
) -> AbstractContextManager[None]:
    """Records a span; a tensor adds its bytes, shape and dtype to the attributes."""
    if _active is None:
        return _NOTHING
    if tensor is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        facts |= {"bytes": tensor.nbytes, "shape": list(tensor.shape), "dtype": dtype}
    return _Span(_active, kind, facts)


def place(**facts: object) -> AbstractContextManager[None]:
    """Adds some of `CONTEXT_KEYS` to all spans inside the block."""
    return _NOTHING if _active is None else _Surroundings(_active, facts)


def mark(kind: str, **facts: object) -> None:
    """Records an instantaneous event, such as a decision of the step cache."""
    with span(kind, **facts):
        pass
