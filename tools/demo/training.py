"""Training loop of the demo's programs: learning rates, averaged weights, states, logs."""

from __future__ import annotations

import json
import math
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wan.utils.files import OutputKind, check_output, write_output

_MARK = b"tools.demo"


def get_device() -> torch.device:
    """Returns the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Computes the learning rate: linear warm-up to the peak, then cosine decay to 1 % of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))


class Training:
    """A network, its optimizer and its averaged weights, saved to and resumed from one file.

    A step's data depends only on its number, so that a resumed run trains on the same data.
    """

    def __init__(self, network: nn.Module, file: Path, *, steps: int, peak: float) -> None:
        self.network, self.file, self.steps, self.peak = network.to(get_device()), file, steps, peak
        self.step = 0
        self.averaged = {name: p.detach().clone() for name, p in network.named_parameters()}
        self._optimizer = torch.optim.AdamW(
            (p for p in network.parameters() if p.requires_grad),
            lr=peak,
            betas=(0.9, 0.99),
            fused=True,
            weight_decay=0.01,
        )
        self._started, self._sums = time.monotonic(), dict[str, float]()
        check_output(file, STATE, "--state")
        if file.exists():
            self._resume()

    @property
    def is_finished(self) -> bool:
        return self.step >= self.steps

    def update(self, loss: torch.Tensor, **metrics: float) -> None:
        """Makes one optimizer step; logs every 50 steps, saves every 250 steps and at the end."""
        for group in self._optimizer.param_groups:
            group["lr"] = compute_learning_rate(self.step, self.steps, self.peak)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        self._average_weights()
        self._log({"loss": loss.item(), **metrics})
        if self.step % 250 == 0 or self.is_finished:
            self.save()

    @torch.no_grad()
    def _average_weights(self) -> None:
        keep = min(0.998, self.step / (self.step + 20))
        old = list(self.averaged.values())
        torch._foreach_lerp_(old, [p.detach() for p in self.network.parameters()], 1 - keep)

    def _log(self, values: dict[str, float], interval: int = 50) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value / interval
        if self.step % interval == 0:
            seconds = time.monotonic() - self._started
            line = {"step": self.step, **{k: round(v, 5) for k, v in self._sums.items()}}
            print(json.dumps({**line, "seconds": round(seconds)}), flush=True)
            self._sums.clear()

    def save(self) -> None:
        """Writes the state."""
        state = {
            "step": self.step,
            "network": self.network.state_dict(),
            "averaged": self.averaged,
            "optimizer": self._optimizer.state_dict(),
        }
        save_atomically(state, self.file)

    def _resume(self) -> None:
        state = torch.load(self.file, map_location=get_device(), weights_only=True)
        self.network.load_state_dict(state["network"])
        options = self._optimizer.state_dict()["param_groups"]  # this run's, not the saved ones
        self._optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        self.averaged, self.step = state["averaged"], state["step"]
        print(f"resumed {self.file.name} at step {self.step}", flush=True)


def save_atomically(value: Any, file: Path) -> None:
    """Saves a state atomically; refuses to replace a file that is not a state of these programs."""
    with write_output(file, STATE) as temporary:
        torch.save(value, temporary)
        with zipfile.ZipFile(temporary, "a") as packed:
            packed.comment = _MARK


def _is_state(file: Path) -> bool:
    """Returns whether a file of torch.save has our mark, the comment of its zip archive."""
    try:
        with zipfile.ZipFile(file) as packed:
            return packed.comment == _MARK
    except zipfile.BadZipFile:
        return False


STATE = OutputKind("a state of tools.demo", _is_state)


def load_averaged_weights(file: Path) -> dict[str, torch.Tensor]:
    """Loads the averaged weights of a finished or interrupted training."""
    state: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)[
        "averaged"
    ]
    return state
