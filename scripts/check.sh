#!/usr/bin/env bash
# Lint, format, types and words, as CI checks them.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

fix=0
for arg in "$@"; do
    case $arg in
        -h | --help)
            printf '%s\n' "usage: bash scripts/check.sh [--fix]" "" \
                "ruff check, ruff format, mypy, codespell and retired_words.py; --fix lets ruff change the files." ""
            setup_help | sed -n '/^environment:/,$p'
            exit 0
            ;;
        --fix) fix=1 ;;
        *) die "unknown argument: $arg" "usage: bash scripts/check.sh [--fix]" ;;
    esac
done

ensure_setup
failed=()
step() {
    printf '[check] %s\n' "$*" >&2
    "$@" || failed+=("$*")
}
if [ "$fix" = 1 ]; then
    step ruff check --fix .
    step ruff format .
else
    step ruff check .
    step ruff format --check .
fi
step mypy
readable=(trl_ext recipes scripts tests docs README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff
    pyproject.toml)
if [ "${TRL_EXT_SKIP_SETUP:-0}" = 1 ] && ! type -P codespell >/dev/null; then
    echo "[check] codespell is not installed (extra dev): left out" >&2
else
    step codespell "${readable[@]}"
fi
step python scripts/retired_words.py
if [ ${#failed[@]} -gt 0 ]; then
    printf '[check] FAILED: %s\n' "${failed[@]}" >&2
    [ "$fix" = 1 ] || echo "[check] 'bash scripts/check.sh --fix' repairs what ruff can repair" >&2
    exit 1
fi
echo "[check] all clean" >&2
