"""Drawn layouts and checkpoints with planted faults of torch: each is caught, and without one all pass."""

import pytest

from planting import Fault

CHECK = "test_layouts.py::test_generated_layouts"
DDP = "torch.nn.parallel.distributed:DistributedDataParallel."
FSDP = "torch.distributed.fsdp._fully_shard."
CHECKPOINT = "torch.distributed.checkpoint."


def planted(name: str, family: str, case: int, patches: dict[str, str], says: str, **more: bool) -> Fault:
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
    # Chosen only after the check was done.
    planted(
        "FSDP2 forgets what it added up without sums",
        "layouts",
        17,
        {FSDP + "_fsdp_param:FSDPParam.accumulate_unsharded_grad_if_needed": "lambda self: None"},
        "gradient 0 of norm.weight",
        another=True,
    ),
    planted(
        "FSDP2 loses the last row of a weight that ranks do not divide",
        "layouts",
        1,
        {FSDP + "_fsdp_collectives:foreach_reduce_scatter_copy_in": "lambda grads, out, size: ("
         "[one[-1:].zero_() for one in grads if len(one) % size], original(grads, out, size))[1]"},
        "gradient 0 of head.weight",
        another=True,
    ),
    planted(
        "a loaded matrix loses its last row",
        "checkpoints",
        1,
        {CHECKPOINT + "default_planner:DefaultLoadPlanner.commit_tensor": "lambda self, item, one: "
         "one.ndim == 2 and one[-1:].zero_()"},
        "loaded embedding.weight",
        another=True,
    ),
    planted(
        "a rank that never gathers its sharded state",
        "checkpoints",
        5,
        {CHECKPOINT + "state_dict_saver:save": "lambda *a, **k: __import__('time').sleep(3600) "
         "if dist.get_rank() else original(*a, **k)"},
        "checkpoints: 0 5: float32",
        another=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
def test_healthy_layouts_pass(plant):
    plant(Fault("nothing", CHECK, outcome="passed", tier="soak"))
