# Packages from the handed-over folder alone, in a build that has no network device but lo.
FROM scratch AS wheelhouse
COPY stack.json /

FROM scratch AS base
ADD rootfs.tar /
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

FROM base AS wheels
WORKDIR /opt/stackcheck
COPY requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=bind,from=wheelhouse,target=/stackcheck-wheelhouse \
    test "$(ls /sys/class/net)" = lo \
    && python3.11 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-compile --no-deps --require-hashes -r requirements.lock \
    && /opt/venv/bin/python -c 'import small_package; assert small_package.WORD == "@NONCE@"'

FROM base AS final
COPY --from=wheels /opt/stackcheck /opt/stackcheck
COPY stack.json /opt/
CMD ["/bin/true"]
