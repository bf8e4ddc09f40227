"""The refusal of a request."""

from __future__ import annotations

from collections.abc import Mapping


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
