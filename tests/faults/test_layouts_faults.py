"""Drawn layouts and checkpoints with planted faults of torch: each is caught, and without one all pass."""

import pytest

from planting import Fault

CHECK = "test_layouts.py::test_generated_layouts"
DDP = "torch.nn.parallel.distributed:DistributedDataParallel."
FSDP = "torch.distributed.fsdp._fully_shard."
CHECKPOINT = "torch.distributed.checkpoint."


def planted(name: str, family: str, case: int, patches: dict[str, str], says: str, **more: str) -> Fault:
    """A fault in one case of seed 0, which the check draws among others."""
    one = f"lambda program, words, **k: original(program, [*words[:2], '{case}', '1', words[4]], **k)"
    return Fault(
        name,
        f"{CHECK}[2-{family}]",
        patches={"harness.launch:launch": one, **patches},
        says=says,
        tier="soak",
        **more,
    )


FAULTS = (
    planted(
        "no_sync loses a bucket",
        "layouts",
        0,
        {
            DDP + "no_sync": "lambda self: (lambda stack: (stack.enter_context(original(self)), "
            "stack.callback(lambda: list(self.parameters())[-1].grad.zero_()), stack)[-1])"
            "(__import__('contextlib').ExitStack())"
        },
        "gradient 0 of head.weight",
    ),
    planted(
        "DDP sums and takes no mean",
        "layouts",
        4,
        {
            DDP + "__init__": "lambda self, *a, **k: (original(self, *a, **k), self.register_comm_hook("
            "None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()"
            ".then(lambda done: done.value()[0])))[0]"
        },
        "gradient 0 of norm.weight",
    ),
    planted(
        "FSDP2 sums and takes no mean",
        "layouts",
        1,
        {FSDP + "_fsdp_collectives:_get_gradient_divide_factors": "lambda *a, **k: (None, None, "
         "ReduceOp.SUM, ReduceOp.SUM)"},
        "gradient 0 of norm.weight",
    ),
    planted(
        "replicated gradients of tensor parallel are not reduced",
        "layouts",
        2,
        {"torch.distributed.tensor.placement_types:Partial._reduce_value": "lambda self, one, *a: one"},
        "gradient 0 of blocks.0.norm.weight",
    ),
    planted(
        "FSDP2 reduces in bfloat16",
        "layouts",
        17,
        {FSDP + "_fsdp_param_group:FSDPParamGroup._init_mp_dtypes": "lambda self: (original(self), "
         "setattr(self, '_reduce_dtype', torch.bfloat16))[0]"},
        "share of bfloat16",
    ),
    planted(
        "a job that was resumed once saves old state",
        "checkpoints",
        0,
        {CHECKPOINT + "state_dict_loader:load": "lambda state, **k: (original(state, **k), "
         "state.update(job=__import__('copy').deepcopy(state['job'].state_dict())))[0]"},
        "back norm.weight",
    ),
    planted(
        "a checkpoint in the background reads live weights",
        "checkpoints",
        0,
        {CHECKPOINT + "staging:DefaultStager.stage": "lambda self, state, **k: state"},
        "loaded norm.weight",
    ),
    planted(
        "a case that stops its ranks",
        "layouts",
        3,
        {FSDP + "_fsdp_param_group:FSDPParamGroup._init_mp_dtypes": "lambda self: __import__('os')._exit(3)"},
        "at layouts 0 3",
    ),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
def test_healthy_layouts_pass(plant):
    plant(Fault("nothing", CHECK, outcome="passed", tier="soak"))
