"""FA_Power_Cap and the step caches for diffusers' Wan pipelines, in one call.

    from wan.diffusers import apply_cache_on_pipe, parallelize_pipe
    parallelize_pipe(pipe, ulysses_size=4, comm_type=1)  # on every rank, after init_process_group
    apply_cache_on_pipe(pipe, "first_block", threshold=0.08)

diffusers itself is not changed: `hooks` uses its attention processors and hooks.
"""
# ruff: noqa: E402 (the version is checked before diffusers is imported)

from __future__ import annotations

import re
from importlib.metadata import version

from wan.settings.errors import InputError, name_settings

VERSIONS = ">=0.40,<0.43"  # of diffusers, as in requirements.txt
_installed, _oldest, _first_unsupported = (
    tuple(map(int, re.findall(r"\d+", text)[:2]))
    for text in (version("diffusers"), *VERSIONS.split(","))
)
if not _oldest <= _installed < _first_unsupported:
    raise InputError(f"diffusers is {version('diffusers')}; install diffusers{VERSIONS}.")

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from wan.diffusers import hooks
from wan.diffusers.denoise_loop import ANIMATE2_PIPELINES, PIPELINES
from wan.diffusers.session import NETWORKS, Networks, Session, TransformerModel
from wan.distributed import mesh
from wan.settings.attention import Attention
from wan.settings.execution import Execution
from wan.settings.fields import list_options
from wan.settings.flags import DIFFUSERS_NAMING
from wan.settings.layers import merge, read_constructor
from wan.settings.parallel import Parallel
from wan.settings.removed import refuse_removed
from wan.settings.step_cache import StepCache
from wan.utils.log import logger

Pipe = TypeVar("Pipe")
Transformer = TypeVar("Transformer", bound=TransformerModel)

CACHE_FLAGS = frozenset(list_options(StepCache))
KEYWORDS = frozenset(
    name
    for group in (Attention, Parallel, Execution)
    for name, option in list_options(group).items()
    if option.diffusers == name
)
"""Flags of the command line that `parallelize_pipe` takes."""


def parallelize_pipe(pipe: Pipe, **settings: Any) -> Pipe:
    """Makes the ranks of torch.distributed share each video of a pipeline; returns the pipeline.

    Every rank must call it, and then the pipeline, with the same arguments and equal generators;
    every rank gets the video. A single process may call it too, for FP8 or block-sparse attention.

    Args:
        pipe: Call `enable_model_cpu_offload` after this function.
        **settings: `KEYWORDS`: comm_type, ulysses_size, fa_quant, ... Defaults are those of the
            command line; device: that of the networks or, if it is the CPU, auto.

    Raises:
        InputError: A ValueError, for settings that the command line refuses, and for networks whose
            attention or hooks are not diffusers' default ones.
    """
    with name_settings(DIFFUSERS_NAMING):
        networks = _get_networks(pipe)
        values = _drop_unused_parallel(_load_settings(settings))
        _attach_session(Session(networks, pipe, values, mesh.get_num_ranks()))
    return pipe


def parallelize_transformer(transformer: Transformer, **settings: Any) -> Transformer:
    """Parallelizes one network that is called by another program than a pipeline; returns it.

    Block-sparse attention needs the step: from diffusers 0.41 on, call the network inside
    `transformer.cache_context("cond", step_index=..., num_inference_steps=...)`.
    """
    with name_settings(DIFFUSERS_NAMING):
        values = _load_settings(settings)
        if values.get("cfg_size") == 2:
            why = "pairs the calls of a pipeline"
            raise InputError("`cfg_size=2`", why=why, remedy="use parallelize_pipe")
        networks = _check_networks({"dit": transformer})
        _attach_session(
            Session(networks, None, _drop_unused_parallel(values), mesh.get_num_ranks())
        )
    return transformer


def apply_cache_on_pipe(pipe: Pipe, policy: str, **parameters: Any) -> Pipe:
    """Sets the step cache of a pipeline, replacing an existing one; returns the pipeline.

    Call `parallelize_pipe` first, so that ranks that share a video skip the same steps.

    Args:
        policy: As --step_cache; "none" removes the cache.
        **parameters: Parameters of the policy (threshold, warmup, ...), which may also follow its
            name; and start_step, end_step, attentioncache_interval.

    Raises:
        InputError: As the command line. A policy that does not fit the steps or the guidance of a
            video is refused when the pipeline is called.
    """
    with name_settings(DIFFUSERS_NAMING):
        flags = {name: value for name, value in parameters.items() if name in CACHE_FLAGS}
        texts = [
            f"{name}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
            for name, value in parameters.items()
            if name not in CACHE_FLAGS
        ]
        flags["step_cache"] = policy
        if texts:
            flags["step_cache"] += ("," if ":" in policy else ":") + ",".join(texts)
        values = dict(merge(read_constructor(flags, DIFFUSERS_NAMING)))
        previous = hooks.get_session(_get_networks(pipe, allow_hooks=True))
        if previous is not None and previous.pipe is None:
            raise InputError("The network is parallelised alone; call parallelize_pipe instead.")
        if previous is None:
            session = Session(_get_networks(pipe), pipe, values, world_size=1, caches_only=True)
        else:
            values = {
                key: setting for key, setting in previous.values.items() if key not in CACHE_FLAGS
            } | values
            world = previous.setup.parallel.world_size
            caches_only = previous.caches_only
            session = Session(previous.networks, pipe, values, world, previous.groups, caches_only)
            hooks.detach_hooks(previous.networks)
        if session.setup.policy is not None or not session.caches_only:
            hooks.attach_hooks(session)
    return pipe


