"""Checks of conformance: a tensor in parts, as two parameters of one optimiser, and as shards on two ranks.

Shards are torch's DTensors, as FSDP2 lays them out. The ranks take turns in this process, beside a process
group that sends nothing: a step of an optimiser that treats each entry by itself needs no message.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.conformance import (
    NOT_ELEMENTWISE,
    chequered,
    differing,
    judged,
    not_claimed,
    nothing,
    random_grads,
    random_weights,
)
from benchmarks.conformance_noise import NOISY_WRITE, SHARED_CORRELATION, worst_of
from benchmarks.subjects import BF16, ULP, drawn, feed, full, in_fp64
from lowprec.errors import first_line

RANKS = 2


def stepped_weights(subject, weights, gradients, lr, rows, seed):
    """fp64 weights [n, m] after the steps of a tensor that lies in several parameters of `rows` rows each."""
    with drawn(seed):
        params, optimizer = subject.start(weights.split(rows), lr)
        for g in gradients:
            feed(params, optimizer, g.split(rows))
    return torch.cat([in_fp64(p) for p in params])


@contextlib.contextmanager
def as_rank(rank):
    """Within it this process is one of RANKS, which hear nothing of each other. Gives their mesh."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def on_ranks(subject, weights, gradients, lr, seed):
    """[fp64 weights of each rank's shard]. All ranks seed torch's generator alike, as most programs do."""
    found = []
    for rank in range(RANKS):
        with as_rank(rank) as mesh, drawn(seed):

            def shard(t, mesh=mesh, rank=rank):
                mine = t.chunk(RANKS)[rank].to(BF16, copy=True)
                return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)

            p = nn.Parameter(shard(weights))
            optimizer = subject.over([p], lr)
            for g in gradients:
                p.grad = shard(g)
                optimizer.step()
            found.append(in_fp64(p.to_local()))
    return found


def by_the_generator(subject, weights, gradients):
    """Whether another seed of torch's generator gives other weights."""
    one = stepped_weights(subject, weights, gradients, ULP, len(weights), seed=10)
    other = stepped_weights(subject, weights, gradients, ULP, len(weights), seed=11)
    return bool((one != other).any())


def weights_and_gradients():
    """(weights [128, 128], three gradients)."""
    (weights,) = random_weights([(128, 128)])
    return weights, [g for (g,) in random_grads([(128, 128)], 3)]


# ---- Checks ------------------------------------------------------------------------------------------------


def split(subject, size):
    """Does a tensor get the same bits as two parameters of one optimiser?

    Then noise goes by an element's place among all, and each half is held as the whole is. The figure is the
    share of weights that differ. Not claimed by those that draw from torch's generator, where the order of
    draws may be another, and meaningless where an entry's step depends on other entries. Both halves are
    large: codes may spare small tensors.
    """
    weights, gradients = weights_and_gradients()
    whole = stepped_weights(subject, weights, gradients, ULP, rows=128, seed=10)
    halves = stepped_weights(subject, weights, gradients, ULP, rows=64, seed=10)
    share = (whole != halves).double().mean().item()
    if share and not subject.elementwise:
        return not_claimed(NOT_ELEMENTWISE)
    if share and by_the_generator(subject, weights, gradients):
        return not_claimed("by torch's generator", differ=share)
    said = f"split in two parameters, {share:.1%} of the weights get other bits"
    return judged(not share, differing(share), said, differ=share)


def sharded(subject, size):
    """Does a tensor get the same bits on two ranks, a half on each, as FSDP2 shards it?

    A sharded run should be the run. Asked of those whose step takes DTensors: that is the claim. Not claimed
    by those that draw from torch's generator, of which each rank has its own, and meaningless where an
    entry's step depends on other entries. The figure is the share of weights that differ.
    """
    if not subject.elementwise:
        return not_claimed(NOT_ELEMENTWISE)
    weights, gradients = weights_and_gradients()
    try:
        parts = on_ranks(subject, weights, gradients, ULP, 10)
    except Exception as error:
        return not_claimed("takes no DTensor", error=f"{type(error).__name__}: {first_line(error)}")
    whole = stepped_weights(subject, weights, gradients, ULP, len(weights), 10)
    share = (whole != torch.cat(parts)).double().mean().item()
    if share and by_the_generator(subject, weights, gradients):
        return not_claimed("by torch's generator", differ=share)
    said = f"sharded on {RANKS} ranks, {share:.1%} of the weights get other bits"
    return judged(not share, differing(share), said, differ=share)


def between_ranks(subject, size):
    """Do the ranks round their shards independently? The same weights and gradients on both.

    Noise that goes by the place within the shard, from one seed, errs the same way in all shards. The figure
    is the correlation of the two shards' weights. Where the noise is that of torch's generator, it is the
    program that has to seed each rank differently, and that many do not is told and is no finding.
    """
    try:
        shards = on_ranks(subject, full(128), [chequered(128)] * 2, NOISY_WRITE / subject.unit(128), 12)
    except Exception as error:
        return not_claimed("takes no DTensor", error=f"{type(error).__name__}: {first_line(error)}")
    pair = tuple(shard.flatten()[1::2] for shard in shards)
    value, chance = worst_of([pair])
    if value is None:
        return nothing("no noise")
    holds = value < max(SHARED_CORRELATION, chance)
    said = f"ranks that are seeded alike share their noise ({value:+.2f})"
    if not holds and by_the_generator(subject, *weights_and_gradients()):
        return not_claimed(f"{value:+.3f} if seeded alike", said, correlation=value)
    return judged(holds, f"{value:+.3f}", said, correlation=value)
