"""Matches a request that a client repeats with the job of the first one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from wan.serve.journal import Journal, QueuedVideo

REPEAT_WINDOW = 600.0
"""Seconds in which a request without a key that a client repeats gets the job that was made."""
_MOST_REFUSED = 10_000  # refused requests that are remembered


class RefusedError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: Of HTTP.
        code: For programs.
        param: The field that it is about.
        wait: Seconds after which it may be repeated; None: it should not be.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        wait: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.wait = status, code, param, wait


class Repeats:
    """The requests of the last minutes, by key or digest."""

    def __init__(self, journal: Journal) -> None:
        """Remembers no refusal yet. journal: Where the jobs are."""
        self._journal = journal
        self._refused: dict[str, float] = {}  # digest of a request that was not taken -> when

    def refuse(self, digest: str) -> None:
        """Notes that a request was refused."""
        self._refused.pop(digest, None)
        self._refused[digest] = now = time.time()
        for old, moment in [*islice(self._refused.items(), 2)]:  # the oldest come first
            if moment < now - REPEAT_WINDOW or len(self._refused) > _MOST_REFUSED:
                del self._refused[old]

    def find(self, digest: str, key: str | None, repeated: bool) -> QueuedVideo | None:
        """Returns the job of an earlier request that this one repeats.

        With a key it is that of the key. Without one it is that of the last request with this
        digest, if it was accepted within minutes and no equal one was refused since then: what a
        client repeats after a refusal was never accepted.
        """
        if key:
            job = self._journal.find_key(key)
            if job is not None and job.digest != digest:
                message = "This Idempotency-Key belongs to another request; use a new one."
                raise RefusedError(message, 422, "idempotency_key_reused")
            return job
        if not repeated:
            return None
        since = max(time.time() - REPEAT_WINDOW, self._refused.get(digest, 0.0))
        return self._journal.find_digest(digest, since)


def digest_of(body: Mapping[str, Any]) -> str:
    """Returns what is equal for requests with the same fields and files."""
    found = hashlib.sha256()
    for name in sorted(body):
        value = body[name]
        content = value
        if not isinstance(value, bytes):
            content = json.dumps(value, sort_keys=True, default=bytes.hex).encode()
        found.update(f"{name} {len(content)} ".encode() + content)
    return found.hexdigest()
