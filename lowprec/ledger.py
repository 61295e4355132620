"""What precision every tensor of a run has, what it costs, and why: a printable table with a row a site.

    print(run.ledger())                             # site, value, bytes a parameter as allocated, why
    run.ledger().json()                             # the same for a program: ledger.json in a run's folder
    of_a_rank(run, blocks)                          # what each of 1, 8 and 64 ranks would hold, in a line
"""

from .optimizers import offload
from .optimizers.average import OnCPU
from .recipes import MOMENTS


class Ledger:
    """rows: dicts of site, value, bytes (a parameter, or None) and why; a method's row may have `layers` and
    `lines`.

    parameters: how many are trained. details: {name: what a method covers}, with str(), json() and share, the
    share of the FLOPs. away: (bytes a parameter that are in the memory of the CPU, bytes of them that are on
    the GPU at once within a step), or None.
    """

    STATE = ("weights", "grads", "accumulate", "master", "kahan", *MOMENTS)

    def __init__(self, rows, parameters, details=None, away=None):
        self.rows, self.parameters, self.details, self.away = rows, parameters, details or {}, away
        self.state_bytes = sum(row["bytes"] for row in rows if row["site"] in self.STATE)

    @property
    def flops_share(self):
        """{name of a method: share of the FLOPs that it covers}, where known."""
        shares = {}
        for row in self.rows:
            if "layers" in row:
                shares[row["site"]] = sum(layer["flops"] or 0 for layer in row["layers"])
        shares.update((name, detail.share) for name, detail in self.details.items())
        return {name: share for name, share in shares.items() if share is not None}

    def json(self):
        rows = [{key: value for key, value in row.items() if key != "lines"} for row in self.rows]
        whole = {"parameters": self.parameters, "bytes_per_parameter": self.state_bytes, "sites": rows}
        whole["flops_share"] = self.flops_share
        if self.away:
            whole["bytes_per_parameter_on_cpu"], whole["bytes_within_a_step"] = self.away
        return {**whole, **{name: detail.json() for name, detail in self.details.items()}}

    def __str__(self):
        width = max(11, *(len(row["site"]) for row in self.rows))
        lines = [f"{'site':<{width}} {'value':<11} {'bytes/param':>11}  why"]
        for row in self.rows:
            size = "" if row["bytes"] is None else f"{row['bytes']:.2f}"
            lines.append(f"{row['site']:<{width}} {row['value']:<11} {size:>11}  {row['why']}".rstrip())
            lines += row.get("lines", [])
        total = f"{self.parameters * self.state_bytes / 2**20:.1f} MiB; fp32: 16"
        state = f"weights + gradients + optimiser: {self.state_bytes:.2f} bytes a parameter ({total})"
        if self.away:
            once = f"at most {self.away[1] / 2**20:.1f} MiB at once on the GPU within a step"
            state += f"; {self.away[0]:.2f} of them in the memory of the CPU, {once}"
        lines.append(f"{self.parameters:,} parameters; {state}")
        return "\n".join([*lines, *map(str, self.details.values())])


def of(run, sites):
    """The Ledger of a `Precision`; sites: {name: Site}, in the order of the rows."""
    r, n = run.recipe, sum(p.numel() for p in run.params)
    if run.example is not None:
        args, kwargs = run.view_of_model.cast(*run.example)
        for method in run.methods:
            method.count_flops(run.model, args, kwargs)
    sizes, kept = _sizes(run, n), run.optimizer.nbytes()
    notes, told = run.optimizer.notes(), _told(run, n)
    for method in run.methods:
        for site, row in method.rows(n, r.generation_dtype).items():
            told.setdefault(site, {}).update(row)
    rows = []
    for site, spec in sites.items():
        value = r[site]
        row = dict(site=site, value=value, bytes=sizes.get(site), why=spec.why.get(value, ""))
        row["why"] += notes.get(site, "")
        row.update(told.get(site, {}))
        if not run.optimizer.by_recipe and site in ("update", "exp_avg", "exp_avg_sq", "kahan"):
            row.update(_of_a_peer(run, site, value))
        elif site in MOMENTS and site not in kept:
            row["why"] = f"{run.optimizer_name} keeps none"
        rows.append(row)
    if run.kept:
        largest = max(run.kept.bytes, key=run.kept.bytes.get, default="")
        rows.append(dict(site="activations", value=largest, bytes=run.kept.total / n, why=str(run.kept)))
    details = {}
    for method in run.methods:
        details.update(method.details())
    if run.away is None:
        return Ledger(rows, n, details)
    kept, once = offload.sizes(run.optimizer)
    return Ledger(rows, n, details, (kept / n, once))


