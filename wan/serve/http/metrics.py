"""Prometheus metrics of the service."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from wan.serve.jobs.job import ServiceJob
from wan.serve.queue.scheduling import read_clock
from wan.serve.queue.service import Service

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)


class Metrics:
    """Counts job events, and reads the state of the service on each request of /metrics."""

    def __init__(self) -> None:
        kwargs: dict[str, Any] = {"registry": CollectorRegistry()}
        self._registry = kwargs["registry"]
        self._jobs = Counter("wan_jobs", "Created and ended jobs", ["event"], **kwargs)
        self._failures = Counter("wan_failures", "Failed jobs by error code", ["code"], **kwargs)
        self._restarts = Counter("wan_restarts", "Groups of ranks that have ended", **kwargs)
        self._seconds = Histogram(
            "wan_job_seconds",
            "Seconds from the start of a job to its end",
            buckets=_SECONDS,
            **kwargs,
        )
        self._queue_seconds = Histogram(
            "wan_queue_seconds",
            "From the creation of a job to its start",
            buckets=_SECONDS,
            **kwargs,
        )
        self._stages = Histogram(
            "wan_stage_seconds", "Of a video, by stage", ["stage"], buckets=_SECONDS, **kwargs
        )
        self._steps = Histogram(
            "wan_step_seconds", "Mean seconds of a denoising step", buckets=_SECONDS, **kwargs
        )
        self._texts = Counter(
            "wan_texts", "Prompts and negative prompts by source of embeddings", ["from"], **kwargs
        )
        self._energy = Counter("wan_energy_joules", "Joules of all devices for videos", **kwargs)
        self._video_energy = Gauge("wan_joules_per_video", "Of the last metered video", **kwargs)
        self._watts = Gauge("wan_power_watts", "Mean of last metered video", ["rank"], **kwargs)
        self._clock = Gauge("wan_clock_mhz", "Mean of last metered video", ["rank"], **kwargs)
        self._limited = Counter(
            "wan_clock_limited_seconds", "Seconds with a clock throttled by a limit", **kwargs
        )
        self._memory = Gauge(
            "wan_peak_memory_bytes", "Peak memory of rank 0 for the last video", ["kind"], **kwargs
        )
        self._queue = Gauge("wan_jobs_waiting", "Jobs in the queue", **kwargs)
        self._running = Gauge("wan_jobs_running", "Running jobs", **kwargs)
        self._ahead = Gauge("wan_seconds_ahead", "Estimate until the queue is empty", **kwargs)
        self._ready = Gauge("wan_ranks_ready", "1 while all ranks are ready", **kwargs)
        self._webhooks = Counter("wan_webhooks", "Webhook attempts", ["result"], **kwargs)
        self._webhooks_left = Gauge("wan_webhooks_waiting", "Events to be delivered", **kwargs)
        self._store = Counter("wan_store", "Jobs by change of the store", ["result"], **kwargs)
        self._store_left = Gauge("wan_store_waiting", "Jobs to be stored or removed", **kwargs)
        self._stored = Gauge("wan_stored_bytes", "Size of all jobs' files", **kwargs)

    def count_event(self, event: str, job: ServiceJob | None, record: dict[str, Any]) -> None:
        """Counts an event: "created", "video", "completed", "failed", "deleted" or "restart"."""
        if event == "restart":
            self._restarts.inc()
            return
        if event == "video" and job is not None:
            self._count_video(job, record)
            return
        self._jobs.labels(event).inc()
        if job is None or event not in ("completed", "failed"):
            return
        if job.error is not None:
            self._failures.labels(job.error["code"]).inc()
        created = job.created if job.queued_at is None else job.queued_at
        started = read_clock() if job.started is None else job.started
        self._queue_seconds.observe(max(started - created, 0.0))
        if event == "failed":
            return
        self._seconds.observe(job.seconds or 0.0)

    def _count_video(self, job: ServiceJob, record: dict[str, Any]) -> None:
        """Adds the measurements of the record of a video."""
        stages = record.get("seconds", {})
        for stage, seconds in stages.items():
            self._stages.labels(stage).observe(seconds)
        if job.total and "denoising" in stages:
            self._steps.observe(stages["denoising"] * job.num_outputs / job.total)
        reused, texts = record.get("texts", (0, 0))
        self._texts.labels("cache").inc(reused)
        self._texts.labels("encoder").inc(texts - reused)
        for memory_type, amount in record.get("peak_memory_bytes", {}).items():
            if amount is not None:
                self._memory.labels(memory_type).set(amount)
        self._count_power(record.get("power") or {})

    def count_webhook(self, result: str) -> None:
        """Counts an attempt to deliver an event: "delivered", "repeated" or "given_up"."""
        self._webhooks.labels(result).inc()

    def count_store(self, result: str) -> None:
        """Counts a change of the store: "uploaded", "removed" or "repeated"."""
        self._store.labels(result).inc()

    def render(self, service: Service) -> tuple[bytes, str]:
        """Returns all metrics and their content type."""
        counts = service.journal.count_states()
        self._queue.set(counts.get("queued", 0))
        self._running.set(counts.get("in_progress", 0))
        self._ahead.set(service.estimates.estimate_wait())
        self._ready.set(float(service.rank_group.ready))
        self._webhooks_left.set(service.journal.count_deliveries("webhook"))
        self._store_left.set(service.journal.count_deliveries("store"))
        self._stored.set(service.journal.count_bytes())
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _count_power(self, power: dict[str, Any]) -> None:
        """Adds the power measurements of a record."""
        joules = power.get("joules")
        if joules is not None:
            self._energy.inc(joules)
            self._video_energy.set(joules)
        for rank, device in enumerate(power.get("devices") or [power]):
            if "mean_w" in device:
                self._watts.labels(str(rank)).set(device["mean_w"])
            if "mean_mhz" in device:
                self._clock.labels(str(rank)).set(device["mean_mhz"])
            self._limited.inc(device.get("throttled", 0.0) * device.get("seconds", 0.0))
