"""Hosts with AMD GPUs that do not exist: fabricated kernel files under AMD's real SMI library.

In: a `HostState` (states.py) and a `Library` (rootfs.py). Out: a command run inside a Debian root file
system whose /sys, /dev and DRM ioctls say what the state says. No value here was captured from hardware;
docs/amd.md says what passing proves and what it does not.
"""
