"""Imports of the fork server of `tests.dist`, made once for all ranks; nothing is computed here."""

import gc

import torch
import torch.distributed.device_mesh
import torch.nn.functional

import wan.cli.main
import wan.distributed.rendezvous
import wan.modules.attnlayer
import wan.modules.model
import wan.pipeline.build

__all__ = [
    "torch",
    "wan",
]

gc.freeze()  # runs often collect garbage: ranks need not scan the imported modules
