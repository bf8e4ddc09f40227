"""A stand-in for torch_npu: what mindiesd 3.1.0 and wan call of it, computed on a CPU.

Each operator refuses what the hardware refuses and appends to `calls`. NPU_SIM_SOC: 200 (Duo),
220 (A2, default), 250 (A3), 260 (A5). NPU_SIM_COUNT: devices, default 8. NPU_SIM_LOG: a file to
which, with ".<RANK>" behind its name, each call is appended as a line of JSON.
"""

import torch

from torch_npu import hccl, npu, plugin, simulate
from torch_npu.dense import npu_fusion_attention
from torch_npu.log import Call, calls
from torch_npu.microscaled import npu_dynamic_mx_quant
from torch_npu.quantise import (
    get_npu_format,
    npu_dtype_cast,
    npu_dynamic_block_quant,
    npu_dynamic_quant,
    npu_format_cast,
    npu_quant_matmul,
)
from torch_npu.small import npu_rms_norm, npu_rotary_mul

__version__ = "2.13.0"
__all__ = [
    "Call",
    "calls",
    "get_npu_format",
    "npu",
    "npu_dtype_cast",
    "npu_dynamic_block_quant",
    "npu_dynamic_mx_quant",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_fusion_attention",
    "npu_quant_matmul",
    "npu_rms_norm",
    "npu_rotary_mul",
]

float8_e4m3fn = torch.float8_e4m3fn
float8_e5m2 = torch.float8_e5m2
float8_e8m0fnu = torch.float8_e8m0fnu
hifloat8 = 290  # numbers of CANN's types that PyTorch does not know
float4_e2m1fn_x2 = 296

simulate.install(npu)
hccl.install()
_library = plugin.define()
torch.ops.load_library = plugin.skip_library(torch.ops.load_library)
