"""The order of the data: each epoch shows all of them, ranks share it, and a resumed run goes on in it."""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from harness.batches import BatchIndices, read_batches


def indices(count, seed=0, **place):
    """The first `count` micro-batches of 4 of 10 items."""
    return list(islice(BatchIndices(10, 4, seed, **place), count))


def test_each_epoch_shows_every_item_once_in_an_order_of_its_own():
    shown = sum(indices(5), [])
    first, second = shown[:10], shown[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert indices(5) == indices(5) and indices(5) != indices(5, seed=1)


def test_ranks_read_the_rows_of_one_process():
    parts = [indices(5, rank=rank, world=2) for rank in (0, 1)]
    assert [a + b for a, b in zip(*parts, strict=True)] == indices(5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_goes_on_reads_what_comes_next(accumulate):
    data = torch.arange(10)
    config = SimpleNamespace(batch_size=4, accumulate=accumulate, seed=0, workers=0)
    ranks = SimpleNamespace(rank=0, world=1)

    def read(step, count):
        return [batch.tolist() for batch in islice(read_batches(data, config, ranks, step), count)]

    whole = read(0, 12)
    assert whole == indices(12)
    assert read(3, 12 - 3 * accumulate) == whole[3 * accumulate :]
