"""Matches retries of a request with the job of the first request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from wan.serve.journal import Journal, QueuedVideo

REPEAT_WINDOW = 600.0
"""Seconds in which a retry without a key gets the job of the first request."""
_MOST_REFUSED = 10_000  # number of stored refusals


class RefusedError(Exception):
    """A refused request, answered with an HTTP error.

    Attributes:
        status: HTTP status.
        code: Error code for programs.
        param: The field that caused the refusal.
        wait: Seconds after which a retry makes sense; None: never.
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
    """Finds the jobs of earlier equal requests, by Idempotency-Key or digest."""

    def __init__(self, journal: Journal) -> None:
        """Starts without refusals. journal: has the jobs of earlier requests."""
        self._journal = journal
        self._refused: dict[str, float] = {}  # digest of a refused request -> time

    def refuse(self, digest: str) -> None:
        """Stores that a request was refused."""
        self._refused.pop(digest, None)
        self._refused[digest] = now = time.time()
        for old, moment in [*islice(self._refused.items(), 2)]:  # oldest first
            if moment < now - REPEAT_WINDOW or len(self._refused) > _MOST_REFUSED:
                del self._refused[old]

    def find(self, digest: str, key: str | None, repeated: bool) -> QueuedVideo | None:
        """Returns the job of the earlier request that this request retries, or None.

        With a key, this is the job of the key. Without a key, it is the job of the last request
        with this digest, if it was accepted within `REPEAT_WINDOW` and no equal request was refused
        since: a retry after a refusal belongs to the refused request.

        Args:
            is_repeated: Whether the client marks the request as a retry.

        Raises:
            RefusedError: The key belongs to a different request.
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
    """Returns a SHA-256 digest of the fields and files of a request."""
    found = hashlib.sha256()
    for name in sorted(body):
        value = body[name]
        content = value
        if not isinstance(value, bytes):
            content = json.dumps(value, sort_keys=True, default=bytes.hex).encode()
        found.update(f"{name} {len(content)} ".encode() + content)
    return found.hexdigest()
