"""What the ranks of test_fsdp.py, test_processes.py and test_reduction.py do: each function runs on all ranks
of a job, see many_ranks.py.

    torchrun --nproc_per_node=2 tests/fsdp_jobs.py pieces '"cuda"' '"told.json"'    # a job, its words in JSON

A job trains a small net in a recipe and leaves what came of it, gathered, in a file. All ranks read the same
batch, so that their mean gradient is one rank's to the bit, on 1, 2 and 4 ranks.
"""

import json
import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import draw
from fsdp_nets import OPTIONS, STEPS, batch, bits, differing, found, meet, start, told, train
from torch import nn

from experiments.bench import sharding
from harness import reduction
from lowprec.errors import Refused
from lowprec.optimizers import buckets
from lowprec.optimizers.lion import Lion
from lowprec.optimizers.rounded import AdamW
from lowprec.parts.activations import recompute
from lowprec.parts.loss_scale import LossScale
from lowprec.parts.spread import part_of, whole_tensor
from lowprec.precision import Precision, recipe

# ---- Jobs --------------------------------------------------------------------------------------------------


def same_bits(names, device, file):
    """{recipe: names of tensors that differ from those of one rank that spreads nothing}."""
    meet(device)
    result = {}
    for name in names:
        options = dict(OPTIONS.get(name, {}), device=device)
        one, many = start(name, spread=False, **options), start(name, spread=True, **options)
        if name == "split":
            recompute(one.model), recompute(many.model)
        train(one), train(many)
        mine, theirs = found(many), found(one)
        result[name] = differing(mine, theirs) if dist.get_rank() == 0 else []
        view, x = many.generator("ema"), batch(7)[0].to(device)
        if view is not None and not torch.equal(view(x), one.generator("ema")(x)):
            result[name].append("what the generator draws")
        assert dist.get_rank() or len(mine) > 20
        if one.ledger().state_bytes != many.ledger().state_bytes:
            result[name].append("bytes a parameter")
    told(file, result)


def bf16(device, shape, seed):
    return draw(*shape, seed=seed).to(device, torch.bfloat16)


