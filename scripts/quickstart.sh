#!/usr/bin/env bash
# From a fresh clone to a language model that has learned arithmetic by GRPO: set-up, then the main job.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [arguments of recipes/grpo_math.py]

Makes .venv if it is not there yet, then runs `accelerate launch recipes/grpo_math.py`, on the GPU or on the CPU.
Arguments go to the recipe, for example
    bash scripts/quickstart.sh --preset dr_grpo --seed 2
    bash scripts/quickstart.sh --config recipes/<name>.yaml
`accelerate launch recipes/grpo_math.py --help`, in the environment, lists them all.

TEXT
    setup_help | sed -n '/^environment:/,$p'
    echo "  TRL_EXT_ACCELERATE  a configuration file for accelerate (default: one_cpu.yaml or one_gpu.yaml of accelerate_configs/)"
}

case ${1:-} in
    -h | --help) usage && exit 0 ;;
esac

FROM=$PWD
ensure_setup
cd "$FROM" # relative paths among the arguments, and runs/, are the caller's

launch=(accelerate launch --quiet --config_file "${TRL_EXT_ACCELERATE:-$REPO/accelerate_configs/one_$DEVICE.yaml}")
if [ "$DEVICE" = cpu ]; then
    # accelerate exports OMP_NUM_THREADS=1 unless it is told otherwise, and one core would do all the work.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(python -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)')}
elif [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    launch+=(--gpu_ids "${CUDA_VISIBLE_DEVICES}")
fi
launch+=("$REPO/recipes/grpo_math.py" "$@")
printf '[quickstart] OMP_NUM_THREADS=%s %s\n' "${OMP_NUM_THREADS:-default}" "${launch[*]}" >&2
exec "${launch[@]}"
