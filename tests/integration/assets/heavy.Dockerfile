FROM scratch AS base
ADD rootfs.tar /
RUN --network=none printf '%020000000d' 0 > /ballast
USER 1000:1000
CMD ["/bin/true"]
