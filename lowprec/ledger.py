"""What precision every tensor of a run has, what it costs, and why: a printable table with a row a site.

    print(run.ledger())                             # site, value, bytes a parameter as allocated, why
    run.ledger().json()                             # the same for a program: ledger.json in a run's folder
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recipes import MOMENTS
from .sites import Site

MIB = 2**20


class Ledger:
    """rows: dicts of site, value, bytes (a parameter, or None) and why; a method's row may have `layers` and
    `lines`.

    parameters: how many are trained. details: {name: what a method covers}, with str(), json() and share, the
    share of the FLOPs. away: (bytes a parameter that are in the memory of the CPU, bytes of them that are on
    the GPU at once within a step), or None. state_bytes: of weights, gradients and optimiser, a parameter.
    """

    STATE = ("weights", "grads", "accumulate", "master", "kahan", *MOMENTS)

    def __init__(
        self,
        rows: list[dict[str, Any]],
        parameters: int,
        details: Mapping[str, Any] | None = None,
        away: tuple[float, int] | None = None,
    ):
        self.rows = rows
        self.parameters = parameters
        self.details = dict(details or {})
        self.away = away
        self.state_bytes = sum(row["bytes"] for row in rows if row["site"] in self.STATE)

    @property
    def flops_share(self) -> dict[str, float]:
        """{name of a method: share of the FLOPs that it covers}, where known."""
        shares = {}
        for row in self.rows:
            if "layers" in row:
                shares[row["site"]] = sum(layer["flops"] or 0 for layer in row["layers"])
        for name, detail in self.details.items():
            if detail.share is None:
                shares.pop(name, None)
            else:
                shares[name] = detail.share
        return shares

    def json(self) -> dict[str, Any]:
        """Plain values for a program: what str() says, and the layers of each method."""
        sites = []
        for row in self.rows:
            site = dict(row)
            site.pop("lines", None)
            sites.append(site)
        found = {
            "parameters": self.parameters,
            "bytes_per_parameter": self.state_bytes,
            "sites": sites,
            "flops_share": self.flops_share,
        }
        if self.away:
            found["bytes_per_parameter_on_cpu"], found["bytes_within_a_step"] = self.away
        for name, detail in self.details.items():
            found[name] = detail.json()
        return found

    def __str__(self) -> str:
        width = 11
        for row in self.rows:
            width = max(width, len(row["site"]))
        lines = [f"{'site':<{width}} {'value':<11} {'bytes/param':>11}  why"]
        for row in self.rows:
            size = "" if row["bytes"] is None else f"{row['bytes']:.2f}"
            lines.append(f"{row['site']:<{width}} {row['value']:<11} {size:>11}  {row['why']}".rstrip())
            lines += row.get("lines", [])
        lines.append(f"{self.parameters:,} parameters; {self._state()}")
        lines += map(str, self.details.values())
        return "\n".join(lines)

    def _state(self):
        """The sum of weights, gradients and optimiser, in words."""
        total = f"{self.parameters * self.state_bytes / MIB:.1f} MiB; fp32: 16"
        state = f"weights + gradients + optimiser: {self.state_bytes:.2f} bytes a parameter ({total})"
        if not self.away:
            return state
        on_cpu, at_once = self.away
        return (
            f"{state}; {on_cpu:.2f} of them in the memory of the CPU, "
            f"at most {at_once / MIB:.1f} MiB at once on the GPU within a step"
        )


# ---- The rows of a run -------------------------------------------------------------------------------------


def of_run(run, sites: Mapping[str, Site]) -> Ledger:
    """The Ledger of a `Precision`; sites: {name: Site}, in the order of the rows."""
    parameters = sum(p.numel() for p in run.params)
    example = run.view_of_model.example
    if example is not None:
        args, kwargs = run.view_of_model.cast(run.view_of_model.arguments, *example)
        for part in run.parts:
            part.count_flops(run.model, args, kwargs)
    remarks = _remarks(run, parameters)
    details = {}
    on_cpu = at_once = 0
    for part in run.parts:
        for site, row in part.rows(parameters, run.recipe.generation_dtype).items():
            remarks.setdefault(site, {}).update(row)
        details.update(part.details())
        moments, rooms = part.elsewhere()
        on_cpu += moments
        at_once += rooms
    rows = _site_rows(run, sites, parameters, remarks)
    for site, row in remarks.items():
        if site not in run.recipe.sites:  # what a part has beside the recipe
            rows.append({"site": site, **row})
    return Ledger(rows, parameters, details, (on_cpu / parameters, at_once) if on_cpu else None)


def _site_rows(run, sites, parameters, remarks):
    """A row for each site. remarks: {site: what its row says in place of the site's own}."""
    sizes = _bytes_of_sites(run, parameters)
    notes = run.optimizer.notes()
    held_by_optimizer = run.optimizer.nbytes()
    rows = []
    for site, spec in sites.items():
        if site == "frozen" and all(p.requires_grad for p in run.model.parameters()):
            continue
        value = run.recipe[site]
        why = spec.why.get(value, "") + notes.get(site, "")
        row = {"site": site, "value": value, "bytes": sizes.get(site), "why": why}
        row.update(remarks.get(site, {}))
        if not run.optimizer.by_recipe and site in ("update", "exp_avg", "exp_avg_sq", "kahan"):
            row.update(_of_a_peer(run, site, value))
        elif site in MOMENTS and site not in held_by_optimizer:
            row["why"] = f"{run.optimizer_name} keeps none"
        rows.append(row)
    return rows


def _of_a_peer(run, site, value):
    """{value, why} of a site that other people's optimiser writes in its own way."""
    writes = getattr(run.optimizer, "writes", {})
    value = writes.get(site, value)
    why = f"as {run.optimizer_name} does it"
    if site in MOMENTS and writes and value != "fp32":
        how = "to nearest" if writes["moments"] == "nearest" else "stochastically"
        why = f"written {how}, {why}"
    return {"value": value, "why": why}


def _bytes_of_sites(run, parameters):
    """{site: bytes a parameter}, as allocated; of a net that is spread over ranks all of them together."""
    sizes = {}
    for site in Ledger.STATE:
        if site in run.recipe.values:
            sizes[site] = 0.0
    for site, size in run.optimizer.nbytes().items():
        sizes[site] = size / parameters
    weights = sum(p.nbytes for p in run.params)
    averages = bytes_of_an_average(run) * sum(p.numel() for p in run.params)
    sizes["weights"] = sizes["grads"] = weights / parameters
    sizes["ema"] = averages / parameters
    return sizes


def bytes_of_an_average(run):
    """Bytes that all averages together hold of one value."""
    return sum(average.dtype.itemsize for average in run.averages.values())


def _remarks(run, parameters):
    """{site: {what its row says in place of the site's own value and reason}}, of what the net is."""
    found = {"frozen": _of_frozen(run)}
    loss = run.view_of_model.first_call.loss
    if loss:
        found["loss"] = {"value": "bf16", "why": f"the net computes {loss} in bf16: see fp32_outputs"}
    if run.ema is None:
        found["ema"] = {"why": "none is kept (ema_decay=None)"}
    elif run.ema.note:
        found["ema"] = {"why": run.ema.note}
    if run.recipe.islands != "none":
        exact = sum(p.numel() for p in run.params if p.dtype.itemsize == 4)
        found["islands"] = {"why": f"{exact:,} of {parameters:,} parameters stay fp32"}
    buffers = _of_buffers(run)
    if buffers:
        found["buffers"] = {"why": buffers}
    r = run.recipe
    if r.update == "nearest" and r.low_weights and r.way.name is not None:
        found["update"] = {"why": "what a write to bf16 rounds away is kept beside it: no update is lost"}
    writes_bf16 = r.low_weights
    for name in r.moments:
        if r[name] == "bf16":
            writes_bf16 = True
    if r.update == "nearest" and not writes_bf16:
        lost = "changes of a moment under half a gap between codes are lost" if r.coded else ""
        found["update"] = {"why": lost}
    return found


def _of_frozen(run):
    """{value, why} of the frozen weights, which are no part of the bytes a trained parameter."""
    count = 0
    sizes: dict[str, int] = {}
    for p in run.model.parameters():
        if not p.requires_grad:
            dtype = str(p.dtype).removeprefix("torch.")
            dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
            count += p.numel()
            sizes[dtype] = sizes.get(dtype, 0) + p.nbytes
    why = f"{count:,} weights that are not trained take {sum(sizes.values()) / MIB:.1f} MiB"
    if len(sizes) > 1:
        parts = [f"{size / MIB:.2f} in {dtype}" for dtype, size in sorted(sizes.items())]
        why += f", {' and '.join(parts)}"
    codes = any(p.itemsize == 1 for p in run.model.parameters())  # which no site casts
    if not codes and "fp32" in sizes and run.recipe.low_weights and run.recipe.frozen == "kept":
        why += ", as the net came; sites=['frozen=cast'] casts them"
    return {"value": " and ".join(sorted(sizes)), "why": why}


def _of_buffers(run):
    """What is special about the buffers of this net, or None."""
    buffers = [b for b in run.model.buffers() if b.is_floating_point()]
    if not buffers:
        return "this net has none"
    if not run.cast.whole:
        return None
    values = sum(b.numel() for b in buffers)
    weights = 0
    for module in run.cast.whole:
        for p in module.parameters(recurse=False):
            weights += p.numel()
    return (
        f"{values:,} values; {len(run.cast.whole)} norm layers with running statistics keep "
        f"{weights:,} weights in fp32"
    )
