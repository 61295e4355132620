"""What a run has learnt: its weights by name, and copies of its net to generate from."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from .cast import Cast
from .copies import copied
from .errors import Refused, check_choice
from .optimizers import buckets
from .rounding import exact_weight
from .sites import SITES
from .view import View

# values of the site generation that cast the copy anew
GENERATION_BY_CAST = ("fp32", "bf16", "autocast", "fp16")


@torch.no_grad()
def weights_of(run, source: str) -> dict[str, torch.Tensor]:
    """Precision.weights."""
    if source not in ("raw", *run.averages):
        raise Refused(f"weights '{source}': this run holds {', '.join(['raw', *run.averages])}")
    trained = _last_weights(run) if source == "raw" else run.averages[source].shadow
    trained = {p: trained[name] for name, p in run.named_params}
    with ExitStack() as stack:
        for method in run.methods:
            stack.enter_context(method.plain(run.model))
        values = dict(run.model.state_dict())
        for name, p in run.model.named_parameters(remove_duplicate=False):  # tied weights have several names
            if p in trained:
                values[name] = trained[p]
    for method in run.methods:
        values = method.values(values)
    return values if run.ranks is None else run.ranks.gathered(values)


def _last_weights(run):
    """{name: fp32 tensor}: what the optimiser holds of each trained weight."""
    found = {}
    with run.optimizer.reading() as swapped:
        for name, p in run.named_params:
            held = exact_weight(buckets.local_tensor(p), run.low_part(p))
            found[name] = held.clone() if swapped else held
    return found


@torch.no_grad()
def frozen_view(run, source: str, sites: dict[str, str]) -> View | None:
    """Precision.frozen."""
    for name, value in sites.items():
        check_choice(name, value, SITES[name].values)
    r = run.recipe.replace(**sites)
    values = weights_of(run, source)
    staying = [method for method in run.methods if method.generates == r.generation]
    net = _copy_of_net(run, values, staying)
    if net is None:
        return None
    converts = r.generation in GENERATION_BY_CAST or r.quantises
    if converts:
        r = _recipe_of_cast_copy(r)
    if converts and run.ranks is None:
        run.cast.undo(net)
    if converts or run.ranks is not None:
        Cast(net, r, run.options, frozen=False)
    for name, p in net.named_parameters():
        if name in values:
            p.copy_(values[name])
    view = View(net, r, staying, run.view_of_model.keep)
    for method in run.methods:
        method.freeze(view, r.generation)
    return view


def _copy_of_net(run, values, staying):
    """A copy of the net with the `staying` methods alone, on the first rank; None on others."""
    with ExitStack() as stack:
        for method in run.methods:
            if method not in staying:
                stack.enter_context(method.plain(run.model))
        if run.ranks is None:
            return copied(run.model).requires_grad_(False).eval()
        net = run.ranks.copy(run.blank, values)
        return None if net is None else net.requires_grad_(False).eval()


def _recipe_of_cast_copy(r):
    """The recipe of a copy that is brought to the dtype of r.generation."""
    weights = "bf16" if r.generation == "bf16" else "fp32"
    compute = r.generation if r.generation in ("fp32", "fp16") else "bf16"
    return r.replace(weights=weights, grads=weights, compute=compute, islands="none")
