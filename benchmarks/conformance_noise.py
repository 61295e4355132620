"""Checks of conformance: is rounding independent between tensors, steps, seeds, and across a resume?

Errors that are alike add up where they should cancel. The figure of each is the largest correlation.
"""

import itertools

import torch

from benchmarks.conformance import (
    NOT_ELEMENTWISE,
    chequered,
    continued,
    differing,
    judged,
    not_claimed,
    nothing,
    through_a_file,
    unequal,
    weights_and_states,
    whole_tensors,
)
from benchmarks.subjects import GRADIENT, ULP, drawn, feed, full, in_fp64

# a step whose multiples come to no tie in eight steps: there a last bit would decide, and Kahan's sums would
# look noisy
NOISY_WRITE = 0.29 * ULP
SHARED_CORRELATION = 0.2  # correlation from which noise is called shared, where it is beyond chance too


def noise(optimizer, p):
    """{name: fp64 [n]} of what ought to be equal but for noise.

    Weights and states of entries whose inputs are alike (those with the lower gradient). Packed codes are
    taken byte by byte.
    """
    found = {"weight": in_fp64(p).flatten()[1::2]}
    for where, t in whole_tensors(optimizer.state.get(p, {})):
        if t.numel() == p.numel():
            found[where] = in_fp64(t).flatten()[1::2]
        elif 2 * t.numel() == p.numel() and t.dtype == torch.uint8:
            found[where] = in_fp64(t).flatten()
    return {name: t for name, t in found.items() if t.std() > 0}


def correlation(a, b):
    a = a - a.mean()
    b = b - b.mean()
    return (a @ b / (a.norm() * b.norm())).item()


def worst_of(pairs):
    """(largest correlation of [(a, b)], 6 standard errors of chance), (None, None) without any noise."""
    found = []
    for a, b in pairs:
        if a.std() > 0 and b.std() > 0:
            found.append((correlation(a, b), 6 / len(a) ** 0.5))
    return max(found, default=(None, None))


def judged_noise(subject, pairs, said):
    """The Result of a check that noise is independent.

    Where an entry's step depends on others, alike entries get steps that differ, by the noise of the moments,
    which lasts: that is not what is asked.
    """
    value, chance = worst_of(pairs)
    if value is None:
        return nothing("no noise")
    is_independent = value < max(SHARED_CORRELATION, chance)
    if not is_independent and not subject.elementwise:
        return not_claimed(NOT_ELEMENTWISE, correlation=value)
    return judged(is_independent, f"{value:+.3f}", f"{said} ({value:+.2f})", correlation=value)


def between_tensors(subject, size):
    """Do the tensors of one step round independently? Three alike, whose weights and states are compared.

    Noise from one seed a step for all tensors, or from one draw that is used again, errs the same way
    everywhere.
    """
    grads = chequered(128)
    with drawn(3):
        params, optimizer = subject.start([full(128)] * 3, NOISY_WRITE / subject.unit(128))
        for _ in range(2):
            feed(params, optimizer, [grads] * 3)
    pairs = []
    for p, q in itertools.combinations(params, 2):
        pairs += of_equal_names(noise(optimizer, p), noise(optimizer, q))
    return judged_noise(subject, pairs, "tensors of one step share their noise")


def of_equal_names(a, b):
    """[(noise, noise)] of what both have."""
    return [(a[name], b[name]) for name in a if name in b]


def increments(params, optimizer, steps):
    """[fp64 [n]]: by how much each of `steps` steps under equal gradients changed the first parameter."""
    found = []
    before = in_fp64(params[0]).flatten()
    for _ in range(steps):
        feed(params, optimizer, [torch.full_like(params[0], GRADIENT)])
        after = in_fp64(params[0]).flatten()
        found.append(after - before)
        before = after
    return found


def between_steps(subject, size):
    """Do the steps round independently? Writes of equal steps, eight in a row.

    Noise that is keyed by the place alone gives each entry the same luck at every step: most never move.
    """
    with drawn(4):
        params, optimizer = subject.start([full(128)], NOISY_WRITE / subject.unit(128))
        found = increments(params, optimizer, 8)
    return judged_noise(subject, itertools.combinations(found, 2), "noise repeats from step to step")


def between_seeds(subject, size):
    """Do ranks or runs of other seeds round independently, and those of one seed alike?

    Where the class takes a `seed`, that; else torch's global generator. Replicas must agree bit for bit, else
    their weights drift apart; runs of several seeds must not, else they are no sample.
    """
    takes_seed = "seed" in subject.takes

    def run(seed):
        options = {"seed": seed} if takes_seed else {}
        with drawn(100 if takes_seed else seed):
            params, optimizer = subject.start([full(128)], NOISY_WRITE / subject.unit(128), **options)
            for _ in range(2):
                feed(params, optimizer, [chequered(128)])
        return noise(optimizer, params[0]), weights_and_states(optimizer, params)

    first_noise, first_bits = run(0)
    other_noise, _ = run(1)
    _, again_bits = run(0)
    differ = unequal(first_bits, again_bits)
    if differ:
        said = f"two runs of one seed differ in {differ:.1%} of all values"
        return judged(False, differing(differ), said, differ=differ)
    pairs = of_equal_names(first_noise, other_noise)
    result = judged_noise(subject, pairs, "runs of other seeds share their noise")
    result.figures["by"] = "seed" if takes_seed else "torch's generator"
    return result


def after_a_resume(subject, size):
    """Does noise go on after a resume, or begin again? Four steps, a new object with the state, four more.

    A generator that the class makes itself, and does not save, draws the first steps' noise again. `anew` is
    the same where the program seeds torch's generator at each start, as scripts do: noise of the global
    generator repeats then, which is the script's to prevent.
    """
    lr = NOISY_WRITE / subject.unit(128)
    with drawn(5):
        params, optimizer = subject.start([full(128)], lr)
        first = increments(params, optimizer, 4)
        params, again = continued(subject, params, optimizer, lr)
        state = through_a_file(again.state_dict())
        at = params[0].detach().clone()
    with drawn(6):
        second = increments(params, again, 4)
    with drawn(5):
        with torch.no_grad():
            params[0].copy_(at)
        fresh = subject.over(params, lr)
        fresh.load_state_dict(state)
        anew, _ = worst_of(itertools.product(first, increments(params, fresh, 4)))
    result = judged_noise(subject, itertools.product(first, second), "noise begins again after a resume")
    result.figures["anew"] = anew
    if anew is not None and anew > SHARED_CORRELATION and result.verdict == "holds":
        result.said = f"its noise repeats ({anew:+.2f}) where a script seeds torch's generator at each start"
    return result
