"""The order of rows: each once in a pass, drawn as if by chance, found without a table of all rows."""

import itertools
import random
import tracemalloc

import pytest

import options
import order
import plan

SIZES = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4096, 4097)


@pytest.mark.parametrize("rows", SIZES)
def test_each_pass_has_every_row_once(rows: int) -> None:
    for epoch in range(3):
        passed = [order.row(epoch * rows + place, rows, 7) for place in range(rows)]
        assert sorted(passed) == list(range(rows))


@pytest.mark.parametrize("rows", [size for size in SIZES if size > 60])
def test_passes_and_seeds_have_orders_of_their_own(rows: int) -> None:
    def passed(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(order.row(epoch * rows + place, rows, seed) for place in range(rows))

    found = [passed(seed, epoch) for seed in (0, 1, 2, 1 << 40) for epoch in range(3)]
    assert len(set(found)) == len(found)
    assert found[0] == passed(0, 0)


@pytest.mark.parametrize("rows", [1000, 4096, 5000])
def test_an_order_has_as_many_neighbours_and_fixed_rows_as_one_of_chance(rows: int) -> None:
    neighbours = fixed = 0
    for seed in range(20):
        passed = [order.row(place, rows, seed) for place in range(rows)]
        neighbours += sum(b == a + 1 for a, b in itertools.pairwise(passed))
        fixed += sum(place == at for place, at in enumerate(passed))
        # Rows of the lower half in the first half of a pass: by chance within 6 of its standard deviations.
        low = sum(at < rows // 2 for at in passed[: rows // 2])
        assert (4 * low - rows) ** 2 < 36 * rows
    # Each is 1 an order by chance, so 20 in all with a standard deviation of 4.5.
    assert 2 < neighbours < 50
    assert 2 < fixed < 50


def test_memory_does_not_depend_on_the_rows() -> None:
    drawn = random.Random(1)
    tracemalloc.start()
    try:
        for rows in (10**3, 10**9, 10**15):
            numbers = [drawn.randrange(5 * rows) for _ in range(200)]
            assert all(0 <= order.row(number, rows, 3) < rows for number in numbers)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("source", "said"), [("text", None), ("synthetic", None), ("rows", order.VERSION)])
def test_a_checkpoint_says_which_order_its_rows_had(source: str, said: int | None) -> None:
    made = plan.Plan(**dict.fromkeys(plan.Plan.__dataclass_fields__, 0))
    assert made.identity(options.parse(["--data", source]), None).get("order of rows") == said
