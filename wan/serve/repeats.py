"""Matches retries of a request with the job of the first request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

from wan.serve.journal import Journal, ServiceJob

REPEAT_WINDOW = 600.0
"""Seconds in which a retry without a key gets the job of the first request."""
_MAX_REFUSALS = 10_000  # number of stored refusals


class RefusedError(Exception):
    """A refused request, answered with an HTTP error.

    Attributes:
        status: HTTP status.
        code: Error code for programs.
        param: The field that caused the refusal.
        retry_after: Seconds after which a retry makes sense; None: never.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.headers = dict(headers)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after


class RepeatedRequests:
    """Finds the jobs of earlier equal requests, by Idempotency-Key or digest."""

    def __init__(self, journal: Journal) -> None:
        """Starts without refusals. journal: has the jobs of earlier requests."""
        self._journal = journal
        self._refusal_times: dict[str, float] = {}  # digest of a refused request -> time

    def add_refusal(self, digest: str) -> None:
        """Stores that a request was refused."""
        self._refusal_times.pop(digest, None)
        self._refusal_times[digest] = now = time.time()
        for old, moment in [*islice(self._refusal_times.items(), 2)]:  # oldest first
            if moment < now - REPEAT_WINDOW or len(self._refusal_times) > _MAX_REFUSALS:
                del self._refusal_times[old]

    def find_duplicate(self, digest: str, key: str | None, is_retry: bool) -> ServiceJob | None:
        """Returns the job of the earlier request that this request retries, or None.

        With a key, this is the job of the key. Without a key, it is the job of the last request
        with this digest, if it was accepted within `REPEAT_WINDOW` and no equal request was refused
        since: a retry after a refusal belongs to the refused request.

        Args:
            is_retry: Whether the client marks the request as a retry.

        Raises:
            RefusedError: The key belongs to a different request.
        """
        if key:
            job = self._journal.find_by_key(key)
            if job is not None and job.digest != digest:
                message = "This Idempotency-Key belongs to another request; use a new one."
                raise RefusedError(message, 422, "idempotency_key_reused")
            return job
        if not is_retry:
            return None
        since = max(time.time() - REPEAT_WINDOW, self._refusal_times.get(digest, 0.0))
        return self._journal.find_by_digest(digest, since)


def hash_request(body: Mapping[str, Any]) -> str:
    """Returns a SHA-256 digest of the fields and files of a request."""
    hasher = hashlib.sha256()
    for name in sorted(body):
        value = body[name]
        has_files = isinstance(value, list) and any(map(_is_file, value))
        for content in value if has_files else [value]:
            if not _is_file(content):
                content = json.dumps(content, sort_keys=True, default=_digest_file).encode()
            hasher.update(f"{name} {len(content)} ".encode())
            hasher.update(content)
    return hasher.hexdigest()


def _is_file(value: Any) -> bool:
    return isinstance(value, bytes | bytearray)


def _digest_file(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
