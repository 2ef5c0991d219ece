# An image for servers: torch for CPUs, the wheel and a linker; no compiler, and a user who is not root.
#
#   make wheel && docker build -t hybrid .
#   docker run --rm hybrid hybrid doctor
FROM debian:bookworm-slim

# binutils: TVM's kernels are linked with ld as they are compiled.
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils ca-certificates libstdc++6 python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
RUN useradd --create-home app && python3 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin

# uv knows where PyTorch keeps its builds for CPUs: pip's default is one for CUDA, which is several times as large.
ARG INSTALL_TORCH="uv pip install --no-cache --torch-backend cpu"
COPY dist/*.whl constraints.txt /tmp/install/
# Left out of what is installed: tests, headers, programs that only builds and tests of C++ call, and names of functions that nothing links to.
RUN pip install --no-cache-dir uv \
    && ${INSTALL_TORCH} -c /tmp/install/constraints.txt torch \
    && pip uninstall -q -y uv \
    && pip install --no-cache-dir --constraint /tmp/install/constraints.txt /tmp/install/*.whl \
    && rm -rf /tmp/install \
    && cd /opt/venv/lib/python3*/site-packages \
    && rm -rf torch/test torch/include tvm/3rdparty \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && strip --strip-unneeded torch/lib/libtorch_cpu.so \
    && find sympy networkx -type d -name tests -prune -exec rm -rf {} +

USER app
WORKDIR /home/app
CMD ["hybrid", "doctor"]
