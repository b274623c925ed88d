"""Many machines (docs/guides/fleet.md). In: a stack, an engine's nodes. Out: nodes x checks, judged here."""
