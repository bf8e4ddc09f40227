"""Settings of the Python classes, given as keywords under the names of the flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wan.checkpoint import quantised
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.quantised import QuantisedDit
from wan.cli import flags
from wan.settings import attention as attention_flags
from wan.settings.attention import Attention
from wan.settings.errors import InputError
from wan.settings.execution import Execution
from wan.settings.parallel import SIZES, Parallel

PARALLEL = (*SIZES, "ring_type", "comm_type", "fa_alltoall_overlap")
ATTENTION = (
    "attention_algo",
    "fa_quant",
    "quant_alltoall",
    "use_rainfusion",
    "sparsity",
    "sparse_start_step",
    "rainfusion_type",
    "mask_refresh_interval",
    "fused_ops",
    "fa_freq_cap",
    "fa_freq_restore",
    "quant_dit_path",
)
_OWN = ("dit_fsdp", "t5_fsdp", "t5_cpu")  # official parameters, checked together with the others


def read(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Checked settings; None and False are "not given". InputError for unknown names and values."""
    given = {name: value for name, value in keywords.items() if value is not None}
    unknown = given.keys() - {*PARALLEL, *ATTENTION, *_OWN}
    if unknown:
        raise InputError(f"{min(unknown)} is not a known keyword; remove it.")
    given = {name: value for name, value in given.items() if value is not False}
    if isinstance(folder := given.get("quant_dit_path"), Path):
        given["quant_dit_path"] = str(folder)
    return {name: value for name, value in flags.read(given, "{}").items() if value is not False}


def attending(
    values: Mapping[str, Any],
    execution: Execution,
    checkpoint: Checkpoint,
    topology: Parallel,
    steps: int,
) -> tuple[Attention, QuantisedDit | None]:
    """The attention and the quantised weights that checked settings ask for. InputError as there.

    steps: a quarter of which is dense where RainFusion's first step is not given. A request's own
    steps and tokens are for `attention_flags.check_request`.
    """
    chosen = attention_flags.resolve(
        values, execution, steps=steps, parallel=topology, head_dim=checkpoint.head_dim
    )
    if "quant_dit_path" not in values:
        return chosen, None
    weights = quantised.resolve(
        Path(values["quant_dit_path"]),
        checkpoint,
        device=execution.device,
        dit_fsdp=topology.dit_fsdp,
        fa_quant=chosen.fa_quant,
    )
    return chosen, weights
