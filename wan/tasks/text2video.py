"""Text to video: the defaults of `Task`."""

from __future__ import annotations

from wan.tasks.base import Task

TASK = Task()