def pieces(device, file):
    """As `same_bits`, of the optimiser alone: odd shapes, one without a gradient, several keys a tensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    meet(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    AdamW.PIECE = 1 << 11
    shapes = [(7, 5), (3,), (1,), (129, 67), (65, 127), (5000,), (4097,), (3, 2000), (16, 6, 3, 3), (16, 256)]
    modes = {
        "stochastic": (AdamW, dict(update="stochastic", exp_avg="bf16", exp_avg_sq="bf16")),
        "int8": (AdamW, dict(update="stochastic", exp_avg="int8", exp_avg_sq="int8")),
        "int4": (AdamW, dict(master="split", exp_avg="int4", exp_avg_sq="int4")),
        "lion": (Lion, dict(kahan=True, update="stochastic", exp_avg="e4m3")),
    }
    result = {}
    for name, (kind, options) in modes.items():
        made = []
        for spread in (False, True):
            put = (lambda t: distribute_tensor(t, mesh, [Shard(0)])) if spread else torch.clone
            params = [nn.Parameter(put(bf16(device, s, i))) for i, s in enumerate(shapes)]
            optimizer = kind(params, lr=1e-2, weight_decay=0.1, compiled=False, **options)
            for step in range(3):
                for i, p in enumerate(params):
                    g = bf16(device, shapes[i], 9 * step + i)
                    p.grad = None if (i, step) == (4, 1) else put(g)
                optimizer.step(grad_scale=0.7)
            made.append((params, optimizer))
        (ones, one), (parts, many) = made
        different = []
        for p, q in zip(ones, parts, strict=True):
            part = part_of(q)
            pairs = [(p.detach(), buckets.local_tensor(q))]
            pairs += [(one.moment(p, m).view(p.shape), many.moment(q, m)) for m in one.moments]
            pairs += [(one.low_part(p), many.low_part(q))] if one.low_part(p) is not None else []
            for mine, theirs in pairs:
                whole = whole_tensor(theirs.view(part.rows), part)
                different += [] if torch.equal(bits(mine), bits(whole)) else [list(p.shape)]
        if one.nbytes() != many.nbytes():
            different.append("nbytes")
        result[name] = different
    told(file, result)


def clipped(file):
    """[(norms, update telemetry, a digest of the weights)] of runs that clip, accumulate, and scale the loss.
    """
    meet()
    result = {}
    for name, options in {
        "kahan": dict(clip_grad=0.05, accumulate=2),
        "stochastic": dict(clip_tensor=0.01),
        "fp16": dict(clip_grad=0.05),
    }.items():
        run = start(name, spread=True, **options)
        report = train(run, measure=True)
        values = {k: t.double().sum().item() for k, t in run.weights("raw").items()}
        result[name] = [report, sorted(values.items())]
    for spread in (False, True):  # the first step alone: a last bit of the norm moves all that follows
        run = start("kahan", spread=spread, clip_grad=0.05, accumulate=2)
        result["spread" if spread else "one rank"] = [train(run, last=1, measure=True), []]
    told(file, result)


def overflow(file):
    """Skipped steps of each rank, where one rank alone has an infinite gradient."""
    meet()
    run = start("fp16", spread=True)
    x, y = batch(0)
    run.backward(F.mse_loss(run(x), y))
    if dist.get_rank() == dist.get_world_size() - 1:
        p = next(p for p in run.params if p.grad.to_local().numel())
        p.grad.to_local().view(-1)[0] = float("inf")
    before = run.weights("raw")
    run.step()
    skipped = torch.tensor([run.part(LossScale).skipped])
    dist.all_reduce(skipped, op=dist.ReduceOp.MIN)
    told(file, {"skipped": skipped.item(), "moved": differing(before, run.weights("raw"))})


def saved(name, folder, file):
    """Train, save by torch.distributed.checkpoint as its pages show, train on; what it then holds."""
    from torch.distributed.checkpoint import save

    meet()
    run = start(name, spread=True)
    train(run)
    save({"run": run.state_dict()}, checkpoint_id=folder)
    train(run, STEPS, 2 * STEPS)
    values = found(run)
    if dist.get_rank() == 0:
        torch.save(values, file)


def loaded(name, folder, file, whole):
    """{names of tensors that differ} from those of `file`, after loading what other ranks saved."""
    from torch.distributed.checkpoint import load

    meet()
    run = start(name, spread=True)
    state = {"run": run.state_dict()}
    load(state, checkpoint_id=folder)
    run.load_state_dict(state["run"])
    train(run, STEPS, 2 * STEPS)
    values = found(run)
    told(whole, differing(values, torch.load(file)) if dist.get_rank() == 0 else [])


def of_a_stranger(kind, folder, file):
    """Of each rank the states that differ after torch's own functions have saved and loaded an AdamW of ours.
    """
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    meet()

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 70), nn.SiLU(), nn.Linear(70, 130))
        fully_shard(net)
        writing = dict(update="stochastic", exp_avg=kind, exp_avg_sq=kind, compiled=False)
        return net, AdamW(net.parameters(), lr=1e-2, **writing)

    net, optimizer = made()
    for step in range(3):
        net(draw(8, 6, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = dict(zip(("net", "optimizer"), get_state_dict(net, optimizer), strict=True))
    save(states, checkpoint_id=folder)
    other, its = made()
    states = dict(zip(("net", "optimizer"), get_state_dict(other, its), strict=True))
    load(states, checkpoint_id=folder)
    set_state_dict(other, its, model_state_dict=states["net"], optim_state_dict=states["optimizer"])
    differ = []
    for i, (p, q) in enumerate(zip(net.parameters(), other.parameters(), strict=True)):
        mine, loaded = optimizer.state[p], its.state[q]
        differ += [f"{name} of {i}" for name in mine if not equal(mine[name], loaded[name])]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, differ)
    told(file, every)


def equal(a, b):
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def sharding_of_a_rank(*words):
    """What `bench.py sharding` lets a process do."""
    sharding.of_a_process(int(os.environ["RANK"]), *words)


class Loss(nn.Module):
    """A wrapper that calls a net, as a diffusion does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.mse_loss(self.model(x), y)


