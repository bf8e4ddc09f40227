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

from wan.app import failures, flag_parser, launch
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type
from wan.serve.folders import NAME_LENGTH, check_journal_folder, lock_journal
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
from wan.utils import env, log
from wan.utils.files import open_regular_file
from wan.utils.log import logger

if TYPE_CHECKING:
    from wan.app.run import Run
    from wan.serve.connections import Connections, LimitedSocket
    from wan.serve.group import Nodes
    from wan.serve.service import Limits

_PER_VIDEO_FLAGS = {
    *(
        name
        for group in (
            ImageOptions,
            SpeechOptions,
            AnimateOptions,
            VaceOptions,
            PlanOptions,
            PromptFileOptions,
        )
        for name in list_options(group)
    ),
    *list_options(ResumeOptions),
    *("trace", "trace_steps", "trace_kernels", "use_prompt_extend", "save_latents"),
}
"""Flags of generate.py that belong to one video and do not affect how the model is loaded."""
_EPILOG = """flags of generate.py that decide how the model is loaded follow after "--":
  python -m wan.serve --ranks 8 -- --ckpt_dir ./Wan2.2-T2V-A14B --ulysses_size 8 --comm_type 1
"""


def _parse_service_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the service options; returns them and the flags of generate.py after `--`."""
    service_args, generate_args = list(argv), []
    if "--" in service_args:
        separator = service_args.index("--")
        service_args, generate_args = service_args[:separator], service_args[separator + 1 :]
    parser = Parser(
        prog="python -m wan.serve",
        description="Generate videos over HTTP with a model that stays loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_server_options(parser)
    _add_limit_options(parser)
    args = parser.parse_args(service_args)
    if args.ranks % args.nodes:
        raise InputError(f"--ranks {args.ranks} must be a multiple of --nodes {args.nodes}")
    if args.name and not (args.name.isascii() and args.name.replace("-", "").isalnum()):
        raise InputError(f"--name {args.name} must be of letters, digits and dashes")
    if len(args.name) > NAME_LENGTH:
        raise InputError(f"--name {args.name} must have at most {NAME_LENGTH} characters")
    if not args.host:
        raise InputError("--host is empty", remedy="give an address of this machine")
    return args, generate_args


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of addresses, ranks and files."""
    add, small_int = parser.add_argument, make_argument_type(integer(1, 10_000))
    file_path, string = make_argument_type(read_path), make_argument_type(read_text_value)
    add(
        "--host",
        type=string,
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1)",
    )
    add(
        "--port",
        type=make_argument_type(integer(0, 65_535)),
        default=8000,
        help="port to listen on, 0 for a free one (default 8000)",
    )
    add("--ranks", type=small_int, default=1, help="ranks that generate each video (default 1)")
    add("--nodes", type=small_int, default=1, help="machines that run these ranks (default 1)")
    add(
        "--node_address",
        type=string,
        help="HOST:PORT of this machine, as the other machines reach it; with --nodes",
    )
    add(
        "--journal",
        type=file_path,
        default=Path("videos"),
        help="folder for the journal and the videos (default videos)",
    )
    add("--name", type=string, default="", help="name of this replica, part of its jobs' ids")
    add("--api_key", type=file_path, help="file with the API key that requests must send")
    add(
        "--host_name",
        type=string,
        action="append",
        default=[],
        help="further host name that requests may use; repeatable",
    )


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that limit jobs, requests and storage."""
    add, small_int = parser.add_argument, make_argument_type(integer(1, 10_000))
    large_int = make_argument_type(integer(1, 1_000_000))
    days = make_argument_type(real(0, 36_500, exclude_min=True))
    gigabytes = make_argument_type(real(0, 1e6, exclude_min=True))
    add("--queue", type=large_int, default=100, help="maximum of queued jobs (default 100)")
    add(
        "--together",
        type=small_int,
        default=8,
        help="maximum of jobs that share each load of an expert (default 8)",
    )
    count_or_zero = make_argument_type(integer(0, 1_000_000))
    add(
        "--kept_texts",
        type=count_or_zero,
        default=64,
        help="prompts whose embeddings are cached in host memory (default 64)",
    )
    add("--max_body", type=small_int, default=64, help="MB of a request body at most (default 64)")
    add(
        "--max_frames",
        type=large_int,
        default=1000,
        help="frames of a video at most (default 1000)",
    )
    add(
        "--max_megapixels",
        type=large_int,
        default=1000,
        help="megapixels of all frames of a video at most (default 1000)",
    )
    add("--keep_days", type=days, help="days after which ended jobs are deleted (default never)")
    add(
        "--quota_gb",
        type=gigabytes,
        help="GB of all files above which the oldest ended jobs are deleted (default no limit)",
    )


def _make_nodes(count: int, address: str | None) -> Nodes:
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
    for listener in open_sockets(host, 0, Connections(1), "--node_address"):
        listener.close()  # only checks that HOST is an address of this machine
    return nodes


def _resolve_service_run(argv: Sequence[str], ranks: int, nodes: int) -> tuple[Run, dict[str, Any]]:
    """Resolves the flags of generate.py; returns the run and the settings that were given."""
    env.simulate_ranks(ranks, nodes)
    user_settings = flag_parser.parse_flags(argv)
    per_video = [name for name in user_settings if name in _PER_VIDEO_FLAGS]
    if per_video:
        raise InputError(f"`{per_video[0]}` is about one video", remedy="drop it")
    return launch.resolve_argv(argv, require_inputs=False), user_settings


def _read_api_key(path: Path | None, host: str) -> str | None:
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


def _make_limits(options: argparse.Namespace) -> Limits:
    """Returns the limits of the service from its options."""
    from wan.serve.service import Limits

    return Limits(
        queue=options.queue,
        cached_prompts=options.kept_texts,
        batch_size=options.together,
        pixels=options.max_megapixels * 1_000_000,
        frames=options.max_frames,
        keep_days=options.keep_days,
        quota=None if options.quota_gb is None else math.ceil(options.quota_gb * 1e9),
    )


def _bind_and_lock(
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


def run_service(argv: Sequence[str]) -> int:
    """Runs the service until SIGINT or SIGTERM; returns the exit code."""
    options, generate_args = _parse_service_options(argv)
    try:
        from wan.serve import app, connections
        from wan.serve.metrics import Metrics
        from wan.serve.service import Service
    except ImportError as error:
        why = f"The service needs {error.name}"
        raise InputError(why, remedy="pip install -r requirements-serve.txt") from error
    key = _read_api_key(options.api_key, options.host)
    nodes = _make_nodes(options.nodes, options.node_address)
    check_journal_folder(options.journal)
    generate_args += ["--save_file", str(options.journal.absolute() / "video.mp4")]  # never written
    run, user_settings = _resolve_service_run(generate_args, options.ranks, options.nodes)
    for notice in run.notices:
        logger.warning(env.make_flag_naming().render(notice))
    clients = connections.Connections(connections.compute_max_connections(options.ranks))
    sockets, lock = _bind_and_lock(options, clients)
    metrics, journal, name = Metrics(), options.journal, options.name
    service_args = (journal, options.ranks, nodes, name, _make_limits(options), metrics.count_event)
    try:
        service = Service(generate_args, user_settings, run, *service_args)
    except sqlite3.Error as error:
        why, remedy = f"has a damaged journal.sqlite ({error})", "move it away, or give another one"
        raise InputError(f"--journal {journal}", None, why, remedy) from error
    application = app.make_app(
        service,
        metrics,
        host=options.host,
        names=options.host_name,
        api_key=key,
        most_bytes=options.max_body * 1_000_000,
        is_busy=lambda: clients.is_busy,
    )
    for signum in (signal.SIGINT, signal.SIGTERM):  # uvicorn re-raises them after shutdown
        signal.signal(signum, lambda *_: None)
    port = sockets[0].getsockname()[1]
    logger.info("Serving %s at http://%s:%d", service.model, options.host, port)
    server = connections.make_server(application, clients)
    with lock, suppress(KeyboardInterrupt):
        server.run([*sockets])
    return 0 if server.started else 1


def run_service_cli(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit codes of `wan.cli.main.main`."""
    log.set_up_logging()
    try:
        return run_service(sys.argv[1:] if argv is None else argv)
    except BaseException as error:
        sentence = failures.describe_error(error)
        if sentence is None:
            raise
        failures.print_error(sentence, "wan.serve")
        return get_exit_code(error)


if __name__ == "__main__":
    sys.exit(run_service_cli())
