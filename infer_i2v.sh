#!/usr/bin/env bash
# Image to video on several devices of this machine; without --image a small example is used.
#   COMM_TYPE=2 bash infer_i2v.sh --image cat.jpg --ckpt_dir ./Wan2.2-I2V-A14B --prompt "..."
# COMM_TYPE         0 baseline (default), 1 InsertComm, 2 BlockAttn
# NPROC_PER_NODE    devices to use, one rank each (default 8)
# torchrun comes from .venv here if there is one (make setup), else from PATH.
# All arguments go to generate.py.
COMM_TYPE=${COMM_TYPE:-0}
TASK=i2v-14B
. "$(dirname "${BASH_SOURCE[0]}")/tools/infer.sh"
