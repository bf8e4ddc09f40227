"""Private functions of PyTorch, each with the reason why no public one suffices.

Tested with the range of torch in `requirements.txt`; variants name the versions that need them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, partial
from types import FunctionType
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

from wan.settings.errors import InputError
from wan.utils.compiler_cache import prepare_compiler_cache
from wan.utils.env import enable_huge_pages

_aten = torch.ops.aten
ONEDNN_LINEAR: Any = None  # no public function adds a bias to the sums of a product
if torch.backends.mkldnn.is_available():
    ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise

enable_huge_pages()
with suppress(InputError):  # raised again where something is compiled
    prepare_compiler_cache()  # before a part of torch is imported that makes the folder


def all_to_all_in_graph(
    send: Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Runs `dist.all_to_all_single` and returns the received tensor.

    The public function writes into a buffer, which costs one more copy in a compiled graph.

    Args:
        output_split_sizes: Rows from each rank; None: equal parts.
        input_split_sizes: Rows to each rank; None: equal parts.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None, "there is a default group"
    return functional.all_to_all_single(send, output_split_sizes, input_split_sizes, group)


def all_gather(received: Tensor, send: Tensor, group: dist.ProcessGroup | None) -> None:
    """Runs `dist.all_gather_single`, in earlier versions `all_gather_into_tensor`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, send, group)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets a group's timeout; up to 2.13 there is no public function.

    DeviceMesh creates groups with PyTorch's default timeout.
    """
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


def make_device_mesh(
    device_type: str, sizes: tuple[int, ...], axes: tuple[str, ...], options: Any = None
) -> DeviceMesh:
    """Runs `init_device_mesh` with a backend's options for the groups of all axes.

    2.8 has no public argument for the options. Up to 2.9 a mesh reuses the flattened axes of an
    earlier equal mesh, whose groups may have been destroyed.
    """
    resources: Any = torch.distributed.device_mesh._mesh_resources
    if torch.__version__ < "2.9":
        resources.mesh_dim_group_options |= dict.fromkeys(range(len(axes)), (None, options))
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        resources.mesh_dim_group_options.clear()
    else:
        override = None if options is None else dict.fromkeys(axes, options)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes, backend_override=override)
    if torch.__version__ < "2.10":
        resources.root_to_flatten_mapping.pop(mesh, None)
        resources.flatten_name_to_root_dims.pop(mesh, None)
    return mesh


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flattens all axes of a mesh into one of this name.

    No public function creates a group along several axes, and FSDP needs a group of the mesh.
    """
    return mesh._flatten(name)


