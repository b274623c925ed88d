"""One flag at a time: settings that show how much each flag changes the speed of a step.

In: the name of a base and a number of GPUs. Out: settings for benchmarks/train.py, the base first. A lever
without a flag is in NOT_HERE with the reason, so that the table shows what it leaves out.
"""

# Eight layers at full width: a step of 0.3 s, so that a setting takes little longer than its compilation.
SHAPE = "--size 8b --layers 8 --seq-len 8192 --micro-batch 2 --lr 3e-5 --no-digest --no-preflight"
TIMED = "--steps 60 --warmup 6 --warmup-s 12 --budget-s 32"

NATIVE = f"{SHAPE} {TIMED} --precision bf16 --parallel fsdp2 --no-reshard --reduce bf16"
FUSED = f"{SHAPE} {TIMED} --precision bf16 --parallel zero1 --implementation fused --reduce bf16"

BASES = {
    "native": (
        NATIVE,
        {
            "attention flash": "--attention flash",
            "recompute every block": "--recompute full",
            "no compiler": "--no-compile",
            "compile the whole model": "--compile-scope model",
            "reshard after forward": "--reshard",
            "fp32 reduction": "--reduce fp32",
            "whole logits": "--loss-chunks 1",
            "2 chunks of the loss": "--loss-chunks 2",
            "fp8 tensorwise (torchao)": "--precision fp8",
            "fp8 row-wise (torchao)": "--precision fp8-rowwise",
            "zero1 instead of fsdp2": "--reshard --parallel zero1",
            "transformers' own model": "--implementation transformers",
        },
    ),
    "fused": (
        FUSED,
        {
            "attention flash": "--attention flash",
            "fp32 reduction": "--reduce fp32",
            "bf16 moments": "--moments bf16",
            "batch 1": "--micro-batch 1",
            "fp8 tensorwise": "--precision fp8",
            "autograd and compiler": "--implementation native",
        },
    ),
}
NOT_HERE = {
    "attention efficient": "torch's memory-efficient backend does not support grouped queries",
    "CUDA graph of the step": "the step is not captured; the fused layer waits for collectives on the host",
    "separate projections": "the fused layer has no such flag; `autograd and compiler` keeps them separate",
}


def settings(base: str, gpus: int) -> list[str]:
    """Arguments of benchmarks/train.py: the number of GPUs, then NAME: FLAGS; a later flag wins."""
    flags, levers = BASES[base]
    named = [f"{base}: {flags}", *(f"{base}, {name}: {flags} {change}" for name, change in levers.items())]
    return [str(gpus), *named]


def table(base: str, results: list[dict]) -> str:
    """Markdown: each setting's rate, memory and ratio to the base on its GPU, or why it has none."""
    bases, by_name, first = {}, {}, {}
    for result in results:  # in the order of measuring: a result is compared with the last base before it
        name, gpu = result["name"], result.get("gpu")
        if name == base:
            bases[gpu] = result.get("performance")
        by_name[name], first[name] = result, bases.get(gpu)
    lines = [
        "| setting | tokens/s/GPU | to base | TFLOP/s nc | GiB | attention |",
        "|---|---|---|---|---|---|",
    ]
    names = (base, *(f"{base}, {lever}" for lever in BASES[base][1]))
    lines += [_row(name, by_name.get(name), first.get(name)) for name in names]
    lines += [f"| {base}, {lever} | not measured: {reason} | | | | |" for lever, reason in NOT_HERE.items()]
    return "\n".join(lines)


def _row(name: str, result: dict | None, first: dict | None) -> str:
    if result is None or "performance" not in result:
        return f"| {name} | {'not run' if result is None else result['outcome']} | | | | |"
    speed, memory = result["performance"], result["memory"] or {}
    rate = speed["tokens_per_s_per_gpu"]
    ratio = f"{rate / first['tokens_per_s_per_gpu']:.3f}" if first else ""
    ran = (result["extra"].get("attention") or {}).get("backend")
    size = f"{memory['allocated_gib']:.1f}" if memory else ""
    problems = f" ({'; '.join(result['problems'])})" if result["problems"] else ""
    return f"| {name} | {rate:,.0f}{problems} | {ratio} | {speed['tflops_noncausal']:.1f} | {size} | {ran} |"
