"""The composition root: the one place that knows every class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from wan.checkpoint.load import (
    WHOLE,
    Adapt,
    Blueprint,
    Place,
    Sources,
    as_stored,
    dit_dtypes,
    int8_sources,
    rotations,
)
from wan.checkpoint.quantised import Export
from wan.device import Device
from wan.distributed.exchange import ALONE
from wan.distributed.fsdp import Sharded
from wan.distributed.mesh import Team
from wan.distributed.ring import Ring
from wan.distributed.tokens import ShardedTokens
from wan.kernels.base import Kernel
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.npu import linear as npu_linear
from wan.kernels.select import Selected, select
from wan.log import Stages, logger
from wan.modules import schedule
from wan.modules.attnlayer import FAPowerCapAttention
from wan.modules.interfaces import Collaborators, LocalAttention, LocalTokens
from wan.modules.model import WanModel
from wan.pipeline import text, vae
from wan.pipeline.denoise import both_here
from wan.pipeline.pipeline import Experts, Lazy, Pipeline, Sharing, make_here
from wan.pipeline.setup import Setup
from wan.settings.errors import InputError
from wan.settings.parallel import Parallel

T = TypeVar("T")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pipeline(
    setup: Setup, device: Device, team: Team | None = None, t5_dtype: torch.dtype | None = None
) -> Pipeline:
    """Everything composed and no weight read yet; names and shapes of all tensors are checked.

    Args:
        setup: The checkpoint and the settings.
        device: This rank's.
        team: The ranks, in the topology of the setup; None for one process.
        t5_dtype: What the text encoder computes in; None: the run's precision.

    Raises:
        InputError: For a device that cannot run the setup, and for files that are damaged or do
            not belong together.
    """
    setup.check_device(device.can)
    dtype, compute = precisions(setup, device)
    checkpoint, config = setup.checkpoint, setup.checkpoint.config
    exported = {} if setup.quantised is None or not setup.attention.fp8 else rotations(setup.quantised)
    selected = select(setup.attention, device, checkpoint.head_dim, compute, exported)
    collaborators = _collaborators(setup, selected, team)
    dit_place, t5_place = _places(setup.parallel, team)
    dits = {
        name: Blueprint(
            f"DiT {name}",
            partial(WanModel, **files.config, collaborators=collaborators),
            files.tensors,
            files.folder,
        )
        for name, files in checkpoint.experts.items()
    }
    autoencoder = None if checkpoint.vae is None else vae.blueprint(checkpoint.vae)
    encoder = None if checkpoint.text_encoder is None else text.blueprint(checkpoint.text_encoder)
    _check(setup, dits, autoencoder, encoder)
    stages = Stages(device.synchronize)

    def load_dit(name: str) -> WanModel:
        with stages("loading"):
            adapt = as_stored
            if setup.quantised is not None:
                adapt = _int8_layers(setup.quantised.experts[name], device.torch_device, compute)
            model = dits[name].load(
                device=device.torch_device,
                dtype_of=dit_dtypes(compute, setup.execution.convert_model_dtype),
                place=dit_place,
                adapt=adapt,
            )
            if setup.execution.compile:
                for block in model.blocks:
                    block.compile()
            return model

    ...
