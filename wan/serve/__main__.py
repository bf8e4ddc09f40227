"""Command line of the server: `python -m wan.serve [OPTIONS] -- FLAGS`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wan.app import failures, resolve
from wan.app.flag_parser import Parser, parse_flags
from wan.app.programs import make_argument_type
from wan.serve.http.operations import read_root_path
from wan.serve.jobs.folders import NAME_LENGTH, check_journal_folder
from wan.serve.requests.addresses import read_model_name, read_network, read_origin
from wan.serve.requests.webhook_hosts import read_webhook_host
from wan.settings.command import PlanOptions, PromptFileOptions, ResumeOptions
from wan.settings.errors import InputError, get_exit_code
from wan.settings.fields import list_options
from wan.settings.flags import FLAGS, FOREIGN_NAMES
from wan.settings.layers import Layer
from wan.settings.values import integer, read_path, read_text_value, real
from wan.settings.video_options import INPUT_OPTIONS
from wan.utils import env, log
from wan.utils.log import logger
from wan.utils.text_streams import set_up_text

if TYPE_CHECKING:
    from wan.app.run import Run

_PER_VIDEO_FLAGS = {
    *(
        name
        for group in (*INPUT_OPTIONS, PlanOptions, PromptFileOptions)
        for name in list_options(group)
    ),
    *list_options(ResumeOptions),
    *("trace", "trace_steps", "trace_kernels", "use_prompt_extend", "save_latents", "video_lora"),
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
    _add_delivery_options(parser)
    _add_limit_options(parser)
    _refuse_generate_flags(service_args, {*parser._option_string_actions})
    args = parser.parse_args(service_args)
    if args.ranks % args.nodes:
        raise InputError(f"--ranks {args.ranks} must be a multiple of --nodes {args.nodes}")
    if args.name and not (args.name.isascii() and args.name.replace("-", "").isalnum()):
        raise InputError(f"--name {args.name} must be of letters, digits and dashes")
    if len(args.name) > NAME_LENGTH:
        raise InputError(f"--name {args.name} must have at most {NAME_LENGTH} characters")
    if not args.host:
        raise InputError("--host is empty", remedy="give an address of this machine")
    lora_options = {"lora_folder": args.lora_folder, "lora_cache": args.lora_cache}
    for name, value in lora_options.items():
        generate_args += [] if value is None else [f"--{name}", str(value)]
    return args, generate_args


def _refuse_generate_flags(arguments: Sequence[str], options: Container[str]) -> None:
    """Refuses flags of generate.py, also by their names in other programs, before `--`.

    options: The options of the service.
    """
    for option in (text.partition("=")[0] for text in arguments if text.startswith("--")):
        name = option.removeprefix("--")
        flag = name if name in FLAGS else FOREIGN_NAMES.get(name.replace("-", "_"), "")
        is_usable = flag in FLAGS and flag not in (*_PER_VIDEO_FLAGS, "save_file")
        if option not in options and is_usable:
            why, remedy = "is no option of the service", f"give --{flag} after --"
            raise InputError(option, why=why, remedy=remedy)


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
    add(
        "--origin",
        type=make_argument_type(read_origin),
        action="append",
        default=[],
        help="site whose pages may use the service, such as https://video.example; repeatable",
    )
    add(
        "--trusted_proxy",
        type=make_argument_type(read_network),
        action="append",
        default=[],
        help="address or network of a proxy whose X-Forwarded-Host is believed; repeatable",
    )
    add(
        "--root_path",
        type=make_argument_type(read_root_path),
        default="",
        metavar="PATH",
        help="path below which a proxy serves the service, such as /wan (default none)",
    )
    add(
        "--served_model_name",
        type=make_argument_type(read_model_name),
        action="append",
        default=[],
        help="further name of the model in requests; the first one is in responses; repeatable",
    )


def _add_delivery_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of webhooks and of the store."""
    parser.add_argument(
        "--webhook_hosts",
        type=make_argument_type(read_webhook_host),
        action="append",
        default=[],
        metavar="HOST",
        help="host to which a request's webhook_url may point: a name, * for all, or an address or "
        "network, which private addresses must be in; repeatable (default none)",
    )
    parser.add_argument(
        "--webhook_secret_file",
        type=make_argument_type(read_path),
        help="file with the secret that signs webhooks; with --webhook_hosts",
    )
    parser.add_argument(
        "--store",
        type=make_argument_type(read_text_value),
        metavar="URL",
        help="folder or fsspec address, such as s3://BUCKET/FOLDER, that completed videos move to",
    )


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that limit jobs, requests and storage."""
    add, small_int = parser.add_argument, make_argument_type(integer(1, 10_000))
    large_int = make_argument_type(integer(1, 1_000_000))
    days = make_argument_type(real(0, 36_500, exclude_min=True))
    gigabytes = make_argument_type(real(0, 1e6, exclude_min=True))
    add("--queue", type=large_int, default=100, help="maximum of queued videos (default 100)")
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
    add(
        "--lora_folder",
        type=make_argument_type(read_path),
        help="folder of .safetensors files that requests may name as LoRAs (default none)",
    )
    add(
        "--lora_cache",
        type=make_argument_type(real(0, 1e6)),
        help="GB of host memory of each rank for LoRAs of earlier videos (default 4)",
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


def _resolve_service_run(
    argv: Sequence[str], folder: Path, ranks: int, nodes: int
) -> tuple[Run, Layer]:
    """Resolves the flags of generate.py; returns the run and the flags."""
    env.simulate_ranks(ranks, nodes)
    flags = parse_flags(argv)
    per_video = [name for name in flags.values if name in _PER_VIDEO_FLAGS]
    if per_video:
        raise InputError(f"`{per_video[0]}` is about one video", remedy="drop it")
    # The file is never written: each job gets another one.
    flags = flags.with_values({"save_file": folder.absolute() / "video.mp4"})
    return resolve.resolve_settings(flags, resolve.ResolveContext(require_inputs=False)), flags


def run_service(argv: Sequence[str]) -> int:
    """Runs the service until SIGINT or SIGTERM; returns the exit code."""
    options, generate_args = _parse_service_options(argv)
    try:
        from wan.serve.http import server
    except ImportError as error:
        why = f"The service needs {error.name}"
        raise InputError(why, remedy="pip install -r requirements-serve.txt") from error
    key = server.read_api_key(options.api_key, options.host)
    secret = server.read_webhook_secret(options.webhook_secret_file, options.webhook_hosts)
    nodes = server.make_nodes(options.nodes, options.node_address)
    check_journal_folder(options.journal)
    run, flags = _resolve_service_run(generate_args, options.journal, options.ranks, options.nodes)
    for notice in run.notices:
        logger.warning(env.make_flag_naming().render(notice))
    return server.serve_requests(options, flags, run, nodes, key, secret)


def run_service_cli(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit codes of generate.py."""
    set_up_text()
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
