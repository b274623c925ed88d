"""Fabricated hosts with AMD GPUs: made-up kernel files, read by AMD's real SMI library.

In: a `HostState` (states.py) and a `Library` (rootfs.py). Out: a command that runs inside a Debian root
file system whose /sys, /dev and DRM ioctls show that state. No value was captured from hardware;
docs/reference/amd.md says what passing proves and what it does not.
"""
