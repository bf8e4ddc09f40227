"""Pages of the list of videos: by age, filtered by state and words."""

from __future__ import annotations

from dataclasses import dataclass

from wan.serve.journal import Journal, ServiceJob
from wan.settings.errors import InputError
from wan.settings.values import format_value

_OPEN = ("queued", "in_progress")
_STATES = (*_OPEN, "completed", "failed")
_MAX_SEARCHED = 1000  # jobs in one request, which block the event loop for some 20 ms


@dataclass(frozen=True)
class JobFilter:
    """What jobs of a list must have.

    Attributes:
        states: One of these states; (): any.
        terms: All of these words, in lower case, in the prompt, the seed, the size or the id.
    """

    states: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()

    def accepts(self, job: ServiceJob) -> bool:
        """Returns whether a job has them."""
        if self.states and job.state not in self.states:
            return False
        if not self.terms:
            return True
        settings = job.settings
        prompts = (settings.get("prompt") or "", *(settings.get("clip_prompts") or ()))
        size = f"{job.width}x{job.height}"
        text = " ".join((*prompts, str(settings.get("base_seed")), size, job.id)).lower()
        return all(term in text for term in self.terms)


@dataclass(frozen=True)
class JobPage:
    """A page of the list.

    Attributes:
        last_id: The next page starts after this job; None: nothing was searched.
        has_more: Whether jobs are left, which may not fit the filter.
    """

    jobs: list[ServiceJob]
    last_id: str | None
    has_more: bool


def read_filter(status: str, search: str) -> JobFilter:
    """Reads the query parameters `status` and `search`."""
    states = tuple(status.split(",")) if status else ()
    if not {*states} <= {*_STATES}:
        why = f"must be some of {','.join(_STATES)}"
        raise InputError("status", format_value(status), why)
    return JobFilter(states, tuple(search.lower().split()))


def find_jobs(
    journal: Journal, job_filter: JobFilter, after: str | None, limit: int, newest_first: bool
) -> JobPage:
    """Returns the next jobs of a list that a filter accepts.

    A filter is applied to at most `_MAX_SEARCHED` jobs, so that a page may be empty though
    `has_more`.
    """
    is_open = bool(job_filter.states) and {*job_filter.states} <= {*_OPEN}
    is_filtered = job_filter != JobFilter()
    most = _MAX_SEARCHED if is_filtered and limit else limit
    searched = journal.list_page(after, most + 1, newest_first, is_open)
    jobs: list[ServiceJob] = []
    count = 0
    for job in searched[:most]:
        if len(jobs) == limit:
            break
        count += 1
        if job_filter.accepts(job):
            jobs.append(job)
    return JobPage(jobs, searched[count - 1].id if count else None, len(searched) > count)
