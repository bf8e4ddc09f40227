"""The official functions of several ranks, against one process that computes the whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist import run_on_ranks
from wan.distributed.fsdp import free_model, shard_model
from wan.distributed.sequence_parallel import pad_freqs, sp_attn_forward, sp_dit_forward
from wan.distributed.ulysses import distributed_attention
from wan.distributed.util import (
    all_gather,
    all_to_all,
    gather_forward,
    get_rank,
    get_world_size,
    init_distributed_group,
)
from wan.modules.model import WanModel

pytestmark = pytest.mark.dist


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def exchange() -> None:
    init_distributed_group()  # there is one
    rank, world = get_rank(), get_world_size()
    assert (rank, world) == (dist.get_rank(), 2)
    x = draw(2, 4, 6, 3)
    local = x.chunk(world, 1)[rank]
    assert torch.equal(torch.cat(all_gather(local), 1), x)
    assert torch.equal(gather_forward(local, 1), x)
    assert torch.equal(all_to_all(local, 2, 1), x.chunk(world, 2)[rank])
    assert torch.equal(all_to_all(x.chunk(world, 2)[rank], 1, 2), local)
    q, k, v = draw(3, 2, 8, 4, 16).unbind()
    actual = distributed_attention(
        *(tensor.chunk(world, 1)[rank] for tensor in (q, k, v)), torch.tensor([8, 5])
    )
    for b, valid in enumerate((8, 5)):
        products = torch.einsum("qnd,knd->nqk", q[b].double(), k[b, :valid].double())
        expected = torch.einsum("nqk,knd->qnd", (products / 4).softmax(-1), v[b, :valid].double())
        assert (actual[b] - expected.chunk(world)[rank]).abs().max() <= 3e-2  # bfloat16
    assert actual.dtype == torch.float32


def shard() -> None:
    torch.manual_seed(dist.get_rank())  # the weights of rank 0 reach the others
    model = WanModel(dim=24, ffn_dim=32, freq_dim=8, text_dim=12, num_heads=2, num_layers=2)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in state.values():
        dist.broadcast(tensor, 0)
    plain = WanModel(dim=24, ffn_dim=32, freq_dim=8, text_dim=12, num_heads=2, num_layers=2)
    plain.load_state_dict(state)
    plain.to(torch.bfloat16)
    sharded = shard_model(model, device_id=0)
    arguments = [draw(16, 2, 4, 4)], torch.tensor([500.0]), [draw(5, 12)], 8
    with torch.no_grad():
        expected, actual = plain(*arguments)[0], sharded(*arguments)[0]
    assert torch.equal(actual, expected)
    local = [parameter.to_local() for parameter in sharded.parameters()]
    assert sum(x.nbytes for x in local) < 0.6 * sum(x.nbytes for x in state.values())
    free_model(sharded)
    assert not any(x.untyped_storage().nbytes() for x in local)


def test_exchanges_and_attention() -> None:
    run_on_ranks(2, exchange)


def test_sharded_network() -> None:
    run_on_ranks(2, shard)


def test_functions_of_one_process() -> None:
    x = draw(3, 1, 2)
    padded = pad_freqs(x, 5)
    assert torch.equal(padded[:3], x) and torch.equal(padded[3:], torch.ones(2, 1, 2))
    assert get_world_size() == 1 and torch.equal(gather_forward(x, 0), x)
    assert torch.equal(all_to_all(x, 0, 1), x)
    for function in (sp_attn_forward, sp_dit_forward):
        with pytest.raises(NotImplementedError, match="use_sp=True"):
            function(None, x)
