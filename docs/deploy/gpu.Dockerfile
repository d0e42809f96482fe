# `weft serve` on NVIDIA GPUs, over vLLM's image. In the repository: docker build -f docs/deploy/gpu.Dockerfile -t weft:gpu .
ARG VLLM=v0.32.0
# The image has nvcc, so the CUDA swap kernel is built.
FROM vllm/vllm-openai:${VLLM} AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM}
COPY --from=build /wheels /wheels
# The extra `serve` changes nothing of the vLLM that is there. For several doors: --build-arg EXTRAS=serve,ray
ARG EXTRAS=serve
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]" \
 && useradd --create-home --uid 10001 weft
USER 10001
WORKDIR /home/weft
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20m --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The server gets SIGTERM itself, and calls in flight have --shutdown-timeout seconds to end.
STOPSIGNAL SIGTERM
ENTRYPOINT ["weft", "serve", "--host", "0.0.0.0", "--port", "8000"]