def _of_a_peer(run, site, value):
    writes, own = getattr(run.optimizer, "writes", {}), f"as {run.optimizer_name} does it"
    if site in MOMENTS and writes and value != "fp32":
        own = f"written {'to nearest' if writes['moments'] == 'nearest' else 'stochastically'}, {own}"
    return {"value": writes.get(site, value), "why": own}


def _sizes(run, n):
    """{site: bytes a parameter}, as allocated."""
    weights = sum(p.nbytes for p in run.params)
    # of a net that is spread over ranks all of them together
    one = sum(average.dtype.itemsize for average in run.averages.values())
    averages = one * sum(p.numel() for p in run.ema.params)
    sizes = dict.fromkeys([site for site in Ledger.STATE if site in run.recipe.values], 0.0)
    sizes.update((site, size / n) for site, size in run.optimizer.nbytes().items())
    sizes.update(weights=weights / n, grads=weights / n, ema=averages / n)
    sizes["accumulate"] = 4.0 if run.keeps_sums else 0.0
    if run.release is not None:
        sizes["grads"] = sizes["accumulate"] = 0.0
    return sizes


def _told(run, n):
    """{site: what its row says beyond the site's own reason}."""
    r, told = run.recipe, {}
    if run.ranks is not None:
        rows = f"rows over {run.ranks.count} ranks"
        told["weights"] = {"why": f"in {rows}, as are gradients, states and averages"}
    if run.release is not None:
        most = max(p.numel() * (4 if run.keeps_sums else p.element_size()) for p in run.params)
        once = f"of one tensor at a time, at most {most / 2**20:.2f} MiB"
        told["grads"] = {"why": f"freed within backward, where each is used (--grad_release): {once}"}
    if isinstance(run.ema, OnCPU):
        told["ema"] = {"why": "in the memory of the CPU (--average_on cpu)"}
    fp32 = sum(p.numel() for p in run.params if p.dtype.itemsize == 4) if r.low_weights else 0
    if r.islands != "none":
        told["islands"] = {"why": f"{fp32:,} of {n:,} parameters stay fp32"}
    buffers = [b for b in run.model.buffers() if b.is_floating_point()]
    if not buffers:
        told["buffers"] = {"why": "this net has none"}
    elif run.cast.whole:
        whole = sum(p.numel() for m in run.cast.whole for p in m.parameters(recurse=False))
        layers = f"{len(run.cast.whole)} norm layers with running statistics keep {whole:,} weights in fp32"
        told["buffers"] = {"why": f"{sum(b.numel() for b in buffers):,} values; {layers}"}
    written_low = "bf16" in [r.weights, *(r[name] for name in r.moments)]
    if r.update == "nearest" and not written_low:
        lost = "changes of a moment under half a gap between codes are lost"
        told["update"] = {"why": lost if r.coded else ""}
    return told


# ---- A rank of several -------------------------------------------------------------------------------------

WORLDS = (1, 8, 64)  # numbers of ranks that are told where none is given


def held(run, world):
    """Bytes that the first of `world` ranks holds of a Precision that is not spread and may be on the meta
    device. Its rows are the most: of weights, gradients, their sums, states and averages.
    """
    total, average = 0.0, sum(average.dtype.itemsize for average in run.averages.values())
    for p in run.params:
        rows = p.shape[0] if p.dim() else 1
        share = -(-rows // world) / max(1, rows)
        states = sum(t.nbytes for name, t in run.optimizer.state[p].items() if name != "step")
        sums = 4 if run.keeps_sums and p.dtype.itemsize < 4 else 0
        total += share * (2 * p.nbytes + states + (average + sums) * p.numel())
    return total


def gathered(run, parts):
    """Bytes that a rank has whole at once, at most: the weights and gradients of a block, the weights of the
    next one, which are fetched ahead, and those in no block. parts: the blocks.
    """
    compute = 2 if run.recipe.compute in ("bf16", "fp16") else 4
    sizes = [sum(p.numel() for p in block.parameters()) for block in parts]
    rest = sum(p.numel() for p in run.params) - sum(sizes)
    return compute * (3 * max(sizes, default=0) + rest)


def of_a_rank(run, parts, worlds=WORLDS):
    """The two of these in a line, for each number of ranks."""
    sizes = ", ".join(f"{held(run, world) / 2**20:.1f} MiB as one of {world}" for world in worlds)
    once = f"and for a moment {gathered(run, parts) / 2**20:.1f} MiB of whole blocks"
    return f"a rank holds, of weights, gradients, states and averages: {sizes}; {once}"
