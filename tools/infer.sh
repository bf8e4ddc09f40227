# Sourced by infer_t2v.sh and infer_i2v.sh with TASK and COMM_TYPE set: checks, then torchrun.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

case "${COMM_TYPE}" in
    0 | 1 | 2) ;;
    *)
        echo "COMM_TYPE must be 0, 1, or 2" >&2
        exit 1
        ;;
esac
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
if ! [[ "${NPROC_PER_NODE}" =~ ^[1-9][0-9]{0,3}$ ]]; then
    echo "NPROC_PER_NODE is '${NPROC_PER_NODE}'; it must be a positive number of devices." >&2
    exit 1
fi
TORCHRUN="${HERE}/.venv/bin/torchrun"
[ -x "${TORCHRUN}" ] || TORCHRUN=$(command -v torchrun || true)
if [ -z "${TORCHRUN}" ]; then
    echo "There is no torchrun here; run 'make setup' in ${HERE}, or activate an environment." >&2
    exit 1
fi

given() { # given FLAG ARGUMENTS...: whether the flag is among the arguments
    local flag=$1 argument
    shift
    for argument in "$@"; do
        case "${argument}" in "${flag}" | "${flag}="*) return 0 ;; esac
    done
    return 1
}

arguments=(--task "${TASK}" --comm_type "${COMM_TYPE}")
# With other sizes given, generate.py works out the rest.
if ! given --ulysses_size "$@" && ! given --ring_size "$@" && ! given --cfg_size "$@"; then
    arguments+=(--ulysses_size "${NPROC_PER_NODE}")
fi
if [ "${TASK}" = i2v-14B ] && ! given --image "$@"; then
    arguments+=(--image "${HERE}/examples/star.png")
fi

if compgen -G "/dev/davinci[0-9]*" >/dev/null; then # an Ascend NPU: its recommended settings
    export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
    export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-2}
    export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}
    export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-600}
    export HCCL_HOST_SOCKET_PORT_RANGE=${HCCL_HOST_SOCKET_PORT_RANGE:-auto}
fi
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# torchrun would set one thread per process with a warning; on CPUs that is also the best choice.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# --standalone takes a free port, so two runs on one machine do not meet.
launch=(--standalone --nproc_per_node="${NPROC_PER_NODE}")
# On CPUs the ranks are forked from torchrun, which has imported PyTorch: each starts sooner.
# Drivers of accelerators do not support forks, so there each rank is a new interpreter.
if ! compgen -G "/dev/davinci[0-9]*" >/dev/null && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null &&
    ! [ -e /dev/kfd ]; then
    launch+=(--run_path --start_method=fork)
    export PYTHONPATH="${HERE}${PYTHONPATH:+:${PYTHONPATH}}"
fi
exec "${TORCHRUN}" "${launch[@]}" "${HERE}/generate.py" "${arguments[@]}" "$@"
