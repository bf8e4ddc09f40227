"""The private functions of PyTorch that `wan` uses; each states why no public one is enough.

Checked with the range of torch in `requirements.txt`; a variant says which versions need it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


def all_to_all_in_graph(
    send: Tensor,
    arriving: list[int] | None,
    leaving: list[int] | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """`dist.all_to_all_single` as an operation that returns what it received.

    The public function writes into a buffer, which a compiled graph turns into one more copy.
    arriving, leaving: rows from and to each rank; None: equal parts.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None, "there is a default group"
    return functional.all_to_all_single(send, arriving, leaving, group)


def all_gather(received: Tensor, send: Tensor, group: dist.ProcessGroup | None) -> None:
    """`dist.all_gather_single`, which earlier versions know as `all_gather_into_tensor`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, send, group)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set a group's timeout; up to 2.13 no public function does it.

    DeviceMesh makes groups with PyTorch's default timeout.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def device_mesh(
    device_type: str, sizes: tuple[int, ...], axes: tuple[str, ...], options: Any = None
) -> DeviceMesh:
    """`init_device_mesh`, with a backend's options for the groups of all axes.

    2.8 has no public argument for the options. Up to 2.9 a mesh finds the joined axes of an equal
    mesh made before it, the groups of which may have ended.
    """
    earlier: Any = torch.distributed.device_mesh._mesh_resources
    if torch.__version__ < "2.9":
        earlier.mesh_dim_group_options |= dict.fromkeys(range(len(axes)), (None, options))
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        earlier.mesh_dim_group_options.clear()
    else:
        override = None if options is None else dict.fromkeys(axes, options)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes, backend_override=override)
    if torch.__version__ < "2.10":
        earlier.root_to_flatten_mapping.pop(mesh, None)
        earlier.flatten_name_to_root_dims.pop(mesh, None)
    return mesh


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all axes of a mesh into one of this name.

    No public function makes a group along several axes, and FSDP would not know a group that was
    made without the mesh.
    """
    return mesh._flatten(name)


