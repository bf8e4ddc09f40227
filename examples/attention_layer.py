"""Uses the attention layer alone, in a program that shards tokens over ranks.

    torchrun --nproc_per_node=2 examples/attention_layer.py

Each rank has half of the tokens with all heads; the layer returns their attention to all tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from wan.modules.attnlayer import FAPowerCapAttention


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 256, 8, 64)  # q, k, v: [B, tokens, heads, channels of a head]
    q, k, v = qkv.chunk(ranks, dim=2)[rank]

    insert_comm = FAPowerCapAttention(comm_type=1, ulysses_pg=dist.group.WORLD)
    baseline = FAPowerCapAttention(comm_type=0, ulysses_pg=dist.group.WORLD)
    same = torch.equal(insert_comm(q, k, v), baseline(q, k, v))
    print(f"rank {rank}: tokens {q.shape[1]} of {qkv.shape[2]}, equal to the baseline: {same}")
    dist.barrier()  # gloo aborts if a rank exits before the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
