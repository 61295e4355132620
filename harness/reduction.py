"""The mean of gradients over the processes of a run, as a recipe's sites `reduce` and `reduce_update` say.

    mean = reduction.mean_of_ranks(run.recipe, run.params, seed=0, step=lambda: number_of_the_step)
    ddp.register_comm_hook(None, mean.hook)       # torch.nn.parallel.DistributedDataParallel, any loop

fp32 and bf16 to nearest are the all-reduce of torch, in that dtype: in bf16 a sum over W processes is rounded
W - 1 times. `StochasticMean` rounds once, without bias.
"""

import math

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lowprec.kernels.compiled import fused
from lowprec.optimizers.buckets import StepTable
from lowprec.rounding import Noise, hash64, key_words, noise_bits, stochastic_round

# ---- To nearest --------------------------------------------------------------------------------------------


class NearestMean:
    """The mean in `dtype`, as torch's own all-reduce forms it."""

    def __init__(self, dtype):
        self.dtype = dtype

    def hook(self, state, bucket):
        """What DistributedDataParallel calls with a GradBucket: a future of the mean of its gradients."""
        buffer = bucket.buffer()
        sent = buffer.to(self.dtype).div_(dist.get_world_size())
        done = dist.all_reduce(sent, async_op=True).get_future()
        return done.then(lambda future: buffer.copy_(future.value()[0]))

    def sums(self, of):
        """Replace sums by their means, in place. of: {parameter: its gradient's sum here}; all travel as one.
        """
        flat = _flatten_dense_tensors(list(of.values()))
        sent = flat.to(self.dtype).div_(dist.get_world_size())
        dist.all_reduce(sent)
        _as_gradient(sent, of)


def _as_gradient(flat, of):
    for total, mean in zip(of.values(), _unflatten_dense_tensors(flat, list(of.values())), strict=True):
        total.copy_(mean)


# ---- Stochastic --------------------------------------------------------------------------------------------


class StochasticMean:
    """The mean sent in bf16 and unbiased: over the noise its expectation is the exact mean.

    Each process sends each other one a part, rounded stochastically where gradients are not bf16 already. Who
    owns a part sums in fp32, in the order of the ranks, rounds stochastically once, and sends it to all: the
    traffic of an all-reduce in bf16. The noise is a function of (seed, step, rank, place in the list of
    parameters), so the bits don't depend on the buckets, which DistributedDataParallel makes anew after the
    first step, and a resumed run repeats them.

    params: all parameters of the net, in order. step: a function that tells the number of the step.
    """

    def __init__(self, params, seed, step):
        ends = torch.tensor([p.numel() for p in params]).cumsum(0).tolist()
        self.starts = {p: end - p.numel() for p, end in zip(params, ends, strict=True)}
        self.seed, self.step = seed, step

    def hook(self, state, bucket):
        """As NearestMean.hook. It waits for what it sends, so backward does not go on meanwhile on a CPU."""
        buffer = bucket.buffer()
        buffer.copy_(self.mean(buffer, bucket.parameters()))
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    def sums(self, of):
        """As NearestMean.sums."""
        _as_gradient(self.mean(_flatten_dense_tensors(list(of.values())), list(of)), of)

    def mean(self, flat, params):
        """bf16 [n], the same on all ranks: the mean of fp32 or bf16 flat [n], the gradients of `params` one
        after the other.
        """
        n, world, rank = flat.numel(), dist.get_world_size(), dist.get_rank()
        part = math.ceil(n / world)
        sent = torch.zeros(world * part, dtype=torch.bfloat16, device=flat.device)
        if flat.dtype == torch.bfloat16:
            sent[:n] = flat
        else:
            self._write(sent, flat, params, 0, hash64(self.seed, 1 + rank))
        theirs = torch.empty_like(sent)
        dist.all_to_all_single(theirs, sent)
        own = sent[rank * part : (rank + 1) * part]
        mean = theirs.view(world, part).float().mean(0)
        self._write(own, mean, params, rank * part, self.seed)
        dist.all_gather_into_tensor(theirs, own.contiguous())
        return theirs[:n]

    def _write(self, out, values, params, first, seed):
        """Round fp32 values [m] into bf16 out: those from `first` on of the gradients of `params`."""
        table, rows, begin = StepTable(values.device), [], 0
        last = first + values.numel()
        for p in params:
            end = begin + p.numel()
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                place = self.starts[p] + start - begin
                rows.append((len(table.keys), start - first, stop - first))
                table.numbers.append([0.0])
                table.keys.append([*key_words(seed, self.step(), place, Noise.REDUCE), 0])
            begin = end
        if rows:
            table.fill()
        for row, start, stop in rows:
            fused(_kernel, out[start:stop], values[start:stop], table.keys[row])


def _kernel(out, values, key):
    out.copy_(stochastic_round(values, noise_bits(values.numel(), key)[0]))


def mean_of_ranks(recipe, params, seed=0, step=lambda: 0):
    """What forms the mean as a recipe says: its `hook` and its `sums`."""
    if recipe.reduce_update == "stochastic":
        return StochasticMean(params, seed, step)
    return NearestMean(recipe.dtype("reduce"))
