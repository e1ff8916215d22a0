#!/usr/bin/env bash
# The tests that CI runs: the fast ones first, then those that train, start ranks or start vLLM, all on the CPU.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    cat <<'TEXT'
usage: bash scripts/test.sh [--fast | --all] [arguments of pytest]

  (nothing)   the fast tier, then slow, distributed and vllm (gpu where there is one), then hosts
  --fast      the fast tier only
  --all       all tiers, with the tests that run nightly: more hosts, escapes of the sandbox, wheels, exports, benchmarks
With -m of your own there is one run of pytest, with that selection. Examples:
    bash scripts/test.sh --fast -x -k ppo_clip
    bash scripts/test.sh -m vllm
    bash scripts/test.sh tests/algorithms/test_policy_losses.py

TEXT
    setup_help | sed -n '/^environment:/,$p'
}

fast_only=0 own_marks=0 args=()
for arg in "$@"; do
    case $arg in
        -h | --help) usage && exit 0 ;;
        --fast) fast_only=1 ;;
        --all) args+=(--nightly) ;;
        *)
            [[ $arg == -m || $arg == -m=* ]] && own_marks=1
            args+=("$arg")
            ;;
    esac
done

ensure_setup
ran=0 failed=0

# tier NAME PYTEST-ARGUMENTS...: 'no test selected' (5) is no failure of a tier, a failed test (1) lets the next one run.
tier() {
    local status=0 began=$SECONDS
    printf '\n[test] %s\n' "$1" >&2
    shift
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
    tier "the tests selected"
else
    # Two at a time, one thread each; `-n 0` among the arguments is the last word, which --pdb needs.
    OMP_NUM_THREADS=1 tier "fast tests, two at a time" -n 2
    if [ "$fast_only" = 0 ]; then
        # By files, whose tests share launches and engines; each start is a wait in which the other file's tests work.
        OMP_NUM_THREADS=1 tier "slower tests, two at a time" -n 2 --dist loadfile \
            -m "slow and not (distributed or vllm or hosts or gpu)"
        if [ "$DEVICE" = cpu ]; then
            OMP_NUM_THREADS=1 tier "tests with ranks or an engine, two files at a time" -n 2 --dist loadfile \
                -m "(distributed or vllm) and not (gpu or hosts)"
        else
            tier "tests with ranks, an engine or a GPU" -m "(distributed or vllm or gpu) and not hosts"
        fi
        # At the same time, since some of them wait for a time limit most of the time.
        tier "tests with several hosts, two files at a time" -n 2 --dist loadfile -m hosts
    fi
fi
if [ "$ran" = 0 ]; then
    echo "[test] ERROR: no test was selected" >&2
    exit 5
fi
exit "$failed"
