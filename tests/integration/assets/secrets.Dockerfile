# Each setting of the host has to arrive where the templates of images/ expect it, or the build stops.
FROM scratch AS wheelhouse
COPY stack.json /

FROM scratch AS base
ADD rootfs.tar /
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=secret,id=apt_sources,target=/etc/apt/sources.list.d/stackcheck.list \
    --mount=type=bind,from=wheelhouse,target=/stackcheck-wheelhouse \
    grep -Eq 'index-url = https://[a-z-]+:[a-z-]+@index' /etc/pip.conf \
    && grep -q 'find-links = /stackcheck-wheelhouse' /etc/pip.conf \
    && grep -q '77ae' /etc/ssl/certs/ca-certificates.crt \
    && grep -q '5f1c' /stackcheck-wheelhouse/*.whl \
    && echo done > /arrived

FROM base AS final
COPY stack.json /opt/stackcheck/
USER 1000:1000
CMD ["/bin/true"]
