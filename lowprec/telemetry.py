"""Which entries of weights, moments and average one step changed, of those that it should change."""

import functools
import math

import torch

from .optimizers.buckets import local_tensor, scale_of
from .parts.part import Part


def sample_entries(t, most=1 << 16):
    """Flat entries of tensor `t`, evenly spread: about `most` of a large one, all of one below 2 * `most`.

    The stride shares no factor with the number of entries, and so none with the length of a row: entries come
    from every column alike. A stride of 256 would see 16 of the 4,096 columns of a 4096 x 4096 weight.
    Returns a view where `t` is contiguous.
    """
    values = t.detach() if type(t) in WITHOUT_WRAPPER else values_here(t)
    flat = values.reshape(-1)  # [...] -> [entries]
    entries = flat.numel()
    if entries < 2 * most:
        return flat
    return flat[:: _stride(entries, most)]


@functools.cache
def _stride(entries, most):
    stride = max(1, entries // most)
    while math.gcd(stride, entries) > 1:
        stride += 1
    return stride


WITHOUT_WRAPPER = (torch.Tensor, torch.nn.Parameter)


def values_here(t):
    """A tensor without its graph; of one that is spread over ranks this rank's part, as values."""
    t = local_tensor(t)
    if type(t) not in WITHOUT_WRAPPER and hasattr(t, "dequantize"):  # torchao's codes
        return t.dequantize()
    return t


def announce(optimizer, grads, scale):
    """Tell an optimiser whose update of an entry depends on the whole tensor what its next step will be
    given; the others need samples alone. grads: {parameter: gradient}, or None for those in place.
    """
    getattr(optimizer, "announce", lambda *_: None)(grads, scale)


class StepReport:
    """Counts which entries of weights, moments and average a step changed, of those that it should change.

    Make it before the optimiser's step, ask `written` after that step, and `averaged` after the average's.
    grads: {parameter: gradient}. scale: float or 0-dim tensor that the step multiplies gradients by, or
    {parameter: one of these}. A step that is done tensor by tensor adds each before its write.
    named_params: [(name, parameter)]. shadow: {name: tensor of the average}. sum_over_ranks: number -> its
    sum, where each rank has a part of every tensor.
    """

    def __init__(self, optimizer, grads, scale, named_params, shadow, sum_over_ranks=lambda number: number):
        self.optimizer = optimizer
        self.named_params = named_params
        self.shadow = shadow
        self.count = functools.partial(_Count, sum_over_ranks)
        # parameter -> (whether an entry has a gradient, the value held, the update that is wanted or None
        # where nobody can tell, the second moment or None), each [sampled entries]
        self.before = {}
        self.add(grads, scale)
        self.shadow_before = {name: sample_entries(t).clone() for name, t in shadow.items()}

    @torch.no_grad()
    def add(self, grads, scale):
        """Look at parameters that are about to be written."""
        announce(self.optimizer, grads, scale)
        for p, whole in grads.items():
            g = sample_entries(whole)
            # cloned: an answer may be a view of what the step is about to overwrite
            held = self.optimizer.held(p, sample_entries).clone()
            moment = self._moment(p)
            if moment is not None:
                moment = moment.clone()
            wanted = self.optimizer.wanted(p, g.float() * scale_of(scale, p), sample_entries)
            self.before[p] = g != 0, held, wanted, moment

    def _moment(self, p):
        return self.optimizer.moment(p, "exp_avg_sq", sample_entries)

    @torch.no_grad()
    def written(self):
        """What the optimiser's step wrote:

        update_survival   share of the non-zero updates of weights that changed the value held
        update_ratio      norm of the update that was wanted over the norm of the weights
        exp_avg_sq_moved  share of the entries of the second moment that changed, of those that should; left
                          out where the optimiser keeps none
        """
        wanted = self.count()
        survived = self.count()
        moving = self.count()
        moved = self.count()
        update_squares = self.count()
        weight_squares = self.count()
        for _, p in self.named_params:
            if p not in self.before:
                continue
            has_grad, held, update, moment = self.before[p]
            after = self.optimizer.held(p, sample_entries)
            if update is None:  # nobody can tell what was wanted: take what was done
                want = has_grad
                update = after - held
            else:
                want = update != 0
            wanted.add(want)
            survived.add(want & (after != held))
            update_squares.add(update.double().square())
            weight_squares.add(held.double().square())
            if moment is not None:
                should_move = has_grad | (moment != 0)
                moving.add(should_move)
                moved.add(should_move & (self._moment(p) != moment))
        ratio = math.sqrt(update_squares.total() / max(weight_squares.total(), 1e-30))
        report = {"update_survival": survived.total() / max(1, wanted.total())}
        if not math.isnan(ratio):  # what eco wants of an update is not told
            report["update_ratio"] = ratio
        if moving.total():
            report["exp_avg_sq_moved"] = moved.total() / moving.total()
        return report

    @torch.no_grad()
    def averaged(self):
        """{"ema_moved": share of the average's entries that changed, of those that differ from their weight}.
        """
        moving = self.count()
        moved = self.count()
        for name, p in self.named_params:
            old = self.shadow_before[name].to(p.device)
            new = sample_entries(self.shadow[name]).to(p.device)
            differs = self.optimizer.held(p, sample_entries) != old.float()
            moving.add(differs)
            moved.add(differs & (new != old))
        return {"ema_moved": moved.total() / max(1, moving.total())}


class _Count:
    """A sum that stays on its device until it is asked for: a GPU is waited for once, not once a tensor."""

    def __init__(self, sum_over_ranks):
        self.sum = 0
        self.sum_over_ranks = sum_over_ranks

    def add(self, entries):
        self.sum = self.sum + entries.sum()

    def total(self):
        total = self.sum_over_ranks(self.sum)
        return total.item() if torch.is_tensor(total) else total


# ---- A measured step of a run ------------------------------------------------------------------------------


def report_of_run(run):
    """The StepReport of a Precision's next step, which has seen no write yet."""
    shadow = {} if run.ema is None else run.ema.shadow
    return StepReport(run.optimizer, {}, 1.0, run.named_params, shadow, run.ranks.sum)


class Measures(Part):
    """What a measured step of a Precision tells: one more part of the run, next to the write.

    norms, nonfinite: {parameter: of its gradient, 0-dim}; writes: the StepReport. A part whose backward has
    written already puts in here what it saw.
    """

    def __init__(self, run):
        self.run = run
        self.norms, self.nonfinite = {}, {}
        self.writes = None
        for part in run.parts:
            part.measure(self)
        if self.writes is None:
            self.writes = report_of_run(run)
        self.has_written = False

    def around(self, write):
        grads, scale = write.keywords["grads"], write.keywords["grad_scale"]
        if grads:
            self.norms.update(self.run.ranks.norms_of(grads))
        for p, g in grads.items():
            self.nonfinite[p] = (~g.isfinite()).sum()
        self.writes.add(grads, scale)

        def noted():
            write()
            self.has_written = True

        return noted

    def figures(self):
        norms = [self.norms[p] for p in self.run.params if p in self.norms]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        count = self.run.ranks.sum(sum(map(int, self.nonfinite.values())))
        found = {"grad_norm": norm.item(), "nonfinite_grads": int(count)}
        if self.has_written:  # a skipped step has no updates that could survive
            found.update(self.writes.written())
        found["skipped_steps"] = 0
        for part in self.run.parts:
            found.update(part.figures())
        if self.run.ema is not None:
            self.run.ema.catch_up()
            found.update(self.writes.averaged())
        return found
