"""Checks and planted faults that pages and data name before they are in this checkout.

In: nothing. Out: their names. A name that has arrived fails `test_trust`: take it out here.
"""

from __future__ import annotations

CHECKS = frozenset(
    {
        "test_collectives.py::test_groups_set_up_and_torn_down",
        "test_collectives.py::test_same_bits_from_call_to_call",
        "test_compiled.py::test_compiled_norms_sharing_a_table",
        "test_compiled.py::test_compiled_sums_in_place",
        "test_compiled.py::test_triton_kernels",
        "test_packages.py::test_package_layers",
        "test_training.py::test_resume_with_uneven_shards",
    }
)
FAULTS = frozenset(
    {
        "a Triton product forgets its accumulator",
        "a Triton tile is not turned",
        "a slice of a compiled table's gradient is not written",
        "an uneven shard that loses its last row",
        "te's attention of packed sequences loses dk",
        "torchao leaves a layer in 16 bits",
        "torchao's layer loses a row of dx",
    }
)
