# Images of the project, none of which runs as root. `docker build --target NAME -t spear-NAME .`, where NAME is
#
#   sandbox    the service that runs untrusted Python: spear-sandbox alone
#   envs       all environments, their data commands, the retrieval service (BM25), `spear serve`, `spear eval` against
#              a server: spear-envs and spear-agents with it
#   train-cpu  training on a CPU through verl: all four distributions
#   gpu        training on NVIDIA GPUs with vLLM (constraints/gpu.txt); the others follow constraints/cpu.txt
#   test       train-cpu's packages, compilers, the checkout and the tools of `make test`, which it runs
#
# docs/containers.md says how to build them where the public image or index cannot be reached, and how to run them.
ARG BASE=python:3.11-slim-bookworm

# An environment with pip and a C compiler. Nothing of this stage is in an image but /opt/spear.
FROM ${BASE} AS build
ARG BUILD_PACKAGES="gcc libc6-dev"
RUN apt-get update && apt-get install -y --no-install-recommends ${BUILD_PACKAGES} && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints/cpu.txt constraints/build.txt ./constraints/
# pip would compile on one core, and what is left out as well; compileall below does it on all, though not every file
# of a package that ends in .py can be compiled.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_COMPILE=1 \
    PATH=/opt/spear/bin:$PATH
# The index that pip asks, if not the public one; what has a password goes into a configuration: --secret id=pip.
ARG PIP_INDEX_URL=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/spear && pip install -q --no-deps --require-hashes -r constraints/build.txt

# What writes an image's list of parts (CycloneDX), in an environment of its own.
FROM build AS sbom
COPY constraints/sbom.txt ./constraints/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv --without-pip /opt/sbom \
    && pip --python /opt/sbom/bin/python install -q --no-deps --require-hashes -r constraints/sbom.txt

# The four distributions, each a wheel.
FROM build AS wheel
COPY pyproject.toml setup.py VERSION LICENSE ./
COPY sandbox ./sandbox
COPY spear_envs ./spear_envs
COPY agents ./agents
COPY training ./training
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip wheel -q --no-build-isolation --no-deps -w /wheel ./sandbox . ./agents ./training

# What the project needs, before the project: a change of the code leaves these layers as they are. Without its sources a
# distribution installs as an empty package with the same requirements. The links are those of the checkout.
FROM build AS packages
COPY pyproject.toml VERSION LICENSE ./
COPY sandbox/pyproject.toml ./sandbox/
COPY agents/pyproject.toml ./agents/
COPY training/pyproject.toml ./training/
RUN mkdir spear_envs && touch spear_envs/README.md \
    && for room in sandbox agents training; do touch $room/README.md && ln -s ../VERSION ../LICENSE $room; done

# What all images share: a user without rights, and two folders that are its own.
FROM ${BASE} AS runtime
# The public base has a pip of its own, and every base with venv the wheel of one.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin spear && install -d -o spear -g spear /data /runs \
    && if python3 -m pip --version >/dev/null 2>&1; then python3 -m pip uninstall -q -y setuptools wheel pip; fi \
    && rm -rf /usr/share/python-wheels "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/ensurepip"
ENV PATH=/opt/spear/bin:$PATH SPEAR_DATA=/data PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.title="SPEAR Envs" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# `--build-arg COMMIT=$(git rev-parse HEAD)`; the history is not part of the build.
ARG COMMIT=
LABEL org.opencontainers.image.revision="${COMMIT}"
WORKDIR /runs
ENTRYPOINT ["spear"]

# The sandbox, with libraries for the programs; each file that comes from the index has a digest.
FROM packages AS sandbox-packages
COPY constraints/sandbox.txt ./constraints/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install -q --no-deps --require-hashes -r constraints/sandbox.txt \
    && pip install -q --no-deps --no-build-isolation -c constraints/cpu.txt './sandbox[server]' \
    && find /opt/spear -regex '.*/\(scipy\|sympy\)/.*tests' -type d -prune -exec rm -rf {} + \
    && { python -m compileall -qq -j 0 /opt/spear/lib || true; }

FROM sandbox-packages AS sandbox-environment
COPY --from=wheel /wheel /wheel
COPY --from=sbom /opt/sbom /opt/sbom
RUN pip install -q --compile --no-deps --force-reinstall /wheel/spear_sandbox-*.whl \
    && pip uninstall -q -y setuptools pip \
    && /opt/sbom/bin/cyclonedx-py environment -o /opt/spear/sbom.cdx.json /opt/spear/bin/python

