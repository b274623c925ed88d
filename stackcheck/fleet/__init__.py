"""Many machines: one image, one run on each node, pairs of nodes, the whole set. In: a stack and an engine's nodes.

Out: nodes x checks, judged on this host. See docs/fleet.md.
"""
