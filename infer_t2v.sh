#!/usr/bin/env bash
# Text to video on several devices of this machine.
#   COMM_TYPE=1 bash infer_t2v.sh --ckpt_dir ./Wan2.2-T2V-A14B --prompt "..."
# COMM_TYPE         0 baseline (default), 1 InsertComm, 2 BlockAttn
# NPROC_PER_NODE    devices to use, one rank each (default 8)
# torchrun comes from .venv here if there is one (make setup), else from PATH.
# All arguments go to generate.py.
COMM_TYPE=${COMM_TYPE:-0}
TASK=t2v-14B
. "$(dirname "${BASH_SOURCE[0]}")/tools/infer.sh"
