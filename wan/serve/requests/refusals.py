"""Refusals of requests, and repeated requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from wan.serve.jobs.journal import Journal, ServiceJob


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


def find_earlier_job(journal: Journal, digest: str, key: str | None) -> ServiceJob | None:
    """Returns the job of an earlier request with the same Idempotency-Key, or None.

    Without a key every request is a new one, also a retry: an equal request may come from another
    client, who could then delete the job of the first one.

    Args:
        journal: Has the jobs of earlier requests.
        digest: Digest of the request, from `hash_request`.
        key: The request's Idempotency-Key.

    Raises:
        RefusedError: The key belongs to a different request.
    """
    job = journal.find_by_key(key) if key else None
    if job is not None and job.digest != digest:
        message = "This Idempotency-Key belongs to another request; use a new one."
        raise RefusedError(message, 422, "idempotency_key_reused")
    return job


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
