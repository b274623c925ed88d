# A stack in small: a base, a stage that compiles and hands over, one for packages, and what is shipped.
# Each step writes the time in nanoseconds: equal bytes prove that it ran once.
FROM scratch AS wheelhouse
COPY stack.json /

FROM scratch AS base
ADD rootfs.tar /
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --network=none date +%N@NONCE@ > /etc/base-made

FROM base AS kernel-build
WORKDIR /wheels
RUN --network=none echo "kernel==1.0 @NONCE@" > pin && date +%N > /wheels/made

FROM scratch AS kernel
COPY --from=kernel-build /wheels/ /

FROM base AS packages
RUN --network=none date +%N@NONCE@ > /etc/packages-made

FROM base AS final
COPY --from=packages /etc/packages-made /etc/
COPY --from=kernel / /opt/kernel/
COPY stack.json /opt/
USER 1000:1000
CMD ["/bin/true"]
