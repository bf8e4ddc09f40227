"""What the server behind `tests.dist` imports once for all ranks; it computes nothing."""

import torch
import torch.distributed.device_mesh
import torch.nn.functional

import wan.modules.attnlayer
import wan.modules.model

__all__ = ["torch", "wan"]