def deparallelize(pipe: Any) -> Any:
    """Removes parallelism and step cache from a pipeline or a transformer; returns it."""
    is_network = isinstance(pipe, nn.Module)
    if is_network:
        networks = _check_networks({"dit": pipe}, allow_hooks=True)
    else:
        networks = _get_networks(pipe, allow_hooks=True)
    session = hooks.get_session(networks)
    hooks.detach_hooks(networks)
    if session is not None and session.groups is not None:
        session.groups.release()
    return pipe


def _attach_session(session: Session) -> None:
    hooks.attach_hooks(session)
    session.announce()


def _drop_unused_parallel(values: dict[str, Any]) -> dict[str, Any]:
    """Drops settings of parallelism in a single process, so that a script runs on 1 or N ranks."""
    if mesh.get_num_ranks() > 1:
        return values
    unused = {name for name in list_options(Parallel) if values.get(name)} - {"dist_timeout"}
    if unused:
        names = ", ".join(f"`{name}`" for name in sorted(unused))
        notice = f"This is one process, so {names} ha{'s' if len(unused) == 1 else 've'} no effect."
        logger.warning(DIFFUSERS_NAMING.render(notice))
    return {name: value for name, value in values.items() if name not in unused}


def _load_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name in settings.keys() - KEYWORDS:
        refuse_removed(name)
        raise InputError(f"{name} is no keyword here; there are {', '.join(sorted(KEYWORDS))}.")
    return dict(merge(read_constructor(settings, DIFFUSERS_NAMING)))


def _get_networks(pipe: Any, allow_hooks: bool = False) -> Networks:
    """Returns the checked networks of a pipeline by expert; one of two experts may be missing."""
    if isinstance(pipe, ANIMATE2_PIPELINES):
        raise InputError(
            f"{type(pipe).__name__} is not supported: its blocks attend to stored keys and values "
            "of another video, which are not sharded; call it without wan.diffusers."
        )
    if not isinstance(pipe, PIPELINES):
        raise InputError(f"{type(pipe).__name__} is not supported; {_list_classes(PIPELINES)} are.")
    by_expert = {"dit": getattr(pipe, "transformer", None)}  # a modular one may load it later
    if pipe.config.get("boundary_ratio") is not None:
        low_noise = getattr(pipe, "transformer_2", None)
        by_expert = {"high_noise": by_expert["dit"], "low_noise": low_noise}
    networks = {expert: network for expert, network in by_expert.items() if network is not None}
    if not networks:
        raise InputError("The pipeline was loaded without its transformer; load it with one.")
    if len({id(network) for network in networks.values()}) < len(networks):
        raise InputError("The pipeline has one network as both experts; load it with two.")
    return _check_networks(networks, allow_hooks)


def _check_networks(networks: Networks, allow_hooks: bool = False) -> Networks:
    for network in networks.values():
        for objection in _find_objections(network, allow_hooks):
            raise InputError(objection)
    return networks


def _find_objections(network: Any, allow_hooks: bool) -> Iterator[str]:
    """Yields a sentence for each property of a network that is incompatible with our hooks.

    allow_hooks: the network may have our hooks.
    """
    if hasattr(network, "_orig_mod") or getattr(network, "_compiled_call_impl", None) is not None:
        yield "The network is compiled as a whole; compile its blocks: compile_repeated_blocks()."
    if not isinstance(network, NETWORKS):
        yield f"{type(network).__name__} is not supported; {_list_classes(NETWORKS)} are."
    if any(hasattr(module, "_hf_hook") for module in network.modules()):
        yield (
            "The network has accelerate's hooks, of an offload or a device_map; remove them "
            "(pipe.remove_all_hooks()), and offload after this call."
        )
    if network.is_cache_enabled:
        yield "The network has a cache of diffusers; call its disable_cache(), then this."
    if allow_hooks:
        return
    if hooks.get_session({"": network}) is not None:
        yield "The network has our hooks already: call deparallelize first, the cache comes last."
    for block in (*network.blocks, *getattr(network, "vace_blocks", ())):
        proc = block.attn1.get_processor()
        if type(proc) is not type(block.attn1)._default_processor_cls or proc._attention_backend:
            yield (
                f"Self-attention is computed by {type(proc).__name__} with attention backend "
                f"{proc._attention_backend}; undo that, and name a kernel by attention_backend."
            )
    if getattr(network, "_parallel_config", None) is not None:
        yield "The network has diffusers' own parallelism; load it without enable_parallelism."


def _list_classes(classes: tuple[Any, ...]) -> str:
    *names, last = (item.__name__ for item in classes)
    return f"{', '.join(names)} and {last}"
