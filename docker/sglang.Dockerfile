# SGLang with tk-serving and its prebuilt kernels. Built from the root of the repository:
#
#     docker build -f docker/sglang.Dockerfile -t tk-serving-sglang .
#
# TARGET=cpu is the variant that `make images` builds and starts on machines without a GPU. The base images are build
# arguments, for registries of your own; both need the same Python (3.12 for cuda, 3.11 for cpu).
ARG TARGET=cuda
ARG BUILD_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BUILD_IMAGE} AS build
ARG TARGET
ARG ARCHS=sm_90a
ARG MODELS=v3,v3.2,v4-flash,v4-pro,v4.1
ARG REVISION=unknown
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/tk-serving/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv && rm -rf /var/lib/apt/lists/*

# Every wheel is pinned by its hash (tools/lock_images.py). The list is complete: nothing else is resolved.
COPY docker/requirements/sglang-${TARGET}.txt /src/requirements.txt
# PyPI has torch for CUDA only; its build for CPUs comes from TORCH_INDEX, or from where pip is configured to look.
RUN python3 -m venv /opt/tk-serving \
    && if [ "$TARGET" = cpu ] && [ -n "$TORCH_INDEX" ]; then export PIP_EXTRA_INDEX_URL="$TORCH_INDEX"; fi \
    && pip install --require-hashes --no-deps -r /src/requirements.txt

COPY . /src/tk-serving
WORKDIR /src/tk-serving
# The copied tree has no .git, so the revision that the kernels' manifest names is an argument.
RUN if [ "$TARGET" = cpu ]; then pip install --no-deps --no-build-isolation ./tools/sglang_cpu; fi \
    && pip install --no-deps --no-build-isolation . \
    && if [ "$TARGET" = cuda ]; then tk-serving build --arch "$ARCHS" --model "$MODELS" --revision "$REVISION" \
        --out /opt/tk-serving/kernels; fi \
    && pip uninstall -y hatchling

FROM ${BASE_IMAGE} AS cpu

FROM ${BASE_IMAGE} AS cuda
ENV TK_SERVING_KERNEL_CACHE=/opt/tk-serving/kernels TK_SERVING_JIT=warn

FROM ${TARGET}
# PORT is where the health check asks.
ENV PATH=/opt/tk-serving/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PORT=30000

# gcc and Python's headers: Triton, which the engine's own kernels need, compiles its launchers when they are first used.
# Nothing else that builds is left: no CUDA toolkit, no g++, no hatchling.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 libnuma1 python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 10001 serving

COPY --from=build /opt/tk-serving /opt/tk-serving

USER 10001
WORKDIR /home/serving
EXPOSE 30000
# Large checkpoints load for many minutes: docker waits for the first answer, then asks twice a minute.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "sglang.launch_server"]
