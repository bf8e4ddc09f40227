"""Records named spans of a sampling step: exchanges, kernels, matrix products and decisions.

Instrumented code is `with trace.span("a2a", x, what="q"):`. Without an active recorder that
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

SpanAttributes = dict[str, object]
"""JSON attributes of a span; a callable is evaluated after the step."""
DeferredTime = Callable[[], int]
"""Returns a time in nanoseconds of `time.perf_counter_ns`; to be called after the step."""

_NULL_CONTEXT = nullcontext()
CONTEXT_KEYS = ("step", "expert", "branch", "layer", "chunk", "block")
"""Attributes that nested spans inherit."""


@dataclass(frozen=True, slots=True)
class Event:
    """A finished span.

    Attributes:
        operation: Name of the operation.
        attributes: Its attributes, with the inherited ones (`CONTEXT_KEYS`).
        begin: Nanoseconds of the recorder's clock.
        end: Nanoseconds of the recorder's clock.
        issued: Host time in nanoseconds at which the span was entered.
    """

    operation: str
    attributes: SpanAttributes
    begin: int
    end: int
    issued: int

    @property
    def duration(self) -> int:
        """Duration in nanoseconds."""
        return self.end - self.begin


class Clock(Protocol):
    """Measures times on the host or on a device."""

    @property
    def name(self) -> str:
        """Name of the clock in reports."""

    def start(self) -> None:
        """Starts a recorded step; may synchronize the device."""

    def now(self) -> DeferredTime: ...

    def stop(self) -> None:
        """Ends a recorded step; waits until the device has finished it."""


class HostClock:
    """Implements `Clock` for devices without asynchronous execution."""

    name = "host clock"

    def start(self) -> None: ...

    def now(self) -> DeferredTime:
        now_ns = time.perf_counter_ns()
        return lambda: now_ns

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
        on_step_end: Callable[[list[Event]], None],
        step_context: Callable[[int], AbstractContextManager[None]] = lambda _: _NULL_CONTEXT,
        profiler_range: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.steps, self.clock, self._profiler_range = steps, clock, profiler_range
        self._on_step_end, self._step_context = on_step_end, step_context
        self._spans: list[_Span] = []
        self._contexts: list[SpanAttributes] = [{}]

    @contextmanager
    def record_step(self, index: int, expert: str) -> Iterator[None]:
        """Records the spans of a step inside the block."""
        global _active
        with self._step_context(index):
            self.clock.start()
            self._spans, self._contexts, _active = [], [{}], self
            try:
                with span("step", step=index, expert=expert):
                    yield
            finally:
                _active = None
            self.clock.stop()
        self._on_step_end([recorded_span.make_event() for recorded_span in self._spans])

    def open_profiler_range(self, name: str) -> AbstractContextManager[object]:
        """Returns a profiler's range for a span."""
        return _NULL_CONTEXT if self._profiler_range is None else self._profiler_range(name)

    def enter_context(
        self, context: SpanAttributes, opened_span: _Span | None = None
    ) -> SpanAttributes:
        """Pushes inherited attributes and appends a span, if any; returns the outer attributes."""
        outer_context = self._contexts[-1]
        self._contexts.append({**outer_context, **context})
        if opened_span is not None:
            self._spans.append(opened_span)
        return outer_context

    def exit_context(self) -> None:
        self._contexts.pop()


class _Span:
    """A span that is being recorded."""

    __slots__ = ("_attributes", "_begin", "_end", "_issued", "_operation", "_range", "_recorder")

    def __init__(self, recorder: Recorder, operation: str, attributes: SpanAttributes) -> None:
        self._recorder, self._operation, self._attributes = recorder, operation, attributes

    def __enter__(self) -> None:
        context = {name: value for name, value in self._attributes.items() if name in CONTEXT_KEYS}
        self._range = self._recorder.open_profiler_range(
            format_label(self._operation, self._attributes)
        )
        self._range.__enter__()
        self._attributes = {**self._recorder.enter_context(context, self), **self._attributes}
        self._issued = time.perf_counter_ns()
        self._begin = self._end = self._recorder.clock.now()

    def __exit__(self, *_: object) -> None:
        self._end = self._recorder.clock.now()
        self._recorder.exit_context()
        self._range.__exit__(None, None, None)

    def make_event(self) -> Event:
        attributes = {name: x() if callable(x) else x for name, x in self._attributes.items()}
        return Event(self._operation, attributes, self._begin(), self._end(), self._issued)


def format_label(operation: str, attributes: SpanAttributes) -> str:
    """Returns a span's label in a trace viewer: `a2a q`, `layer 3`."""
    label_keys = {"step", "branch", "layer"} & {operation} | {"what", "decision"}
    return " ".join(
        [operation, *(str(attributes[name]) for name in sorted(label_keys) if name in attributes)]
    )


class _Context:
    """Attributes that the spans inside inherit, without a span."""

    def __init__(self, recorder: Recorder, attributes: SpanAttributes) -> None:
        self._recorder, self._attributes = recorder, attributes

    def __enter__(self) -> None:
        self._recorder.enter_context(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._recorder.exit_context()


_installed: Recorder | None = None  # records its steps
_active: Recorder | None = None  # inside a recorded step


@contextmanager
def use_recorder(recorder: Recorder | None) -> Iterator[None]:
    """Installs a recorder for the steps inside the block; None records nothing."""
    global _installed
    previous, _installed = _installed, recorder
    try:
        yield
    finally:
        _installed = previous


def record_step(index: int, expert: str) -> AbstractContextManager[None]:
    """Records a sampling step: forward passes and solver step."""
    if _installed is None or index not in _installed.steps:
        return _NULL_CONTEXT
    return _installed.record_step(index, expert)


def span(
    operation: str, tensor: Tensor | None = None, /, **attributes: object
) -> AbstractContextManager[None]:
    """Records a span; a tensor adds its bytes, shape and dtype to the attributes."""
    if _active is None:
        return _NULL_CONTEXT
    if tensor is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        attributes |= {"bytes": tensor.nbytes, "shape": list(tensor.shape), "dtype": dtype}
    return _Span(_active, operation, attributes)


def add_context(**attributes: object) -> AbstractContextManager[None]:
    """Adds some of `CONTEXT_KEYS` to all spans inside the block."""
    return _NULL_CONTEXT if _active is None else _Context(_active, attributes)


def record_marker(operation: str, **attributes: object) -> None:
    """Records an instantaneous event, such as a decision of the step cache."""
    with span(operation, **attributes):
        pass