FROM runtime AS sandbox
COPY --from=sandbox-environment /opt/spear /opt/spear
LABEL org.opencontainers.image.description="The sandbox's service: untrusted Python in namespaces of its own"
USER 10001:10001
WORKDIR /
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s CMD \
    ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=8)"]
ENTRYPOINT ["spear-sandbox"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]

# The environments.
FROM sandbox-packages AS envs-packages
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install -q -c constraints/cpu.txt ./sandbox '.[sandbox,data,env-server,retriever]' './agents[api]' \
    && find /opt/spear -regex '.*/pyarrow/.*tests' -type d -prune -exec rm -rf {} + \
    && { python -m compileall -qq -j 0 /opt/spear/lib || true; }

FROM envs-packages AS envs-environment
COPY --from=wheel /wheel /wheel
COPY --from=sbom /opt/sbom /opt/sbom
RUN rm /wheel/spear_training-*.whl \
    && pip install -q --compile --no-deps --force-reinstall /wheel/*.whl \
    && pip uninstall -q -y setuptools pip \
    && /opt/sbom/bin/cyclonedx-py environment -o /opt/spear/sbom.cdx.json /opt/spear/bin/python

FROM runtime AS envs
COPY --from=envs-environment /opt/spear /opt/spear
LABEL org.opencontainers.image.description="Environments for language model agents, and their services"
USER 10001:10001
CMD ["--help"]

# Training on a CPU.
FROM envs-packages AS train-packages
# An index with PyTorch's CPU wheels; empty for pip's own.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install -q --no-deps -c constraints/cpu.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install -q -c constraints/cpu.txt ./sandbox '.[sandbox,data,env-server,retriever]' './agents[api]' ./training \
    && { python -m compileall -qq -j 0 /opt/spear/lib || true; }

FROM train-packages AS train-environment
COPY --from=wheel /wheel /wheel
COPY --from=sbom /opt/sbom /opt/sbom
RUN pip install -q --compile --no-deps --force-reinstall /wheel/*.whl && pip uninstall -q -y pip \
    && /opt/sbom/bin/cyclonedx-py environment -o /opt/spear/sbom.cdx.json /opt/spear/bin/python

FROM runtime AS train-cpu
COPY --from=train-environment /opt/spear /opt/spear
LABEL org.opencontainers.image.description="Environments and SPEAR training on a CPU"
# Ray writes a token into the home folder and reports usage unless it is told not to.
ENV RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
CMD ["--help"]

# The tests.
FROM train-packages AS test
ARG TEST_PACKAGES="g++ git make procps tini"
RUN apt-get update && apt-get install -y --no-install-recommends ${TEST_PACKAGES} && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home spear && chown -R spear:spear /src
COPY --chown=10001:10001 . .
ENV VENV=/opt/spear RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    UV_COMPILE_BYTECODE=1 PIP_NO_COMPILE="" make setup EXTRAS=sandbox,api,env-server TORCH_INDEX="${TORCH_INDEX:-default}"
USER 10001:10001
# As the first process of a container make would neither end at Ctrl-C nor take orphans away.
ENTRYPOINT ["tini", "--"]
CMD ["make", "test"]

# Training on GPUs.
FROM packages AS gpu-packages
COPY constraints/gpu.txt ./constraints/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install -q -c constraints/gpu.txt ./sandbox '.[sandbox,data,env-server,retriever]' './agents[api]' './training[gpu]' \
    && { python -m compileall -qq -j 0 /opt/spear/lib || true; }

FROM gpu-packages AS gpu-environment
COPY --from=wheel /wheel /wheel
COPY --from=sbom /opt/sbom /opt/sbom
RUN pip install -q --compile --no-deps --force-reinstall /wheel/*.whl && pip uninstall -q -y pip \
    && /opt/sbom/bin/cyclonedx-py environment -o /opt/spear/sbom.cdx.json /opt/spear/bin/python

FROM runtime AS gpu
# Triton compiles its launchers when a kernel is first used, so this image keeps a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=gpu-environment /opt/spear /opt/spear
LABEL org.opencontainers.image.description="Environments and SPEAR training on NVIDIA GPUs"
ENV RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
CMD ["--help"]

# What a build without a target makes.
FROM envs
