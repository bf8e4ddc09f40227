"""What the server behind `tests.dist` imports once for all ranks; it computes nothing."""

import gc

import torch
import torch.distributed.device_mesh
import torch.nn.functional
from diffusers import AutoencoderKLWan, DPMSolverMultistepScheduler, UniPCMultistepScheduler
from transformers import AutoTokenizer, UMT5EncoderModel

import wan.cli.main
import wan.distributed.rendezvous
import wan.modules.attnlayer
import wan.modules.model
import wan.pipeline.build

__all__ = [
    "AutoTokenizer",
    "AutoencoderKLWan",
    "DPMSolverMultistepScheduler",
    "UMT5EncoderModel",
    "UniPCMultistepScheduler",
    "torch",
    "wan",
]

gc.freeze()  # a run collects garbage often: ranks need not look through all that is imported
