"""Errors that tests measure while they check them; shown at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_worst: dict[str, dict[str, float]] = {}


def note(kind: str, combinations: int, errors: Mapping[str, float]) -> None:
    """Add to the combinations of a kind, and keep the largest of each of its errors."""
    row = _worst.setdefault(kind, {"combinations": 0})
    row["combinations"] += combinations
    for name, error in errors.items():
        row[name] = max(row.get(name, 0.0), error)


def lines() -> Iterator[str]:
    for kind, row in _worst.items():
        errors = (f"{name} {error:.2e}" for name, error in row.items() if name != "combinations")
        yield f"{kind}: {row['combinations']:.0f} combinations; at most: {', '.join(errors)}"
