"""How self-attention is carried out, in one line for the start of a run."""

from __future__ import annotations

from wan.kernels.base import Kernel
from wan.kernels.select import Selected
from wan.modules.schedule import heads_per_chunk
from wan.settings.attention import Attention
from wan.settings.parallel import Parallel


def line(attention: Attention, parallel: Parallel, heads: int, selected: Selected) -> str:
    """Mode, chunks, topology, kernels, quantisation, sparsity. heads: of the network."""
    mode = parallel.mode
    sizes = heads_per_chunk(heads, parallel.ulysses_size, mode.chunks)
    heads_each = "/".join(str(size) for size in sorted(set(sizes), reverse=True))
    ring = f" ({parallel.ring_type})" if parallel.ring_size > 1 else ""
    return (
        f"Attention: {mode.name}, {len(sizes)} x {heads_each} heads per rank; ulysses "
        f"{parallel.ulysses_size} x ring {parallel.ring_size}{ring} x cfg {parallel.cfg_size}; "
        f"kernel {selected.describe()}; {_quantised(attention)}, {_sparse(attention)}"
        f"{_gathers(attention, parallel, selected.dense)}"
    )


def _quantised(attention: Attention) -> str:
    if attention.fa_quant is None:
        return "no quantisation"
    exchanges = " and exchanges" if attention.quant_alltoall else ""
    return f"{attention.fa_quant} attention{exchanges}"


def _sparse(attention: Attention) -> str:
    rain = attention.rainfusion
    if rain is None:
        return "no sparsity"
    kept = f", masks for {rain.refresh} steps" if rain.refresh > 1 else ""
    return f"RainFusion {rain.type} of sparsity {rain.sparsity:g} from step {rain.start_step}{kept}"


def _gathers(attention: Attention, parallel: Parallel, dense: Kernel) -> str:
    """Whose keys and values are gathered over the ring instead of passed round."""
    found = [
        name
        for name, without_lse in (
            ("RainFusion", attention.rainfusion is not None),
            ("fp8 attention", attention.fa_quant is not None),
            (dense.name, attention.fa_quant is None and not dense.can_return_lse),
        )
        if without_lse
    ]
    if parallel.ring_size == 1 or not found:
        return ""
    return f"; K/V are gathered over the ring for {' and '.join(found)} (no log-sum-exp)"
