"""`python -m wan.serve [OPTIONS] -- FLAGS`: starts the front, and it the ranks."""

from __future__ import annotations

import argparse
import fcntl
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan import env, log
from wan.checkpoint.files import opened
from wan.cli import failures, flags, main
from wan.cli.flags import Parser
from wan.log import logger
from wan.settings.command import Controlled, Driving, Earlier, Images, Many, Planning, Sounds
from wan.settings.errors import InputError, exit_code
from wan.settings.fields import options

if TYPE_CHECKING:
    from wan.run import Run
    from wan.serve.group import Nodes

_OF_ONE = {
    *(
        name
        for kind in (Images, Sounds, Driving, Controlled, Planning, Many)
        for name in options(kind)
    ),
    *options(Earlier),
    *("trace", "trace_steps", "trace_kernels", "use_prompt_extend", "save_latents"),
}
"""Flags that say nothing about how a model is loaded."""
_AT_LEAST_ONE = (
    *("ranks", "nodes", "queue", "together"),
    *("max_body", "max_frames", "max_megapixels"),
)
_EPILOG = """flags of generate.py that decide loading follow after "--":
  python -m wan.serve --ranks 8 -- --ckpt_dir ./Wan2.2-T2V-A14B --ulysses_size 8 --comm_type 1
"""


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the service's own options, and the flags of generate.py."""
    own, theirs = list(argv), []
    if "--" in own:
        place = own.index("--")
        own, theirs = own[:place], own[place + 1 :]
    parser = Parser(
        prog="python -m wan.serve",
        description="Serve videos over HTTP with a model that stays loaded.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number = parser.add_argument
    number("--host", default="127.0.0.1", help="address to listen to (127.0.0.1)")
    number("--port", type=int, default=8000, help="port to listen to (8000)")
    number("--ranks", type=int, default=1, help="processes that share each video (1)")
    number("--nodes", type=int, default=1, help="machines that share these processes (1)")
    number("--node_address", help="HOST:PORT of this machine, where the other machines find it")
    number("--journal", type=Path, default=Path("videos"), help="folder of jobs (videos)")
    number("--name", default="", help="of this replica; it becomes a part of its jobs' ids")
    number("--api_key", type=Path, help="file with the key that requests must bring")
    number("--host_name", action="append", default=[], help="further name of this host; repeatable")
    number("--queue", type=int, default=100, help="jobs that may wait (100)")
    number("--together", type=int, default=8, help="jobs at most that share loads of experts (8)")
    number("--kept_texts", type=int, default=64, help="prompts whose embeddings are kept (64)")
    number("--max_body", type=int, default=64, help="MB of a request (64)")
    number("--max_frames", type=int, default=1000, help="frames of a video (1000)")
    number("--max_megapixels", type=int, default=1000, help="of all frames of a video (1000)")
    number("--keep_days", type=float, help="delete ended jobs after so many days")
    number("--quota_gb", type=float, help="delete the oldest ended jobs above so many GB")
    found = parser.parse_args(own)
    for name in _AT_LEAST_ONE:
        if getattr(found, name) < 1:
            raise InputError(f"--{name} {getattr(found, name)} must be at least 1")
    if found.kept_texts < 0:
        raise InputError(f"--kept_texts {found.kept_texts} must be at least 0")
    if not 0 <= found.port < 1 << 16:
        raise InputError(f"--port {found.port} must be from 0 to 65535")
    if found.ranks % found.nodes:
        raise InputError(f"--ranks {found.ranks} must be a multiple of --nodes {found.nodes}")
    if found.name and not (found.name.isascii() and found.name.replace("-", "").isalnum()):
        raise InputError(f"--name {found.name} must be of letters, digits and dashes")
    return found, theirs


def _nodes(count: int, address: str | None) -> Nodes:
    """Returns the machines of the ranks."""
    from wan.serve.group import ONE_NODE, Nodes

    if count == 1 and address is None:
        return ONE_NODE
    if count == 1:
        why = "is for several machines, and --nodes is 1"
        raise InputError("--node_address", address, why, "drop it, or give --nodes")
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        why = "must be HOST:PORT of this machine, as the other machines reach it, with --nodes"
        raise InputError("--node_address", address, why)
    return Nodes(count, host, int(port))


def _run(argv: Sequence[str], ranks: int, nodes: int) -> tuple[Run, dict[str, Any]]:
    """Returns the run that the ranks are started for, and its flags."""
    env.stand_for(ranks, nodes)
    given = flags.parse(argv)
    of_one = [name for name in given if name in _OF_ONE]
    if of_one:
        raise InputError(f"`{of_one[0]}` is about one video", remedy="drop it")
    return main.resolved(argv, inputs=False), given


def _key(path: Path | None, host: str) -> str | None:
    """Returns the API key."""
    from wan.serve.app import is_local

    if path is None:
        if not is_local(host):
            why = "is reachable from other machines"
            raise InputError(f"--host {host}", None, why, "add --api_key FILE")
        return None
    with opened(path) as file:
        key = file.read(1000).decode("utf-8", "replace").strip()
    if len(key) < 16:
        raise InputError(f"--api_key {path} holds a key of {len(key)} characters; give at least 16")
    return key


def serve(argv: Sequence[str]) -> int:
    """Runs the service until it is told to stop; returns the exit code."""
    options, theirs = _options(argv)
    try:
        import uvicorn

        from wan.serve import app
        from wan.serve.metrics import Metrics
        from wan.serve.service import Limits, Service
    except ImportError as error:
        why = f"The service needs {error.name}"
        raise InputError(why, remedy="pip install -r requirements-serve.txt") from error
    key = _key(options.api_key, options.host)
    nodes = _nodes(options.nodes, options.node_address)
    options.journal.mkdir(parents=True, exist_ok=True)
    lock = (options.journal / "lock").open("w")  # until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "belongs to a service that runs"
        raise InputError(
            f"--journal {options.journal}", None, why, "give another folder"
        ) from error
    theirs += ["--save_file", str(options.journal.absolute() / "video.mp4")]  # never written
    run, given = _run(theirs, options.ranks, options.nodes)
    for notice in run.notices:
        logger.warning(env.words().render(notice))
    limits = Limits(
        queue=options.queue,
        texts=options.kept_texts,
        together=options.together,
        pixels=options.max_megapixels * 1_000_000,
        frames=options.max_frames,
        keep_days=options.keep_days,
        quota=None if options.quota_gb is None else int(options.quota_gb * 1e9),
    )
    metrics = Metrics()
    service = Service(
        theirs,
        given,
        run,
        options.journal,
        options.ranks,
        nodes,
        options.name,
        limits,
        metrics.seen,
    )
    application = app.make(
        service,
        metrics,
        host=options.host,
        names=options.host_name,
        api_key=key,
        most_bytes=options.max_body * 1_000_000,
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has stopped
        signal.signal(number, lambda *_: None)
    logger.info("Serving %s at http://%s:%d", service.model, options.host, options.port)
    uvicorn.run(
        application,
        host=options.host,
        port=options.port,
        log_level=logging.WARNING,
        timeout_graceful_shutdown=5,
        access_log=False,
    )
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, as that of `wan.cli.main.main`."""
    log.setup()
    try:
        return serve(sys.argv[1:] if argv is None else argv)
    except BaseException as error:
        sentence = failures.describe(error)
        if sentence is None:
            raise
        failures.say(sentence, "wan.serve")
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(run())