def flash_attention_on_cpu(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp [B,N,S], which the public function does not return."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(q_BNSD, k_BNSD, v_BNSD, attn_mask=bias)


def flash_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on CUDA for dtypes of 16 bits and compute capability 8.0 or higher."""
    found = _aten._scaled_dot_product_flash_attention(q_BNSD, k_BNSD, v_BNSD, scale=scale)
    return found[0], found[1]


def efficient_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on every CUDA device and for every dtype."""
    found = _aten._scaled_dot_product_efficient_attention(
        q_BNSD, k_BNSD, v_BNSD, None, True, scale=scale
    )
    return found[0], found[1][..., : q_BNSD.shape[2]]  # the kernel pads rows to 32


def cudnn_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same with cuDNN on NVIDIA's GPUs, 16 bits, compute capability 8.0 or higher."""
    found = _aten._scaled_dot_product_cudnn_attention(
        q_BNSD, k_BNSD, v_BNSD, None, True, 0.0, False, False, scale=scale
    )
    return found[0], found[1].squeeze(-1)  # cuDNN's statistics are [B,N,S,1]


def int8_matmul(a_LI: Tensor, b_IO: Tensor) -> Tensor:
    """The product of int8 matrices in int32, [L,O]; that of the public function is in int8."""
    return torch._int_mm(a_LI, b_IO)


def fp8_matmul(a_LI: Tensor, b_IO: Tensor) -> Tensor:
    """The product of FP8 matrices in float32, [L,O]; the public function came with torch 2.10."""
    one = torch.ones((), device=a_LI.device)
    return torch._scaled_mm(a_LI, b_IO, scale_a=one, scale_b=one, out_dtype=torch.float32)


def gelu_in_place(x: Tensor) -> Tensor:
    """Apply GELU in its tanh form to x itself; the public function always makes a new tensor."""
    return _aten.gelu_(x, approximate="tanh")


def set_up_compiler() -> None:
    """Set the compiler up for a few small functions.

    No rank starts a pool of compiler processes, and vector instructions are not tried out. The
    public settings are environment variables, which are read when torch is imported.
    """
    from torch._inductor import config

    config.compile_threads = 1
    config.cpp.vec_isa_ok = True  # g++ knows AVX: the trials take longer than the functions


def recompiling(limit: int) -> AbstractContextManager[None]:
    """Allow so many compiled shapes of a function; PyTorch 2.8 lacks the public setting."""
    return torch._dynamo.config.patch(recompile_limit=limit)


def times_changed(x: Tensor) -> int:
    """Return how often a tensor was written in place; inference mode does not count, so 0.

    No public attribute has this number.
    """
    return 0 if x.is_inference() else x._version


def fake_process_group(rank: int, ranks: int) -> None:
    """Make a default group that sends nothing, for a plan; no public backend takes meta tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not hasattr(dist.Backend, "PLANNED"):
        fake, types = dist.Backend._plugins["FAKE"], ["cpu", "meta"]
        dist.Backend.register_backend(
            "planned", fake.creator_fn, extended_api=fake.extended_api, devices=types
        )
    dist.init_process_group("planned", store=FakeStore(), rank=rank, world_size=ranks)


@contextmanager
def without_memory(network: nn.Module, sharded: bool) -> Iterator[Live]:
    """Make a network from the meta device ready to run on tensors without data.

    FSDP refuses meta tensors, the public ones without data, and takes PyTorch's private fake ones.

    Yields:
        What follows the tensors that the network's calls make.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) if sharded else nullcontext():
        live = Live("cpu" if sharded else "meta", resized=sharded)
        network.to_empty(device=live.device)
        live.leave_out(_own(network))
        yield live


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of this rank's parameters and buffers."""
    return sum(x.nbytes for x in _own(network))


def _own(network: nn.Module) -> list[Tensor]:
    """Return this rank's tensors; the public `DTensor.to_local` would need a slow import."""
    tensors = [*network.parameters(), *network.buffers()]
    return [getattr(x, "_local_tensor", x) for x in tensors]


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, also an exchange of meta tensors, for which 2.8 has no kernels.

    The kernel for the CPU asks the group, and that of a plan sends nothing.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.namespace != "c10d" or has_kernel(func.name(), "Meta"):
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


class WithoutData(TorchFunctionMode):
    """Replaces, for a plan, the functions that PyTorch cannot run on tensors without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            q, mask = given["query"], given.get("attn_mask")
            if q.is_meta:  # on meta tensors the public function makes all scores
                bias = None if mask is None else torch.where(mask, 0.0, -torch.inf).to(q.dtype)
                return flash_attention_on_cpu(q, given["key"], given["value"], bias)[0]
        if func is Tensor.__bool__:  # transformers asks a prompt's mask whether nothing is padded
            return False
        return func(*args, **(kwargs or {}))


class Live(TorchDispatchMode):
    """Counts the bytes of living tensor storages by the module that made them.

    Weak references follow the storages, so that it does not matter which thread frees them; the
    public memory profiler covers the calling thread only.

    Attributes:
        device: Type of the tensors that count.
        held: What lives now.
        peak: What lived when the most did.
        sent: The operations between ranks in self-attention: c10d's name, bytes of the tensor.
    """

    def __init__(self, device: str, *, resized: bool = False) -> None:
        """resized: Whether storages change their size while they live, as those of FSDP do."""
        super().__init__()
        self.device, self._resized = device, resized
        self.held, self.peak = Counter[str](), Counter[str]()
        self.sent: list[tuple[str, int]] = []
        self._within = ["activations"]
        self._known: dict[int, Any] = {}
        self._sizes: dict[int, tuple[str, int]] = {}

    def leave_out(self, given: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors, for example weights."""
        self._known |= {x.untyped_storage()._cdata: x for x in given}

    def watch(self, module: nn.Module, part: str) -> None:
        """Count what the module's calls make under a name, without what FSDP gathers for them."""

        def called(*_: Any) -> None:
            self._within[-1] = part

        before = module.register_forward_pre_hook
        before(lambda *_: self._within.append("gathered weights"), prepend=True)
        before(called)
        module.register_forward_hook(lambda *_: self._within.remove(part))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _called(func, args, kwargs or {})
        for x in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type == self.device:
                self._follow(getattr(x, "_local_tensor", x).untyped_storage())  # of a DTensor
        if self._resized:
            for key, (_, size) in list(self._sizes.items()):
                storage = self._known[key]()
                if storage is not None and storage.nbytes() != size:
                    self._count(key, storage.nbytes())
        if func.namespace == "c10d" and self._within[-1] == "self-attention":
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.sent.append((func._opname, tensors[-1].nbytes))
        if self.held.total() > self.peak.total():
            self.peak = +self.held
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or not storage.resizable():  # of a mapped file or of NumPy
            return

        def freed(_: Any) -> None:
            self._count(key, 0)
            del self._known[key], self._sizes[key]

        self._known[key] = weakref.ref(storage, freed)
        self._sizes[key] = self._within[-1], 0
        self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        part, before = self._sizes[key]
        self._sizes[key] = part, size
        self.held[part] += size - before
