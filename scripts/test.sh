#!/usr/bin/env bash
# The tests that CI runs: the fast ones first, then those that train, start ranks or start vLLM, all on the CPU.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
usage: bash scripts/test.sh [--fast | --only TIER] [--all] [arguments of pytest]

  (nothing)    the fast tier, then the slow one, then that of ranks, engines and hosts (and gpu where there is one)
  --only TIER  fast, slow or ranks; --fast is --only fast
  --all        with the tests that run nightly: documents, rare faults, wheels, exports, benchmarks, more hosts
With -m of your own there is one run of pytest, with that selection. Examples:
    bash scripts/test.sh --fast -x -k ppo_clip
    bash scripts/test.sh -m vllm
    bash scripts/test.sh tests/algorithms/test_policy_losses.py

TEXT
    setup_help | sed -n '/^environment:/,$p'
}

only="" own_marks=0 args=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --fast) only=fast ;;
        --only)
            [ $# -gt 1 ] || die "--only needs a tier: fast, slow or ranks."
            only=$2 && shift
            ;;
        --all) args+=(--nightly) ;;
        *)
            [[ $1 == -m || $1 == -m=* ]] && own_marks=1
            args+=("$1")
            ;;
    esac
    shift
done
[[ $only =~ ^(|fast|slow|ranks)$ ]] || die "--only $only: there is no such tier." "There are fast, slow and ranks."

ensure_setup
# Some containers set it; without bytecode each tier and each program that a test starts would compile everything again.
unset PYTHONDONTWRITEBYTECODE
ran=0 failed=0

# tier NAME WORDS PYTEST-ARGUMENTS...: 'no test selected' (5) is no failure of a tier, a failed test (1) lets the next one run.
tier() {
    local status=0 began=$SECONDS
    [ -z "$only" ] || [ "$1" = "$only" ] || return 0
    printf '\n[test] %s\n' "$2" >&2
    shift 2
    python -m pytest "$@" ${args[@]+"${args[@]}"} </dev/null || status=$?
    printf '[test] took %s s\n' "$((SECONDS - began))" >&2
    case $status in
        0) ran=1 ;;
        1) ran=1 failed=1 ;;
        5) ;;
        *) exit "$status" ;;
    esac
}

if [ "$own_marks" = 1 ]; then
    tier "$only" "the tests selected"
else
    # Two at a time, one thread each; `-n 0` among the arguments is the last word, which --pdb needs. Beyond the fast ones
    # by files, whose tests share launches and engines; each start is a wait in which the other file's tests work.
    OMP_NUM_THREADS=1 tier fast "fast tests, two at a time" -n 2
    OMP_NUM_THREADS=1 tier slow "slower tests, two files at a time" -n 2 --dist loadfile \
        -m "(moderate or slow) and not (distributed or vllm or hosts or gpu)"
    if [ "$DEVICE" = cpu ]; then
        OMP_NUM_THREADS=1 tier ranks "tests with ranks, an engine or several hosts, two files at a time" -n 2 \
            --dist loadfile -m "(distributed or vllm or hosts) and not gpu"
    else
        tier ranks "tests with ranks, an engine, several hosts or a GPU" -m "distributed or vllm or hosts or gpu"
    fi
fi
if [ "$ran" = 0 ]; then
    echo "[test] ERROR: no test was selected" >&2
    exit 5
fi
exit "$failed"
