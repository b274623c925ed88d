"""Many machines (docs/fleet.md). In: a stack, an engine's nodes. Out: nodes x checks, judged on this host."""
