"""The composition root: the one place that knows every class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from wan import attention as attentions
from wan import device as devices
from wan import loading, parts
from wan.attention import AttentionParts
from wan.distributed import mesh
from wan.distributed.exchange import ALONE
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.experts import Experts
from wan.loading_quantised import rotations
from wan.log import Stages, logger
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.local import LocalAttention, LocalTokens
from wan.modules.model import WanModel
from wan.pipeline import Lazy, Pipeline
from wan.settings import on_device
from wan.settings import parallel as parallel_settings
from wan.settings.attention import Attention
from wan.settings.checkpoint import Checkpoint
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import Parallel
from wan.settings.quantised import QuantisedDit
from wan.text import umt5_blocks

T = TypeVar("T")
ONE_PROCESS = Parallel()
PLAIN = Attention()


def pipeline(
    checkpoint: Checkpoint,
    execution: Execution,
    *,
    parallel: Parallel = ONE_PROCESS,
    attention: Attention = PLAIN,
    quantised: QuantisedDit | None = None,
    team: Team | None = None,
    device_index: int = 0,
    t5_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Everything composed, no weight read yet; names and shapes of the networks are checked.

    parallel, team: the topology, and the processes that form it. quantised: where quantised weights
    are. device_index: which device, where there is no team. t5_dtype: the text encoder computes in
    the run's precision unless this says otherwise.
    """
    device = devices.resolve(execution.device, device_index) if team is None else team.device
    dtype = parts.precision(execution, device)
    networks = {name: loading.meta_dit(files) for name, files in checkpoint.experts.items()}
    network = next(iter(networks.values()))
    parts.check_parts(checkpoint, network)
    stages = Stages(device.synchronize)
    compute = parts.dit_dtype(execution, dtype)
    head_dim = checkpoint.head_dim
    on_device.check(execution, attention, quantised, head_dim, device.type, device.chip)
    exported = {} if quantised is None or attention.fa_quant is None else rotations(quantised)
    chosen = attentions.parts(attention, device, head_dim, compute, exported)
    collaborators = _collaborators(parallel, attention, chosen, team)
    dit_place, t5_place = _places(parallel, team)

    def timed(make: Callable[[], T]) -> Lazy[T]:
        def load() -> T:
            with stages("loading"):
                return make()

        return Lazy(load)

    def expert(name: str) -> WanModel:
        with stages("loading"):
            return parts.expert(
                checkpoint, execution, device, dtype, name, collaborators, dit_place, quantised
            )

    logger.info(
        "%s checkpoint, %s, %s, %d x %d heads",
        checkpoint.layout,
        device.name(),
        parts.dtype_name(compute),
        network.num_layers,
        network.num_heads,
    )
    logger.info("%s", attentions.line(attention, parallel, network.num_heads, chosen.dense))
    return Pipeline(
        device=device,
        text=timed(
            lambda: parts.text_encoder(
                checkpoint, execution, device, t5_dtype or dtype, network.text_len, t5_place
            )
        ),
        vae=timed(lambda: parts.vae(checkpoint, execution, device)),
        experts=Experts(
            expert,
            offload=execution.offload_model,
            files=parts.weight_files(checkpoint, quantised),
        ),
        text_dim=network.text_dim,
        text_len=network.text_len,
        offload=execution.offload_model,
        stages=stages,
        kernel=chosen.dense.name,
        **_shared(parallel, team),
    )


def team(
    checkpoint: Checkpoint,
    use_sp: bool,
    values: dict[str, Any],
    execution: Execution,
    device_index: int,
) -> tuple[Parallel, Team | None]:
    """The topology for checked settings, and the team of the group that the caller made."""
    world = mesh.running() if use_sp else 1
    if use_sp and world == 1:
        raise InputError(
            "use_sp shares a video among processes, but torch.distributed is not initialised for "
            "several; start with torchrun and call init_process_group first."
        )
    topology, notices = parallel_settings.resolve(values, world, checkpoint.heads, (0, 0))
    for notice in notices:
        logger.warning(notice)
    sizes = (topology.cfg_size, topology.ring_size, topology.ulysses_size)
    if world == 1:
        return topology, None
    return topology, mesh.form(devices.resolve(execution.device, device_index), sizes)


def _collaborators(
    parallel: Parallel, attention: Attention, chosen: AttentionParts, team: Team | None
) -> dict[str, Any]:
    """What all blocks of all networks share: attention, its kernels, and the tokens' shards."""
    shared = {"kernel": chosen.text, "ops": chosen.ops}
    several = team is not None and parallel.sequence_size > 1
    if not (several or chosen.methods or chosen.clock):
        return shared | {"attention": LocalAttention(chosen.dense), "tokens": LocalTokens()}
    group = ALONE if team is None else team.group("ring", "ulysses")
    multiple = attention.row_multiple(parallel.ring_size) if several else 1
    layer = FAPowerCapAttention(
        parallel,
        ALONE if team is None else team.group("ulysses"),
        parallel.fa_alltoall_overlap,
        kernel=chosen.dense,
        ring=None if team is None else Ring(team.group("ring"), parallel.ring_type),
        methods=chosen.methods,
        clock=chosen.clock,
    )
    return shared | {"attention": layer, "tokens": ShardedTokens(group, multiple, chosen.order)}


def _places(parallel: Parallel, team: Team | None) -> tuple[Sharded | None, Sharded | None]:
    """Where the rows of the DiT's and of the text encoder's weights go; None: all to every card."""
    if team is None:
        return None, None
    cut = Sharded(team.world_mesh(), lambda network: network.blocks) if parallel.dit_fsdp else None
    return cut, Sharded(team.world_mesh(), umt5_blocks) if parallel.t5_fsdp else None


def _shared(parallel: Parallel, team: Team | None) -> dict[str, Any]:
    """How the processes of a team come to what only one of them needs to make."""
    if team is None:
        return {}
    shared: dict[str, Any] = {"share_latents": team.from_main}
    if not parallel.t5_fsdp:
        shared["share_text"] = team.from_main
    if parallel.cfg_size == 2:
        shared["branches"] = team.both_branches
    return shared


def resolved(execution: Execution, pipeline: Pipeline) -> dict[str, str]:
    """What "auto" came to, for the record."""
    device = pipeline.device
    dtype = parts.precision(execution, device)
    return {
        "device": device.name(),
        "precision": "fp32" if dtype == torch.float32 else "bf16",
        "dit_dtype": parts.dtype_name(parts.dit_dtype(execution, dtype)),
        "kernel": pipeline.kernel,
    }


def demo_checkpoint(task: str, folder: Path) -> None:
    """Write the tiny random checkpoint that stands in where no trained one does."""
    from tools.make_tiny_checkpoint import make_checkpoint

    logger.info("Making the tiny demo checkpoint %s (once).", folder)
    try:
        make_checkpoint(task, folder)
    except (OSError, InputError):
        if not folder.is_dir():  # otherwise another run has just made the same one
            raise
