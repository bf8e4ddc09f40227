"""Pages of the list of videos: by age, filtered by state and words."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from wan.serve.jobs.job import STATES, ServiceJob
from wan.serve.jobs.journal import Journal
from wan.settings.errors import InputError
from wan.settings.values import format_value

_MAX_SEARCHED = 1000  # jobs in one request
_MAX_WORDS = 32
_MAX_SEARCH_LENGTH = 1000  # characters


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
    states = tuple(dict.fromkeys(status.split(","))) if status else ()
    if not {*states} <= {*STATES}:
        why = f"must be some of {','.join(STATES)}"
        raise InputError("status", format_value(status), why)
    terms = tuple(dict.fromkeys(search.lower().split()))
    for count, most, unit in (
        (len(search), _MAX_SEARCH_LENGTH, "characters"),
        (len(terms), _MAX_WORDS, "words"),
    ):
        if count > most:
            why = f"has {count} {unit}, and at most {most} are allowed"
            raise InputError("search", why=why, remedy="give fewer words")
    return JobFilter(states, terms)


async def find_jobs(
    journal: Journal, job_filter: JobFilter, after: str | None, limit: int, newest_first: bool
) -> JobPage:
    """Returns the next jobs of a list that a filter accepts.

    Words are searched in at most `_MAX_SEARCHED` jobs, so that a page may be empty, but has more.

    Args:
        after: The id after which the page starts; None: the first page.
        limit: Jobs of the page at most.
    """
    most = _MAX_SEARCHED if job_filter.terms and limit else limit
    names = journal.list_page(after, most + 1, newest_first, job_filter.states or STATES)
    jobs: list[ServiceJob] = []
    count = 0
    for name in names[:most]:
        if len(jobs) == limit:
            break
        count += 1
        job = journal.get(name)
        if job is not None and job_filter.accepts(job):
            jobs.append(job)
        await asyncio.sleep(0)  # the event loop does other work
    return JobPage(jobs, names[count - 1] if count else None, len(names) > count)
