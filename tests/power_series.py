"""A synthetic power series in small time steps; shares no code with the predictor."""

from __future__ import annotations

import random
from typing import Any

TRUE: dict[str, float] = {
    "pfa": 1.05,
    "ps": 0.3,
    "alpha": 3.0,
    "a_linear": 0.75,
    "a_comm": 0.12,
    "tau": 0.06,
    "f_low": 0.55,
    "hold": 0.25,
}
LIMIT, RATED, STEP = 350.0, 1650.0, 1e-4


def made(
    seed: int = 1, layers: int = 60, every: float = 0.05, idle: float = 0.0, **changes: float
) -> tuple[dict[str, Any], dict[str, float]]:
    """A series of layers of mode 0 on a device with these parameters, and the parameters.

    The device's average of power follows an explicit Euler rule. A meter reads about every 0.05 s,
    watts with 1 % and MHz with 0.3 % of noise.

    Args:
        seed: Of the noise.
        layers: How many.
        every: Seconds between two readings.
        idle: Seconds of rest at the end of each layer.
        changes: Of TRUE.
    """
    true, noise = TRUE | changes, random.Random(seed)
    activity = {"fa": 1.0, "linear": true["a_linear"], "comm": true["a_comm"], "idle": 0.0}
    work = [("comm", 0.043), ("fa", 0.36), ("comm", 0.014), ("linear", 0.07), ("idle", idle)]
    samples, calls = [], []
    t, average, low_until, due = 0.0, true["ps"], -1.0, 0.013
    for kind, seconds in [one for one in work if one[1]] * layers:
        start, left = t, seconds
        while left > 0:
            if average >= 1 and t >= low_until:
                low_until = t + true["hold"]
            clock = true["f_low"] if t < low_until else 1.0
            dynamic = activity[kind] * (true["pfa"] - true["ps"]) * clock ** true["alpha"]
            power = true["ps"] + dynamic
            if t >= due:
                watts = LIMIT * power * noise.gauss(1, 0.01)
                samples.append(
                    {"t": t, "watts": watts, "mhz": RATED * clock * noise.gauss(1, 0.003)}
                )
                due += every * noise.uniform(0.9, 1.1)
            average += STEP / true["tau"] * (power - average)
            left -= STEP * (clock if kind in ("fa", "linear") else 1.0)
            t += STEP
        if kind != "idle":
            calls.append({"kind": kind, "start": start, "end": t})
    series = {"source": "synthetic", "rated_mhz": RATED, "limit_w": LIMIT}
    return series | {"samples": samples, "calls": calls}, true