def alone(run):
    return Loss(run.module)


def parallel_forward(run):
    run.forward = nn.parallel.DistributedDataParallel(run.model)
    return Loss(run.module)


def parallel_wrapper(run):
    return nn.parallel.DistributedDataParallel(Loss(run.module))


def parallel_module(run):
    return Loss(nn.parallel.DistributedDataParallel(run.module))


def watched(file):
    """The verdict of a Watch on each rank, of a net of whose last layer some ranks have no rows."""
    from torch.distributed.fsdp import fully_shard

    from lowprec import Watch

    meet()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 3))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    watch = Watch(net, optimizer, average, every=1)
    for step in range(4):
        net(draw(8, 6, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in net.named_parameters():
                average[name].lerp_(p, 0.1)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, watch.diagnosis().verdict)
    told(file, every)


def by_its_module(wrapped, spread):
    """All that a run holds after some steps of a loss that calls run.module."""
    run = start("stochastic", spread)
    loss = wrapped(run)
    for step in range(STEPS):
        run.backward(loss(*batch(step)))
        run.step()
    return found(run)


def refuses(run, loss, **options):
    """Whether a micro-batch is refused with these options of backward."""
    try:
        run.backward(loss(*batch(0)), **options)
    except Refused:
        return True
    return False


def micro_batches(file):
    """{what was tried of micro-batches of a net in DDP: whether it is refused}, and the names of tensors that
    differ where gradients are views of DDP's buckets.
    """
    meet()
    tried = {}
    flags = dict(pure_bf16=True, sites=["accumulate=fp32", "islands=norm"])
    for way in (parallel_forward, parallel_wrapper, parallel_module):
        run = start("", False, flags, accumulate=2)
        tried[f"weight, {way.__name__}"] = refuses(run, way(run), weight=8)
        run = start("", False, flags, accumulate=2)
        loss = way(run)
        parallel = next(m for m in (run.forward, *loss.modules()) if hasattr(m, "no_sync"))
        with parallel.no_sync():
            tried[f"no_sync, {way.__name__}"] = refuses(run, loss)
    runs = []
    for as_view in (False, True):
        run = start("", False, flags, accumulate=2)
        run.forward = nn.parallel.DistributedDataParallel(run.model, gradient_as_bucket_view=as_view)
        for step in range(2 * STEPS):
            x, y = batch(step)
            run.backward(F.mse_loss(run(x), y))
            if step % 2:
                run.step()
        runs.append(run)
    told(file, {"refused": tried, "differing": differing(*map(found, runs))})


def modules(file):
    """{how run.module is wrapped: names of tensors that differ from those of a run that is not spread}."""
    meet()
    want = by_its_module(alone, False)
    ways = {"fully_shard": (alone, True)}
    ways |= {way.__name__: (way, False) for way in (parallel_forward, parallel_wrapper, parallel_module)}
    told(file, {name: differing(by_its_module(*way), want) for name, way in ways.items()})


def spread_with_statistics():
    """A call of a net whose owner has spread a norm, which stays fp32, with bf16 weights."""
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16))
    fully_shard(net)
    Precision(net, recipe(pure_bf16=True), ema_decay=None)(batch(0)[0])


