"""Uses the attention layer with xfuser's process groups, in a program that initialized xfuser.

    torchrun --nproc_per_node=4 examples/xfuser_program.py

Tokens are sharded as in xfuser: rank r of the ring and u of Ulysses has shard r * ulysses + u.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from wan.distributed.ring import Ring
from wan.modules.attnlayer import FAPowerCapAttention

try:
    from xfuser.core.distributed import (
        get_sp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
except ModuleNotFoundError as error:
    from wan.app.programs import exit_without_package

    exit_without_package(error)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ulysses, backend = min(ranks, 2), "nccl" if torch.cuda.is_available() else "gloo"
    init_distributed_environment(rank=rank, world_size=ranks, backend=backend)
    initialize_model_parallel(ulysses_degree=ulysses, ring_degree=ranks // ulysses, backend=backend)

    groups = get_sp_group()
    ring = Ring(groups.ring_group)
    layer = FAPowerCapAttention(comm_type=1, ulysses_pg=groups.ulysses_group, ring=ring)
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 256, 8, 64)  # q, k, v: [B, tokens, heads, channels of a head]
    qkv = qkv.to(torch.accelerator.current_accelerator() or "cpu")
    out = layer(*qkv.chunk(ranks, dim=2)[rank])

    plain = F.scaled_dot_product_attention(*qkv.transpose(2, 3)).transpose(1, 2)
    off = (out - plain.chunk(ranks, dim=1)[rank]).abs().max()
    print(f"rank {rank}: ulysses {layer.ulysses_size} x ring {ring.size}, off by {off:.1e}")
    torch.distributed.barrier()  # gloo aborts if a rank exits before the others
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
