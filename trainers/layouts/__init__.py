"""How the ranks share one model: FSDP2, FSDP1, pipeline, ZeRO-1. `job.create` picks the layout of a run."""