def refused(file):
    """{what was tried: the line}."""
    meet()
    tries = {
        "adafactor": lambda: start("stochastic", spread=True, optimizer="adafactor"),
        "muon": lambda: start("stochastic", spread=True, optimizer="muon"),
        "torch": lambda: start("fp32", spread=True, optimizer="torch"),
        "fp8": lambda: start("", True, dict(fp8=True, fp8_backend="emulate")),
        "sparse24": lambda: start("", True, dict(pure_bf16=True, stochastic=True, sparse24="srste")),
        "int8": lambda: start("", True, dict(bf16=True, sites=["generation=int8"])),
        "grad_release": lambda: start("stochastic", spread=True, grad_release=True),
        "average_on": lambda: start("stochastic", spread=True, average_on="cpu"),
        "states_on": lambda: start("stochastic", spread=True, states_on="cpu"),
        "statistics": spread_with_statistics,
    }
    said = {}
    for name, act in tries.items():
        try:
            act()
            said[name] = None
        except Refused as error:
            said[name] = str(error)
    run = start("stochastic", spread=True)
    run.options.blank = None
    try:
        run.generator()
    except Refused as error:
        said["generator"] = str(error)
    told(file, said)


def hurried(*words):
    """train.py with a tenth of its patience; rank 1 is killed where it has met the others and not their
    backend, if the words say so.
    """
    import train
    from harness import ranks

    ranks.MEETING_TIME = timedelta(seconds=2)
    if "DIES" in words and os.environ["RANK"] == "1":
        dist.init_process_group = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
    return train.main([word for word in words if word != "DIES"])


def threads_left(words, file):
    """The names of the process group's threads that are there after train.py."""
    import train

    assert train.main(words) == 0
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps([name for name in names if "gloo" in name]))


def auto(limits, *words):
    """train.py where the memory of each rank ends at a batch size of its own."""
    import pytest
    from out_of_memory import Full

    import train

    with pytest.MonkeyPatch.context() as patch:
        Full(patch, limits[int(os.environ["RANK"])])
        return train.main(list(words))


def waiting_experiment(root, folder):
    """run.py with the train.py of a folder, whose run waits for its end."""
    from experiments import run

    os.environ["WAIT"] = "1"
    run.ROOT = Path(root)
    run.fork_server = lambda: multiprocessing.get_context("fork")
    run.refuse_changed_code = lambda todo: None
    return run.main(["001", "--arm", "fp32", "--seeds", "0", "--jobs", "1"], Path(folder))


# ---- Means of gradients ------------------------------------------------------------------------------------

SHAPES = [(40, 7), (3,), (129,)]


def gradients(rank, dtype, size=1.0):
    """[gradient of each of three parameters] on a rank."""
    drawn = [draw(*shape, seed=10 * rank + i) for i, shape in enumerate(SHAPES)]
    return [(size * g).to(dtype) for g in drawn]


def reduced(dtype, file):
    """The means, by parameter, for buckets in two ways, at three steps."""
    meet()
    step, dtype = [0], getattr(torch, dtype)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    mean = reduction.StochasticMean(params, 5, lambda: step[0])
    own, found = gradients(dist.get_rank(), dtype), []
    for step[0] in range(3):
        for division in ([0, 1, 2],), ([2, 0], [1]):
            means = [None] * len(params)
            for places in division:
                flat = torch.cat([own[i].flatten() for i in places])
                parts = mean.mean(flat, [params[i] for i in places]).split([own[i].numel() for i in places])
                for i, part in zip(places, parts, strict=True):
                    means[i] = part.float().tolist()
            found.append(means)
    told(file, found)


def over_steps(steps, file):
    """The mean over many steps of what each way makes of the same gradients."""
    meet()
    step = [0]
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    own = torch.cat([g.flatten() for g in gradients(dist.get_rank(), torch.bfloat16)])
    low = ["reduce=bf16", "reduce_update=stochastic"]
    mean = reduction.mean_of_ranks(recipe(sites=low), params, 5, lambda: step[0])
    total = torch.zeros(len(own), dtype=torch.float64)
    for step[0] in range(steps):
        total += mean.mean(own, params).double()
    nearest = {"all": own.float()}
    reduction.mean_of_ranks(recipe(sites=low[:1]), params).sums(nearest)
    told(file, dict(stochastic=(total / steps).tolist(), nearest=nearest["all"].tolist()))


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
