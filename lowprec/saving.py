"""The state of a run, for a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from .errors import Refused


def state_of(run, trainable_only: bool) -> dict[str, Any]:
    """Precision.state_dict."""
    weights = run.model.state_dict()
    if trainable_only:
        trained = set(run.params)  # also those that were frozen since: they have moments and an average
        own = {name for name, p in run.model.named_parameters(remove_duplicate=False) if p in trained}
        own.update(name for name, _ in run.model.named_buffers(remove_duplicate=False))
        weights = {name: t for name, t in weights.items() if name in own}
    state = {
        "model": weights,
        "optimizer": run.optimizer.state_dict(),
        "averages": {name: average.state_dict() for name, average in run.averages.items()},
        "scaler": run.scaler.state_dict(),
        "skipped": run.skipped,
    }
    if trainable_only:
        state["trainable_only"] = True
    for method in run.methods:
        if method.key:
            state[method.key] = method.state_dict()
    return state if run.ranks is None else run.ranks.wrapped(state, run.averages)


def load_state(run, state: dict[str, Any]) -> None:
    """Precision.load_state_dict."""
    for name in run.averages:
        if name not in state["averages"]:
            raise Refused(f"the checkpoint has no average '{name}', and this run keeps one: it is another's")
    if run.ranks is not None:
        state = run.ranks.cut(state, run.state_dict(bool(state.get("trainable_only"))))
    weights = state["model"]
    held = run.model.state_dict()
    for method in run.methods:
        weights = method.adapt(held, weights)
    weights = _without_quantised(run, weights, held)
    if state.get("trainable_only"):
        missing = [name for name, _ in run.named_params if name not in weights]
        if missing:
            raise Refused(f"the checkpoint lacks the trained weight {missing[0]}: it is another net's")
        weights = {**held, **weights}
    run.optimizer.load_state_dict(state["optimizer"])  # which refuses the state of another recipe
    run.model.load_state_dict(weights)
    for method in run.methods:
        method.load_state_dict(state.get(method.key), run.low_part)
    for name, average in run.averages.items():
        average.load_state_dict(state["averages"][name])
    if run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    run.skipped = state["skipped"]


def _without_quantised(run, weights, held):
    """`weights` without what a quantised base (bitsandbytes' 4 bits) has beside its codes: it writes that
    into a state_dict and does not read it from one. Raises Refused where that base is not the one held.
    """
    beside = set()
    for name, p in run.model.named_parameters():
        if p.requires_grad or not hasattr(p, "quant_state"):
            continue
        of_codes = {key for key in held if key.startswith(f"{name}.")}
        for key in {name, *of_codes} & weights.keys():
            if not torch.equal(weights[key], held[key]):
                raise Refused(f"{key}: the quantised base is not the checkpoint's; build that one first")
        beside |= of_codes
    return {key: value for key, value in weights.items() if key not in beside}
