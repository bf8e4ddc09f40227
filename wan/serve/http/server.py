"""Starts the service from its options: sockets, journal, application and HTTP server.

Importing it needs the packages of requirements-serve.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from wan.app.run import Run
from wan.serve.events.sse import MAX_LISTENERS
from wan.serve.events.webhooks import Webhooks, read_signing_key
from wan.serve.http import app
from wan.serve.http.connections import (
    Connections,
    compute_max_connections,
    make_server,
)
from wan.serve.http.metrics import Metrics
from wan.serve.jobs.folders import lock_journal
from wan.serve.queue.service import Limits, Service
from wan.serve.ranks.group import ONE_NODE, Nodes
from wan.serve.requests.addresses import Network, is_local, open_sockets
from wan.serve.requests.webhook_hosts import WebhookHosts
from wan.serve.store.videos import Store, StoreUploads
from wan.settings.errors import InputError
from wan.settings.layers import Layer
from wan.settings.values import integer
from wan.utils.files import open_regular_file
from wan.utils.log import logger


def make_nodes(count: int, address: str | None) -> Nodes:
    """Returns the machines that run the ranks, from --nodes and --node_address."""
    if count == 1 and address is None:
        return ONE_NODE
    if count == 1:
        why = "is for several machines, and --nodes is 1"
        raise InputError("--node_address", address, why, "drop it, or give --nodes")
    host, _, port = (address or "").rpartition(":")
    try:
        nodes = Nodes(count, host, int(integer(1, 65535)("", port)))
    except InputError:
        nodes = Nodes()
    if not host or not nodes.port:
        why = "must be HOST:PORT of this machine, as the other machines reach it, with --nodes"
        raise InputError("--node_address", address, why)
    for listener in open_sockets(host, 0, "--node_address"):
        listener.close()  # only checks that HOST is an address of this machine
    return nodes


def read_api_key(path: Path | None, host: str) -> str | None:
    """Reads the API key; returns None where none is needed."""
    if path is None:
        if not is_local(host):
            why = "is reachable from other machines"
            raise InputError(f"--host {host}", None, why, "add --api_key FILE")
        return None
    return _read_key_file(path, "--api_key")


def _read_key_file(path: Path, option: str) -> str:
    """Reads a key of at least 16 characters."""
    with open_regular_file(path) as file:
        key = file.read(1000).decode("utf-8", "replace").strip()
    if len(key) < 16:
        raise InputError(f"{option} {path} holds a key of {len(key)} characters; give at least 16")
    return key


def read_webhook_secret(path: Path | None, hosts: Sequence[str | Network]) -> bytes | None:
    """Reads the key of the webhooks' signatures; returns None where webhooks are not allowed."""
    if path is None and not hosts:
        return None
    if path is None or not hosts:
        option, missing = "--webhook_hosts", "--webhook_secret_file"
        if path is not None:
            option, missing = missing, option
        raise InputError(option, None, f"needs {missing}", f"add {missing}, or drop it")
    text = _read_key_file(path, "--webhook_secret_file")
    try:
        return read_signing_key(text)
    except ValueError as error:
        why = "holds a secret whsec_... that is no base64"
        raise InputError(f"--webhook_secret_file {path}", None, why, "copy it again") from error


def _make_limits(options: argparse.Namespace) -> Limits:
    """Returns the limits of the service from its options."""
    return Limits(
        queue=options.queue,
        cached_prompts=options.kept_texts,
        batch_size=options.together,
        pixels=options.max_megapixels * 1_000_000,
        frames=options.max_frames,
        keep_days=options.keep_days,
        quota=None if options.quota_gb is None else math.ceil(options.quota_gb * 1e9),
        webhook_hosts=WebhookHosts(
            frozenset(host for host in options.webhook_hosts if isinstance(host, str)),
            tuple(host for host in options.webhook_hosts if not isinstance(host, str)),
        ),
    )


def _open_video_store(options: argparse.Namespace) -> Store | None:
    """Returns the store, which can be written; None without --store."""
    if options.store is None:
        return None
    store = Store(options.store)
    asyncio.run(store.check(options.journal / "jobs"))
    return store


def _bind_and_lock(options: argparse.Namespace) -> tuple[list[socket.socket], BinaryIO]:
    """Binds the sockets and locks the journal folder, which is created after the sockets."""
    journal: Path = options.journal
    lock = lock_journal(journal) if journal.exists() else None
    sockets = open_sockets(options.host, options.port, "--host")
    if lock is None:
        journal.mkdir(parents=True, exist_ok=True)
        lock = lock_journal(journal)
    return sockets, lock


def serve_requests(
    options: argparse.Namespace,
    flags: Layer,
    run: Run,
    nodes: Nodes,
    key: str | None,
    secret: bytes | None,
) -> int:
    """Serves requests until SIGINT or SIGTERM; returns the exit code.

    Args:
        flags: Flags of generate.py.
        run: The run that they resolve to.
        key: The API key; None if none is needed.
        secret: The key of the webhooks' signatures; None if they are not allowed.
    """
    store = _open_video_store(options)
    clients = Connections(compute_max_connections(options.ranks))
    sockets, lock = _bind_and_lock(options)
    metrics, journal, name = Metrics(), options.journal, options.name
    names = options.served_model_name
    service = Service(
        flags,
        run,
        journal,
        options.ranks,
        nodes,
        name,
        names,
        _make_limits(options),
        metrics.count_event,
    )
    if secret is not None:
        Webhooks(service, secret, service.limits.webhook_hosts, metrics.count_webhook)
    if store is None and (stored := service.list_stored_jobs()):
        message = "%d videos have only a record here; --store lists those that it has."
        logger.warning(message, len(stored))
    if store is not None:
        uploads = StoreUploads(service, store, metrics.count_store)
        service.background_tasks.append(uploads.restore_jobs)
    application = app.make_app(
        service,
        metrics,
        host=options.host,
        names=options.host_name,
        origins=options.origin,
        proxies=options.trusted_proxy,
        api_key=key,
        most_bytes=options.max_body * 1_000_000,
        is_busy=lambda: clients.is_busy,
        store=store,
        root_path=options.root_path,
        max_listeners=min(MAX_LISTENERS, clients.max_connections // 4),
    )
    for signum in (signal.SIGINT, signal.SIGTERM):  # uvicorn re-raises them after shutdown
        signal.signal(signum, lambda *_: None)
    port = sockets[0].getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    logger.info("Serving %s at http://%s:%d", service.models[0], host, port)
    server = make_server(application, clients, service.begin_stop)
    with lock, suppress(KeyboardInterrupt):
        server.run(sockets)
    return 0 if server.started and not service.journal.is_lost else 1