def flash_attention_on_cpu(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention and its log-sum-exp [B,N,S], which the public function lacks."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(q_BNSD, k_BNSD, v_BNSD, attn_mask=bias)


def flash_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns attention and log-sum-exp for 16-bit dtypes, compute capability 8.0 or higher."""
    outputs = _aten._scaled_dot_product_flash_attention(q_BNSD, k_BNSD, v_BNSD, scale=scale)
    return outputs[0], outputs[1]


def efficient_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns attention and log-sum-exp on every CUDA device, for every dtype."""
    outputs = _aten._scaled_dot_product_efficient_attention(
        q_BNSD, k_BNSD, v_BNSD, None, True, scale=scale
    )
    return outputs[0], outputs[1][..., : q_BNSD.shape[2]]  # the kernel pads rows to 32


def cudnn_attention_on_cuda(
    q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns cuDNN's attention and log-sum-exp, 16 bits, compute capability 8.0 or higher."""
    outputs = _aten._scaled_dot_product_cudnn_attention(
        q_BNSD, k_BNSD, v_BNSD, None, True, 0.0, False, False, scale=scale
    )
    return outputs[0], outputs[1].squeeze(-1)  # cuDNN's statistics are [B,N,S,1]


def int8_matmul(a_LI: Tensor, b_IO: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns an int8 matrix product [L,O] in int32; the public function returns int8."""
    return torch._int_mm(a_LI, b_IO) if out is None else torch._int_mm(a_LI, b_IO, out=out)


def fp8_matmul(a_LI: Tensor, b_IO: Tensor) -> Tensor:
    """Returns an FP8 matrix product [L,O] in float32; public only since torch 2.10."""
    unit = torch.ones((), device=a_LI.device)
    return torch._scaled_mm(a_LI, b_IO, scale_a=unit, scale_b=unit, out_dtype=torch.float32)


def gelu_in_place(x: Tensor) -> Tensor:
    """Applies GELU (tanh) in place; the public function allocates a new tensor."""
    return _aten.gelu_(x, approximate="tanh")


def multiply_with_onednn(
    x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gelu: bool = False
) -> Tensor:
    """Computes x W^T + bias, and GELU (tanh) of it, in one kernel on CPUs; rounds once."""
    activation = "gelu" if gelu else "none"
    return ONEDNN_LINEAR(x, weight_OI, bias_O, activation, [], "tanh")


@cache
def has_onednn_bf16() -> bool:
    """Whether `multiply_with_onednn` takes bfloat16 on this CPU."""
    return ONEDNN_LINEAR is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_called_directly(module: nn.Module) -> bool:
    """Whether a call of the module is that of its class: no hooks, and no replaced forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def use_private_compiler_cache() -> None:
    """Lets the compilers load and keep code only where nobody but the user can write.

    Inductor keeps precompiled headers and pickles in its default folder even if its variable names
    another one; no setting moves them.

    Raises:
        InputError: The folder that the user named cannot be used.
    """
    folder = prepare_compiler_cache()
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    for module in (cache_dir_utils, runtime_utils, codecache):
        module.default_cache_dir = partial(str, folder)  # type: ignore[attr-defined]
    codecache._HEADER_DIR = str(folder / "precompiled_headers")
    codecache._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")


def set_up_compiler() -> None:
    """Configures Inductor for a few small functions.

    No rank starts a pool of compiler processes, and vector instructions are not probed. The public
    settings are environment variables, which are read when torch is imported.

    Raises:
        InputError: The folder that the user named for compiled code cannot be used.
    """
    use_private_compiler_cache()
    from torch._inductor import config

    config.compile_threads = 1
    config.cpp.vec_isa_ok = True  # g++ supports AVX; probing takes longer than compiling


def has_avx512_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 by AVX-512; there is no public function."""
    return torch.cpu._is_avx512_bf16_supported()


def has_amx() -> bool:
    """Whether the CPU has matrix instructions (AMX); there is no public function."""
    return torch.cpu._is_amx_tile_supported()


def limit_recompiles(limit: int) -> AbstractContextManager[None]:
    """Limits the compiled shapes per function; PyTorch 2.9 lacks the public setting."""
    return torch._dynamo.config.patch(recompile_limit=limit)


def count_in_place_writes(x: Tensor) -> int:
    """Returns a tensor's in-place version counter, which is not public; 0 for inference tensors."""
    return 0 if x.is_inference() else x._version


def init_fake_process_group(rank: int, ranks: int) -> None:
    """Initializes a default group without communication; no public backend takes meta tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not hasattr(dist.Backend, "PLANNED"):
        fake, types = dist.Backend._plugins["FAKE"], ["cpu", "meta"]
        dist.Backend.register_backend(
            "planned", fake.creator_fn, extended_api=fake.extended_api, devices=types
        )
    dist.init_process_group("planned", store=FakeStore(), rank=rank, world_size=ranks)


@contextmanager
def materialize_without_data(network: nn.Module, sharded: bool) -> Iterator[StorageTracker]:
    """Prepares a network on the meta device for running on tensors without data.

    FSDP accepts no meta tensors, only PyTorch's private fake tensors.

    Yields:
        A tracker of the tensors that the network allocates.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) if sharded else nullcontext():
        tracker = StorageTracker("cpu" if sharded else "meta", resizes=sharded)
        network.to_empty(device=tracker.device)
        tracker.exclude(_list_local_tensors(network))
        yield tracker


def skip_dynamo_in_meta_kernels() -> None:
    """Lets PyTorch's kernels for meta tensors, which are written in Python, run without Dynamo.

    Each would import it (two seconds) only to exclude itself from tracing.
    """
    decompositions = torch._decomp
    kernels: list[Any] = [
        *decompositions.decomposition_table.values(),
        *decompositions.meta_table.values(),
    ]
    while "torch._dynamo" not in sys.modules and kernels:
        kernel = kernels.pop()
        if isinstance(kernel, FunctionType) and "__dynamo_disable" not in vars(kernel):
            vars(kernel)["__dynamo_disable"] = kernel  # what Dynamo would make of it
            kernels += [cell.cell_contents for cell in kernel.__closure__ or ()]


def _list_local_tensors(network: nn.Module) -> list[Tensor]:
    """Returns this rank's parameters and buffers; `DTensor.to_local` would need a slow import."""
    tensors = [*network.parameters(), *network.buffers()]
    return [getattr(x, "_local_tensor", x) for x in tensors]


def _call_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operation; collectives on meta tensors, which 2.8 lacks, run the CPU kernel.

    The CPU kernel calls the group, and the fake group of a plan does not communicate. The frequent
    operations of a VAE skip their kernels for meta tensors, which are written in Python.
    """
    if func.namespace == "aten" and args and isinstance(args[0], Tensor) and args[0].is_meta:
        if func in (_aten.clamp_min_.default, _aten.mul_.Tensor, _aten.silu_.default):
            return args[0]
        if func is _aten.div.out:
            return kwargs["out"]
        if func is _aten.linalg_vector_norm.default and len(args) == 4 and args[3]:
            x, _, dims, _ = args
            axes = {dim % x.dim() for dim in dims or range(x.dim())}
            shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
            return x.new_empty(shape, **kwargs)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.namespace != "c10d" or has_kernel(func.name(), "Meta"):
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


class DatalessFunctionMode(TorchFunctionMode):
    """Replaces functions that PyTorch cannot run on tensors without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            q, mask = arguments["query"], arguments.get("attn_mask")
            if q.is_meta:  # the public function would allocate all scores
                bias = None if mask is None else torch.where(mask, 0.0, -torch.inf).to(q.dtype)
                return flash_attention_on_cpu(q, arguments["key"], arguments["value"], bias)[0]
        if func is Tensor.__bool__:  # transformers tests a mask for padding
            return False
        return func(*args, **(kwargs or {}))


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live tensor storages by the module that allocated them.

    Weak references track the storages whichever thread frees them; the public memory profiler
    covers the calling thread only.

    Attributes:
        device: Type of the tensors that are counted.
        live_bytes: Live bytes by label.
        peak_bytes: The same at the time of the highest total.
        sent_operations: Collectives in self-attention: name in c10d, bytes of the tensor.
    """

    def __init__(self, device: str, *, resizes: bool = False) -> None:
        """resizes: Whether storages are resized, as FSDP does."""
        super().__init__()
        self.device, self._resizes = device, resizes
        self.live_bytes, self.peak_bytes = Counter[str](), Counter[str]()
        self.sent_operations: list[tuple[str, int]] = []
        self._label_stack = ["activations"]
        self._storages: dict[int, Any] = {}
        self._sizes: dict[int, tuple[str, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import Dynamo to exclude this class from tracing."""
        return False

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Excludes the storages of tensors, for example weights, from the count."""
        self._storages |= {x.untyped_storage()._cdata: x for x in tensors}

    def track_module(self, module: nn.Module, label: str) -> None:
        """Counts a module's allocations under a label, without the weights that FSDP gathers."""

        def set_label(*_: Any) -> None:
            self._label_stack[-1] = label

        register_pre_hook = module.register_forward_pre_hook
        register_pre_hook(lambda *_: self._label_stack.append("gathered weights"), prepend=True)
        register_pre_hook(set_label)
        module.register_forward_hook(lambda *_: self._label_stack.remove(label))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _call_operation(func, args, kwargs or {})
        for x in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type == self.device:
                # A DTensor has a local tensor.
                self._track_storage(getattr(x, "_local_tensor", x).untyped_storage())
        if self._resizes:
            for key, (_, size) in list(self._sizes.items()):
                storage = self._storages[key]()
                if storage is not None and storage.nbytes() != size:
                    self._set_size(key, storage.nbytes())
        if func.namespace == "c10d" and self._label_stack[-1] == "self-attention":
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.sent_operations.append((func._opname, tensors[-1].nbytes))
        if self.live_bytes.total() > self.peak_bytes.total():
            self.peak_bytes = +self.live_bytes
        return out

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages or not storage.resizable():  # memory-mapped or NumPy's
            return

        def on_free(_: Any) -> None:
            self._set_size(key, 0)
            del self._storages[key], self._sizes[key]

        self._storages[key] = weakref.ref(storage, on_free)
        self._sizes[key] = self._label_stack[-1], 0
        self._set_size(key, storage.nbytes())

    def _set_size(self, key: int, size: int) -> None:
        label, previous_size = self._sizes[key]
        self._sizes[key] = label, size
        self.live_bytes[label] += size - previous_size
