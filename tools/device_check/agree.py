"""The check on several ranks: what their supervising processes tell each other.

They use torchrun's key-value store only, never a collective, so a rank that fails, hangs or is
killed costs the others its step and no more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from tools.device_check.steps import WRONG, Outcome, outcome_from, plain, worst
from wan.settings.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.1
ENDED = "ended because"
_DOUBTFUL = (ENDED, "RuntimeError", "Dist")  # also what a collective raises for another rank's sake
GRACE = 60.0  # seconds that a rank is waited for beyond its step's limit


class Alone:
    """One process: nobody to agree with."""

    rank, world = 0, 1

    def refusal(self, own: str | None) -> str | None:
        """Why no rank can begin; own: why this one cannot."""
        return own

    def others_failed(self, index: int) -> str | None:
        """How another rank's part of a step ended early; None while none did."""
        return None

    def merged(self, index: int, own: Outcome, limit: float) -> list[Outcome]:
        """What came of a step on every rank, by rank."""
        return [own]

    def same_code(self, code: int | None) -> int:
        """The main rank's exit code, on every rank; the main rank's is given."""
        assert code is not None
        return code


class Ranks(Alone):
    """Several, under torchrun. Raises InputError where its store does not answer."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store = _store()

    def refusal(self, own: str | None) -> str | None:
        self._store.set(f"hello/{self.rank}", own or "")
        keys = [f"hello/{rank}" for rank in range(self.world)]
        if not self._wait(keys, 600):
            return "not all ranks have opened their devices within 600 s; start all of them."
        said = [self._store.get(key).decode() for key in keys]
        return next((sentence for sentence in said if sentence), None)

    def others_failed(self, index: int) -> str | None:
        key = f"failed/{index}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def merged(self, index: int, own: Outcome, limit: float) -> list[Outcome]:
        if own.words and not own.words.startswith(ENDED):  # it has left the others alone
            self._store.set(f"failed/{index}", f"{ENDED} rank {self.rank} has")
        self._store.set(f"outcome/{index}/{self.rank}", json.dumps(plain(asdict(own))))
        keys = [f"outcome/{index}/{rank}" for rank in range(self.world)]
        self._wait(keys, max(0.0, limit - own.seconds) + GRACE)
        lost = Outcome(WRONG, words="the rank has not answered; it may be lost")
        return [
            outcome_from(json.loads(self._store.get(key))) if self._store.check([key]) else lost
            for key in keys
        ]

    def same_code(self, code: int | None) -> int:
        """The main rank has then written everything, and torchrun may end it."""
        if code is not None:
            self._store.set("code", str(code))
            return code
        return int(self._store.get("code")) if self._wait(["code"], GRACE) else 1

    def _wait(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True


def _store() -> Store:
    import torch.distributed as dist

    from wan.distributed import mesh

    here = mesh.place()
    if here.holds_store:
        raise InputError("WORLD_SIZE is set, but there is no torchrun: start with torchrun.")
    store = dist.TCPStore(here.address, here.port, wait_for_workers=False)
    return dist.PrefixStore("check", store)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome for the table: the main rank's lines, and the worst verdict.

    A rank gives what is wrong only there, under its number. Ranks that were ended because
    of another one count only where that one has said nothing, and what a collective may have raised
    for another rank's sake is told only where there is no other cause.
    """
    by_itself = [o for o in outcomes if not o.words.startswith(ENDED)] or list(outcomes)
    main = outcomes[0]
    causes = [o for o in by_itself if o.words and not o.words.startswith(_DOUBTFUL)]
    lines = list(main.lines)
    said = {one.what for one in lines if one.verdict == WRONG}
    for rank, outcome in enumerate(outcomes[1:], 1):
        bad = [one for one in outcome.lines if one.verdict == WRONG and one.what not in said]
        lines += [replace(one, what=f"rank {rank}: {one.what}") for one in bad]
    told = next(iter(causes or [o for o in by_itself if o.words]), main)
    rank = outcomes.index(told)
    words, tail = f"rank {rank}: {told.words}" if rank else told.words, told.tail
    verdict = worst(outcome.verdict for outcome in by_itself)
    return Outcome(verdict, max(o.seconds for o in outcomes), tuple(lines), words, tail)
