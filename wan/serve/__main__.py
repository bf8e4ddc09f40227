"""Command line of the server: `python -m wan.serve [OPTIONS] -- FLAGS`."""

from __future__ import annotations

import argparse
import math
import signal
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from wan import env, log
from wan.checkpoint.files import open_regular_file
from wan.cli import failures, flags, main
from wan.cli.flags import Parser
from wan.cli.programs import make_argument_type
from wan.log import logger
from wan.serve.folders import NAME_LENGTH, check_journal, lock_journal
from wan.settings.command import (
    AnimateOptions,
    ImageOptions,
    PlanOptions,
    PromptFileOptions,
    ResumeOptions,
    SpeechOptions,
    VaceOptions,
)
from wan.settings.errors import InputError, get_exit_code
from wan.settings.fields import list_options
from wan.settings.values import integer, read_path, read_text_value, real

if TYPE_CHECKING:
    from wan.run import Run
    from wan.serve.connections import Connections, LimitedSocket
    from wan.serve.group import Nodes
    from wan.serve.service import Limits

_OF_ONE = {
    *(
        name
        for kind in (
            ImageOptions,
            SpeechOptions,
            AnimateOptions,
            VaceOptions,
            PlanOptions,
            PromptFileOptions,
        )
        for name in list_options(kind)
    ),
    *list_options(ResumeOptions),
    *("trace", "trace_steps", "trace_kernels", "use_prompt_extend", "save_latents"),
}
"""Flags of generate.py that belong to one video and do not affect how the model is loaded."""
_EPILOG = """flags of generate.py that decide how the model is loaded follow after "--":
  python -m wan.serve --ranks 8 -- --ckpt_dir ./Wan2.2-T2V-A14B --ulysses_size 8 --comm_type 1
"""


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the service options; returns them and the flags of generate.py after `--`."""
    own, theirs = list(argv), []
    if "--" in own:
        place = own.index("--")
        own, theirs = own[:place], own[place + 1 :]
    parser = Parser(
        prog="python -m wan.serve",
        description="Generate videos over HTTP with a model that stays loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number = parser.add_argument
    few, many = make_argument_type(integer(1, 10_000)), make_argument_type(integer(1, 1_000_000))
    days, gigabytes = (
        make_argument_type(real(0, 36_500, exclude_min=True)),
        make_argument_type(real(0, 1e6, exclude_min=True)),
    )
    folder, words = make_argument_type(read_path), make_argument_type(read_text_value)
    number(
        "--host",
        type=words,
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1)",
    )
    number(
        "--port",
        type=make_argument_type(integer(0, 65_535)),
        default=8000,
        help="port to listen on, 0 for a free one (default 8000)",
    )
    number("--ranks", type=few, default=1, help="ranks that generate each video (default 1)")
    number("--nodes", type=few, default=1, help="machines that run these ranks (default 1)")
    number(
        "--node_address",
        type=words,
        help="HOST:PORT of this machine, as the other machines reach it; with --nodes",
    )
    number(
        "--journal",
        type=folder,
        default=Path("videos"),
        help="folder for the journal and the videos (default videos)",
    )
    number("--name", type=words, default="", help="name of this replica, part of its jobs' ids")
    number("--api_key", type=folder, help="file with the API key that requests must send")
    number(
        "--host_name",
        type=words,
        action="append",
        default=[],
        help="further host name that requests may use; repeatable",
    )
    number("--queue", type=many, default=100, help="maximum of queued jobs (default 100)")
    number(
        "--together",
        type=few,
        default=8,
        help="maximum of jobs that share each load of an expert (default 8)",
    )
    texts = make_argument_type(integer(0, 1_000_000))
    number(
        "--kept_texts",
        type=texts,
        default=64,
        help="prompts whose embeddings are cached in host memory (default 64)",
    )
    number("--max_body", type=few, default=64, help="MB of a request body at most (default 64)")
    number("--max_frames", type=many, default=1000, help="frames of a video at most (default 1000)")
    number(
        "--max_megapixels",
        type=many,
        default=1000,
        help="megapixels of all frames of a video at most (default 1000)",
    )
    number("--keep_days", type=days, help="days after which ended jobs are deleted (default never)")
    number(
        "--quota_gb",
        type=gigabytes,
        help="GB of all files above which the oldest ended jobs are deleted (default no limit)",
    )
    found = parser.parse_args(own)
    if found.ranks % found.nodes:
        raise InputError(f"--ranks {found.ranks} must be a multiple of --nodes {found.nodes}")
    if found.name and not (found.name.isascii() and found.name.replace("-", "").isalnum()):
        raise InputError(f"--name {found.name} must be of letters, digits and dashes")
    if len(found.name) > NAME_LENGTH:
        raise InputError(f"--name {found.name} must have at most {NAME_LENGTH} characters")
    if not found.host:
        raise InputError("--host is empty", remedy="give an address of this machine")
    return found, theirs


def _nodes(count: int, address: str | None) -> Nodes:
    """Returns the machines that run the ranks, from --nodes and --node_address."""
    from wan.serve.connections import Connections, open_sockets
    from wan.serve.group import ONE_NODE, Nodes

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
    for one in open_sockets(host, 0, Connections(1), "--node_address"):
        one.close()  # only checks that HOST is an address of this machine
    return nodes


def _run(argv: Sequence[str], ranks: int, nodes: int) -> tuple[Run, dict[str, Any]]:
    """Resolves the flags of generate.py; returns the run and the settings that were given."""
    env.simulate_ranks(ranks, nodes)
    given = flags.parse_flags(argv)
    of_one = [name for name in given if name in _OF_ONE]
    if of_one:
        raise InputError(f"`{of_one[0]}` is about one video", remedy="drop it")
    return main.resolve_arguments(argv, require_inputs=False), given


def _key(path: Path | None, host: str) -> str | None:
    """Reads the API key; returns None where none is needed."""
    from wan.serve.app import is_local

    if path is None:
        if not is_local(host):
            why = "is reachable from other machines"
            raise InputError(f"--host {host}", None, why, "add --api_key FILE")
        return None
    with open_regular_file(path) as file:
        key = file.read(1000).decode("utf-8", "replace").strip()
    if len(key) < 16:
        raise InputError(f"--api_key {path} holds a key of {len(key)} characters; give at least 16")
    return key


def _limits(options: argparse.Namespace) -> Limits:
    """Returns the limits of the service from its options."""
    from wan.serve.service import Limits

    return Limits(
        queue=options.queue,
        texts=options.kept_texts,
        together=options.together,
        pixels=options.max_megapixels * 1_000_000,
        frames=options.max_frames,
        keep_days=options.keep_days,
        quota=None if options.quota_gb is None else math.ceil(options.quota_gb * 1e9),
    )


def _listen(
    options: argparse.Namespace, connections: Connections
) -> tuple[list[LimitedSocket], BinaryIO]:
    """Binds the sockets and locks the journal folder, which is created after the sockets."""
    from wan.serve.connections import open_sockets

    journal: Path = options.journal
    lock = lock_journal(journal) if journal.exists() else None
    sockets = open_sockets(options.host, options.port, connections, "--host")
    if lock is None:
        journal.mkdir(parents=True, exist_ok=True)
        lock = lock_journal(journal)
    return sockets, lock


def serve(argv: Sequence[str]) -> int:
    """Runs the service until SIGINT or SIGTERM; returns the exit code."""
    options, theirs = _options(argv)
    try:
        from wan.serve import app, connections
        from wan.serve.metrics import Metrics
        from wan.serve.service import Service
    except ImportError as error:
        why = f"The service needs {error.name}"
        raise InputError(why, remedy="pip install -r requirements-serve.txt") from error
    key = _key(options.api_key, options.host)
    nodes = _nodes(options.nodes, options.node_address)
    check_journal(options.journal)
    theirs += ["--save_file", str(options.journal.absolute() / "video.mp4")]  # never written
    run, given = _run(theirs, options.ranks, options.nodes)
    for notice in run.notices:
        logger.warning(env.make_flag_naming().render(notice))
    clients = connections.Connections(connections.count_connections(options.ranks))
    sockets, lock = _listen(options, clients)
    metrics, journal, name = Metrics(), options.journal, options.name
    more = (journal, options.ranks, nodes, name, _limits(options), metrics.seen)
    try:
        service = Service(theirs, given, run, *more)
    except sqlite3.Error as error:
        why, remedy = f"has a damaged journal.sqlite ({error})", "move it away, or give another one"
        raise InputError(f"--journal {journal}", None, why, remedy) from error
    application = app.make(
        service,
        metrics,
        host=options.host,
        names=options.host_name,
        api_key=key,
        most_bytes=options.max_body * 1_000_000,
        is_busy=lambda: clients.is_busy,
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn re-raises them after shutdown
        signal.signal(number, lambda *_: None)
    port = sockets[0].getsockname()[1]
    logger.info("Serving %s at http://%s:%d", service.model, options.host, port)
    server = connections.make_server(application, clients)
    with lock, suppress(KeyboardInterrupt):
        server.run([*sockets])
    return 0 if server.started else 1


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit codes of `wan.cli.main.main`."""
    log.set_up_logging()
    try:
        return serve(sys.argv[1:] if argv is None else argv)
    except BaseException as error:
        sentence = failures.describe_error(error)
        if sentence is None:
            raise
        failures.print_error(sentence, "wan.serve")
        return get_exit_code(error)


if __name__ == "__main__":
    sys.exit(run())
