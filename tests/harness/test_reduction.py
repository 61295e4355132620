"""The mean of gradients over real processes: rounded once and without bias, whatever the buckets, and a run
that is resumed repeats its bits.
"""

from pathlib import Path

import fsdp_jobs
import pytest
import rank_server
import torch
from cli import assert_same, checkpoint
from fsdp_runs import RUN, TASK
from rank_server import ranks_messages, told

from lowprec.rounding import Noise, hash64, noise_bits, noise_key, stochastic_round

ranks = rank_server.ranks

# ---- The mean ----------------------------------------------------------------------------------------------


def rounded(values, seed, step, start):
    noise = noise_bits(values.numel(), noise_key(seed, step, start, Noise.REDUCE))[0]
    return stochastic_round(values.flatten(), noise).float()


@pytest.mark.parametrize("world, dtype", [(2, "float32"), (4, "float32"), (3, "bfloat16")])
def test_the_mean_is_that_of_rounded_gradients_rounded_once(world, dtype, ranks):
    found = told(ranks, world, "reduced", dtype)
    of_rank = [fsdp_jobs.gradients(rank, getattr(torch, dtype)) for rank in range(world)]
    for step in range(3):
        wanted, start = [], 0
        for parts in zip(*of_rank, strict=True):
            sent = [part.flatten().float() for part in parts]
            if dtype == "float32":
                sent = [rounded(part, hash64(5, 1 + rank), step, start) for rank, part in enumerate(sent)]
            wanted.append(rounded(torch.stack(sent).mean(0), 5, step, start).tolist())
            start += parts[0].numel()
        assert found[2 * step] == wanted and found[2 * step + 1] == wanted  # in one bucket, and in two


def test_a_stochastic_reduction_is_unbiased_and_one_to_nearest_is_not(ranks):
    steps, world = 100, 4
    found = told(ranks, world, "over_steps", steps)
    of_rank = [fsdp_jobs.gradients(rank, torch.bfloat16) for rank in range(world)]
    exact = torch.stack([torch.cat([g.flatten() for g in own]) for own in of_rank]).double().mean(0)
    ulp = 2.0 ** (exact.abs().log2().floor() - 7)  # a mean just below a power of two has half of it
    apart = (torch.tensor(found["stochastic"], dtype=torch.float64) - exact) / ulp
    # a value rounded at random between two neighbours spreads by half an ulp at most
    assert apart.abs().max() < 5 * 0.5 / steps**0.5
    assert ((torch.tensor(found["nearest"], dtype=torch.float64) - exact) / ulp).abs().max() > 0.4


# ---- Runs --------------------------------------------------------------------------------------------------

LOW = ["--set", "reduce=bf16", "--set", "reduce_update=stochastic"]
RECIPES = {"fp32": [], "sums": ["--pure_bf16", "--accumulate", 2, "--set", "accumulate=fp32"]}


@pytest.fixture
def run(ranks):
    Path("lines.py").write_text(TASK)

    def begin(world, *words, name="on"):
        words = ("--task", "lines.py:Lines", *RUN, "--name", name, *words)
        return ranks(world, None, *words)

    return begin


def weights(name):
    return checkpoint(name)["precision"]["model"]


@pytest.mark.parametrize("flags", RECIPES.values(), ids=RECIPES)
def test_a_resumed_run_repeats_its_bits(flags, run, ranks):
    for name, steps in (("whole", 4), ("on", 2), ("on", 4)):
        assert run(2, *flags, *LOW, "--steps", steps, name=name) == [0, 0], ranks_messages(ranks)
    assert_same(weights("on"), weights("whole"))
    assert run(2, *flags, *LOW[:2], "--steps", 4, name="nearest") == [0, 0]
    other = weights("nearest")
    assert any(not torch.equal(w, other[name]) for name, w in weights("on").items())


def test_fully_shard_refuses_it(run, ranks):
    assert run(2, "--fsdp", *LOW, "--steps", 2) == [2, 2]
    (said,) = ranks.said()
    assert "reduce_update=stochastic: fully_shard (--fsdp) reduces in its own way" in said
    assert not Path("runs/on").exists()
