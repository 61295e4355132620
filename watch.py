"""What rounding does to a training step: for the telemetry of a run, and for the doctor. Needs torch alone.

    report = StepReport(optimizer, grads, scale, named_params, shadow)
    optimizer.step(grads=grads, grad_scale=scale)
    print(report.written())                     # {'update_survival': 0.53, 'update_ratio': 0.0021, ...}
    average.update()
    print(report.averaged())                    # {'ema_moved': 1.0}

An optimiser computes in fp32 and writes into fewer bits. What fp32 wanted is compared with what was written:
`StepReport` counts entries, `Tally` adds up movement. Both ask an optimiser three of its five questions (see
optim.Rounded) and know no optimiser by name:

    held(p, pick)           the fp32 value that it holds for parameter p
    moment(p, name, pick)   a moment in fp32 or bf16, decoded where it is codes; None where there is none
    wanted(p, g, pick)      the fp32 update that it wants before any rounding; None where it can't tell

`pick` is a function tensor -> flat sample. It is applied to every tensor that an answer is made of, so that
an answer about 4 billion entries costs what one about 65,536 does.
"""

import math

import torch

# ---- Samples -----------------------------------------------------------------------------------------------


def sample(t, most=1 << 16):
    """Flat entries of tensor `t`, evenly spread: about `most` of a large one, all of one below 2 * `most`.

    The stride shares no factor with the number of entries, and so none with the length of a row: entries come
    from every column alike. A stride of 256 would see 16 of the 4,096 columns of a 4096 x 4096 weight.
    Returns a view where `t` is contiguous.
    """
    flat = t.detach().reshape(-1)  # [...] -> [entries]
    stride = max(1, flat.numel() // most)
    while math.gcd(stride, flat.numel()) > 1:
        stride += 1
    return flat[::stride]


def stays(stored, target):
    """Whether fp32 `target`, rounded to nearest in the dtype of `stored`, is `stored` again. Both [n]."""
    return target.to(stored.dtype) == stored


# ---- One step, counted -------------------------------------------------------------------------------------


class StepReport:
    """Counts which entries of weights, moments and average a step changed, of those that it should change.

    Make it before the optimiser's step, ask `written` after that step, and `averaged` after the average's.
    grads: {parameter: gradient}. scale: float or 0-dim tensor that the step multiplies gradients by.
    named_params: [(name, parameter)]. shadow: {name: tensor of the average}.
    """

    def __init__(self, optimizer, grads, scale, named_params, shadow):
        self.optimizer, self.named_params, self.shadow = optimizer, named_params, shadow
        self.before = {p: self._before(p, sample(g), scale) for p, g in grads.items()}
        self.shadow_before = {name: sample(t).clone() for name, t in shadow.items()}

    def _before(self, p, g, scale):
        # cloned: an answer may be a view of what the step is about to overwrite
        held = self.optimizer.held(p, sample).clone()
        moment = self._moment(p)
        if moment is not None:
            moment = moment.clone()
        return g != 0, held, self.optimizer.wanted(p, g.float() * scale, sample), moment

    def _moment(self, p):
        return self.optimizer.moment(p, "exp_avg_sq", sample)

    @torch.no_grad()
    def written(self):
        """What the optimiser's step wrote:

        update_survival   share of the non-zero updates of weights that changed the value held
        update_ratio      norm of the update that was wanted over the norm of the weights
        exp_avg_sq_moved  share of the entries of the second moment that changed, of those that should; left
                          out where the optimiser keeps none
        """
        wanted, survived = _Count(), _Count()
        moving, moved = _Count(), _Count()
        update_squares, weight_squares = _Count(), _Count()
        for p, (has_grad, held, update, moment) in self.before.items():
            after = self.optimizer.held(p, sample)
            if update is None:  # nobody can tell what was wanted: take what was done
                want, update = has_grad, after - held
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
        report = {"update_survival": survived.total() / max(1, wanted.total()), "update_ratio": ratio}
        if moving.total():
            report["exp_avg_sq_moved"] = moved.total() / moving.total()
        return report

    @torch.no_grad()
    def averaged(self):
        """{"ema_moved": share of the average's entries that changed, of those that differ from their weight}.
        """
        moving, moved = _Count(), _Count()
        for name, p in self.named_params:
            old = self.shadow_before[name]
            differs = self.optimizer.held(p, sample) != old.float()
            moving.add(differs)
            moved.add(differs & (sample(self.shadow[name]) != old))
        return {"ema_moved": moved.total() / max(1, moving.total())}


class _Count:
    """A sum that stays on its device until it is asked for: a GPU is waited for once, not once a tensor."""

    def __init__(self):
        self.sum = 0

    def add(self, entries):
        self.sum = self.sum + entries.sum()

    def total(self):
        return self.sum.item() if torch.is_tensor(self.sum) else self.sum


# ---- Many steps, added up ----------------------------------------------------------------------------------


class Tally:
    """Of the entries of a site: the movement wanted, and what was written of that part of it which rounding
    to nearest would lose.

    A write is judged by sums, not entry by entry: stochastic rounding leaves most entries where they are and
    is right on average.
    """

    def __init__(self):
        self.wanted = self.threatened = self.written = self.error = 0.0
        self.entries = self.threatened_entries = 0

    def add(self, stays, old, target, new, among=True, scale=1.0):
        """Add one write of [n] entries.

        stays: whether rounding the target to nearest may lose the move. old, target, new: fp32 values held
        before, wanted, and held after. among: the entries that count. scale: what a movement is measured in.
        """
        step, moved = (target - old) / scale, (new - old) / scale
        among = among & (step != 0) & step.isfinite() & moved.isfinite()
        threatened = among & stays
        self.entries += int(among.sum())
        self.threatened_entries += int(threatened.sum())
        self.wanted += float(step[among].double().abs().sum())
        step, moved = step[threatened].double(), moved[threatened].double()
        self.threatened += float(step.abs().sum())
        self.written += float((moved * step.sign()).sum())
        self.error += float((moved - step).square().sum())

    @property
    def lost(self):
        """Share of the wanted movement that was lost for sure: less 3 standard errors of what noise leaves
        uncertain.
        """
        noise = 3 * math.sqrt(self.error)
        return max(0.0, self.threatened - self.written - noise) / max(self.wanted, 1e-300)

    @property
    def stuck(self):
        """Share of the entries whose wanted step is under half an ulp."""
        return self.threatened_entries / max(1, self.entries)

    @property
    def kept(self):
        """Share of those steps, by size, that was written all the same."""
        return self.written / max(self.threatened, 1e-300)


class Writes:
    """What the writes of several steps lost: Tallies of weights, of second moments and of each average.

    optimizer: answers `decay` and `coded` too (see optim.Rounded). averages: {name: optim.EMA}. `before` is a
    pre-step hook of torch optimisers; call `after` once the averages have been updated.
    """

    def __init__(self, optimizer, named_params, averages):
        self.optimizer, self.named_params, self.ema = optimizer, named_params, averages
        self.weights, self.moments = Tally(), Tally()
        self.averages = {name: Tally() for name in averages}
        self.squares = {}  # parameter -> squares of its gradients, one sample a step
        self.rows, self.shadows = [], {}

    @torch.no_grad()
    def before(self, optimizer, args, kwargs):
        """Look at what a step with these arguments is about to write."""
        grads = kwargs.get("grads")
        scale = kwargs.get("grad_scale", 1.0)
        self.rows = []
        for _, p in self.named_params:
            g = p.grad if grads is None else grads.get(p)
            if g is not None:
                self.rows.append((p, *self._before(p, sample(g).float() * scale)))
        for name, average in self.ema.items():
            self.shadows[name] = {key: sample(t).clone() for key, t in average.shadow.items()}

    def _before(self, p, g):
        stored, held = sample(p).clone(), self.optimizer.held(p, sample).clone()
        update, moment = self.optimizer.wanted(p, g, sample), None
        v = self.optimizer.moment(p, "exp_avg_sq", sample)
        if v is not None:
            beta, _ = self.optimizer.decay(p, "exp_avg_sq")
            v = v.clone()
            moment = v, beta * v.float() + (1 - beta) * g * g
        return g, stored, held, update, moment

    @torch.no_grad()
    def after(self):
        """Compare it with what was written."""
        for p, g, stored, held, update, moment in self.rows:
            if update is not None:
                target = held + update
                self.weights.add(stays(stored, target), held, target, self.optimizer.held(p, sample))
            if moment is not None:
                self._add_moment(p, *moment)
                self.squares.setdefault(p, []).append(g.double().square())
        for name, of_average in self.shadows.items():
            for key, p in self.named_params:
                self._add_average(name, of_average[key], self.optimizer.held(p, sample), key)
        self.rows, self.shadows = [], {}

    def _add_moment(self, p, v, target):
        # of codes all may stay: with its block's scale a code moves although it stays the same
        may_stay = torch.ones_like(v, dtype=torch.bool)
        if not self.optimizer.coded(p, "exp_avg_sq"):
            may_stay = stays(v, target)
        old, new = v.float(), self.optimizer.moment(p, "exp_avg_sq", sample).float()
        shrinks = (target < old) & (old > 1e-30)
        self.moments.add(may_stay, old, target, new, among=shrinks, scale=old.clamp_min(1e-30))

    def _add_average(self, name, stored, held, key):
        average, old = self.ema[name], stored.float()
        gap = held - old
        # within 2 ulp the average is as near its weight as its format lets it be
        far = gap.abs() > 2 * torch.finfo(stored.dtype).eps * old.abs()
        target = old + (1 - average.decay) * gap
        new = sample(average.shadow[key]).float()
        self.averages[name].add(stays(stored, target), old, target, new, among=far)

    def excess(self):
        """The second moments over the mean of g^2: 1 when they are right, None where there are none.

        It is the geometric mean of the tensors' ratios, weighted by size: single entries are too noisy.
        """
        logs, entries = 0.0, 0
        for p, squares in self.squares.items():
            beta, t = self.optimizer.decay(p, "exp_avg_sq")
            v = float(self.optimizer.moment(p, "exp_avg_sq", sample).double().mean()) / (1 - beta**t)
            g = float(torch.stack(squares).mean())
            if v > 0 and g > 0:
                logs += p.numel() * math.log(v / g)
                entries += p.numel()
        return math.exp(logs / entries) if entries else None
