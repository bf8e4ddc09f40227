"""Which forwards `plan_memory.py` measures, and what is planned for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import prod

import torch

from benchmarks.live_bytes import WHOLE
from wan.modules.schedule import MODES
from wan.planner.forward import Forward
from wan.planner.network import Network, text_bytes
from wan.settings.attention import Attention, RainFusion
from wan.settings.parallel import Parallel

Grid = tuple[int, int, int]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DENSE = Attention()
PARTS = ("patch embedding", "self-attention", "cross-attention", "feed-forward", "head")
METHODS = {
    "FP8": Attention(fa_quant="fp8"),
    "FP8 exchanged": Attention(fa_quant="fp8", quant_alltoall=True),
    "RainFusion": Attention(rainfusion=RainFusion("v2", 0.64, 0)),
    "RainFusion FP8": Attention("fused", "fp8", rainfusion=RainFusion("v3", 0.64, 0)),
}


@dataclass(frozen=True)
class Case:
    """One measured configuration. grid: latent tokens (frames, height, width)."""

    name: str
    parallel: Parallel
    precision: str
    grid: Grid
    net: Network
    cached: bool = True
    attention: Attention = DENSE

    @property
    def forward(self) -> Forward:
        tokens = prod(self.grid)
        e = DTYPES[self.precision].itemsize
        return Forward(
            self.net,
            tokens,
            4 * tokens,
            self.parallel,
            e,
            slice_elements=1 << 20,
            attention=self.attention,
            device="cpu",
        )

    def planned(self) -> dict[str, int]:
        """Bytes beyond weights and inputs: the whole forward's peak, and those of its parts."""
        moments = {moment.name: moment.total for moment in self.forward.moments()}
        parts = {name: moments[name] for name in PARTS}
        return {
            n: size + self.text() for n, size in {WHOLE: max(moments.values()), **parts}.items()
        }

    def text(self) -> int:
        return text_bytes(self.net, self.forward.e, contexts=1, cached=self.cached)


def parallels() -> list[tuple[str, Parallel]]:
    """Every mode on 1, 2 and 4 processes, without and with a ring."""
    found = [("one process", Parallel())]
    for ring, ulysses in ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1)):
        base = Parallel(ring * ulysses, 1, ring, ulysses)
        for mode, row in MODES.items():
            if mode == 0 or ulysses > 1:
                found.append((f"{ring} x {ulysses} {row.name}", replace(base, comm_type=mode)))
        if ulysses > 1:
            overlap = replace(base, fa_alltoall_overlap=True)
            found.append((f"{ring} x {ulysses} overlap", overlap))
        if ring > 2:
            found.append(
                (f"{ring} x {ulysses} bidirectional", replace(base, ring_type="bidirectional"))
            )
    return found


def cases(net: Network, grid: Grid) -> list[Case]:
    f, h, w = grid
    padded = (f - 1, h - 1, w - 1)  # odd, where the grid is even: not divisible among the cards
    found = [
        Case(name, parallel, precision, grid, net)
        for (name, parallel), precision in itertools.product(parallels(), DTYPES)
    ]
    for precision in DTYPES:
        one, mode1 = Parallel(), Parallel(4, 1, 2, 2, comm_type=1)
        found.append(Case("one process, no text cache", one, precision, grid, net, False))
        found.append(Case("2 x 2 InsertComm, padded", mode1, precision, padded, net))
    return found + [case for name in METHODS for case in method_cases(name, grid, net)]


def method_cases(name: str, grid: Grid, net: Network) -> list[Case]:
    """One way of attending: one card, chunks, blocks of queries, a ring, overlap, padding."""
    base, attention = Parallel(4, 1, 2, 2), METHODS[name]
    f, h, w = grid
    layouts = [
        ("one process", Parallel(), grid),
        ("1 x 2 baseline", Parallel(2, 1, 1, 2), grid),
        ("1 x 4 InsertComm", Parallel(4, 1, 1, 4, comm_type=1), grid),
        ("1 x 2 BlockAttn", Parallel(2, 1, 1, 2, comm_type=2), grid),
        ("2 x 2 baseline", base, grid),
        ("1 x 2 overlap", Parallel(2, 1, 1, 2, fa_alltoall_overlap=True), grid),
        ("2 x 2 InsertComm, padded", replace(base, comm_type=1), (f - 1, h - 1, w - 1)),
    ]
    return [
        Case(f"{name}: {layout}", parallel, precision, tokens, net, attention=attention)
        for (layout, parallel, tokens), precision in itertools.product(layouts, DTYPES)
        if parallel.ulysses_size > 1 or not attention.quant_alltoall
    ]
