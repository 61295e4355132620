"""What an optimiser of low precision must keep to: each check a function that steps it and returns figures.

    subject = Subject("mine", lambda params, **options: Mine(params, **options), takes={"lr"})
    print(writes(subject, 1 / 3, SIZE).shown)       # +0.0002 ±0.0006: mean error of a write, in ulps

Nothing is known of the optimiser but torch's protocol: parameters with gradients, step, state, state_dict.
What it wants to write is what the same class does to fp32 weights. A class that takes bf16 alone is asked on
weights of zero, where a write rounds to one part in 512 of the step itself. Tensors have equal entries and
equal gradients, so that each entry is a draw, and whatever differs between entries is noise of rounding.
`bench.py conformance` runs all checks (benchmarks/conformance_command.py).
"""

import io
import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.common import after_a_drop, state_bytes, tensors_in
from benchmarks.subjects import BF16, GRADIENT, ULP, WEIGHT, drawn, feed, full, values
from lowprec.errors import first_line
from lowprec.telemetry import local
from lowprec.watch import adapters


@dataclass(frozen=True)
class Size:
    """How much is drawn. side: of the square tensors. steps: of a check of writes. before, after: steps
    around the drop of gradients. path: (steps, entries) of an average."""

    side: int = 256
    steps: int = 30
    decay_steps: int = 300
    before: int = 300
    after: int = 1500
    path: tuple = (5000, 20_000)


SIZE = Size()


@dataclass
class Result:
    """What a check found. verdict: holds, finding, not claimed, or none (there is nothing to measure). shown:
    the figure in a table's cell. said: a sentence, where it is a finding or needs one. figures: all of them.
    """

    verdict: str
    shown: str
    said: str = ""
    figures: dict = field(default_factory=dict)


def judged(holds, shown, said, **figures):
    """A Result that holds or is a finding; `said` is dropped where it holds."""
    return Result("holds" if holds else "finding", shown, "" if holds else said, figures)


def nothing(shown, **figures):
    return Result("none", shown, "", figures)


COUPLED = "not elementwise"  # as Muon and Adafactor: what holds of each entry alone is not claimed


# ---- Tensors ----------------------------------------------------------------------------------------------


def chequered(side):
    """Gradients of two heights by turns, so that codes of the lower ones lie between a block's marks."""
    g = full(side, GRADIENT)
    g[:, 1::2] *= 0.37
    return g


def random_grads(shapes, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[0.01 * torch.randn(s, generator=generator) for s in shapes] for _ in range(steps)]


def random_weights(shapes):
    generator = torch.Generator().manual_seed(1)
    return [1 + 0.2 * torch.randn(s, generator=generator) for s in shapes]


def parts(optimizer, params):
    """[plain tensor] of all weights and their states, for comparison bit by bit."""
    found = [p.detach() for p in params]
    return found + [t for p in params for _, t in tensors_in(optimizer.state.get(p, {}))]


def dtypes(params, optimizer):
    return [t.dtype for t in parts(optimizer, params)]


def unequal(a, b):
    """Share of entries that differ in value between two lists of tensors; 1.0 where shapes do."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return 1.0
    differ = sum(int((~_same(x, y)).sum()) for x, y in zip(a, b, strict=True))
    return differ / max(1, sum(t.numel() for t in a))


def differing(share):
    """Words for a share of entries that differ."""
    return "same bits" if not share else f"{share:.1%} differ" if share > 5e-4 else f"{share:.0e} differ"


def _same(x, y):
    return (x == y) | ((x != x) & (y != y))


# ---- Writes ------------------------------------------------------------------------------------------------


def writes(subject, fraction, size):
    """Is a write right on average? Steps of a fraction of an ulp, on weights and steps of either sign.

    Rounding to nearest loses such steps, or doubles them at a half; truncation lengthens one sign's and
    shortens the other's. The figure is the mean of (written - wanted) a step in ulps, away from zero, with
    its standard error, of the worst of the four groups. 1/2 puts the wanted values on ties.
    """
    lr = fraction * ULP / subject.unit(size.side)
    weights = WEIGHT * torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat_interleave(size.side**2 // 4)
    grads = GRADIENT * torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat_interleave(size.side**2 // 4)
    weights, grads = weights.view(size.side, -1), grads.view(size.side, -1)
    wanted = subject.wanted(weights, grads, lr, size.steps).view(4, -1).mean(1, keepdim=True)  # [4, 1]
    with drawn(0):
        params, optimizer = subject.start([weights], lr)
        for _ in range(size.steps):
            feed(params, optimizer, [grads])
    moved = (values(params[0]) - weights).view(4, -1)  # [4, draws / steps]
    away = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
    error = (moved - wanted) * away / ULP / size.steps
    means = error.mean(1)
    errors = error.std(1) / error.shape[1] ** 0.5
    # 2 % of the step: a bf16 moment errs by half of that
    beyond = means.abs() > 5 * errors + 0.02 * fraction
    worst = int((means.abs() - 5 * errors).argmax())
    mean, se = means[worst].item(), errors[worst].item()
    draws = moved.numel() // 4 * size.steps
    written = (moved.mean(1, keepdim=True) / wanted)[:, 0]
    if (written.abs() < 0.02).all():
        said = f"writes are biased: nothing of a step of {fraction:.2g} ulp is written"
    else:
        said = f"writes are biased: a step of {fraction:.2g} ulp errs by {mean:+.4f} ulp"
    said += f" (mean of {draws:,} draws, standard error {se:.4f})"
    figures = dict(draws=draws, mean=means.tolist(), standard_error=errors.tolist())
    figures.update(groups=["w+ g+", "w+ g-", "w- g+", "w- g-"], written=written.tolist())
    return judged(not beyond.any(), f"{mean:+.4f} ±{se:.4f}", said, **figures)


def decay(subject, size):
    """Does weight decay alone survive? lr * weight_decay is a twelfth of an ulp a step, gradients are zero.

    Decay that is a write of its own, to nearest, does nothing in bf16. The figure is the share of the decay
    that took place: 1 is right. Only where decay is decoupled: what goes by way of the gradient is no
    shrinking.
    """
    if "weight_decay" not in subject.takes:
        return nothing("no decay")
    lr, wd, steps = 1e-2, 0.05, size.decay_steps
    due = 1 - (1 - lr * wd) ** steps

    def took(dtype):
        with drawn(1):
            params, optimizer = subject.start([full(32)], lr, dtype, weight_decay=wd)
            for _ in range(steps):
                feed(params, optimizer, [torch.zeros(32, 32)])
        return (1 - values(params[0]).mean().item() / WEIGHT) / due

    if subject.fp32 and not 0.5 < took(torch.float32) < 2:
        return nothing("not decoupled")
    share = took(BF16)
    said = f"weight decay alone: {share:.0%} of it takes place"
    return judged(0.9 < share < 1.1, f"{share:.2f}", said, share=share)


def dropped(subject, size):
    """Does the second moment follow when gradients drop to a hundredth? Those of every other entry do, and
    those of a quarter were small before.

    In bf16 to nearest v * 0.999 rounds back to v, and codes do the same while their block's scale stays.
    Steps are too short from then on. The figure is v over the exact one after the drop, as a ratio to that of
    the entries whose gradients did not drop, so that a bias correction within v does not count. 1 is right.
    """
    side = size.side // 2
    params, optimizer = subject.start([full(side)], 1e-6)
    feed(params, optimizer, [full(side, GRADIENT)])
    if second_moment(optimizer, params[0]) is None:
        return nothing("no v found")
    (p,), optimizer = subject.start([full(side)], 1e-6)

    def held():
        return second_moment(optimizer, p).float().flatten()

    with drawn(2):
        turns = dict(beta2=subject.betas[1], quiet=True)
        after = after_a_drop(optimizer, p, held, size.before, size.after, **turns)
    ratio = after[0] / after[1]
    said = f"the second moment stays {ratio:.1f} times too high after gradients drop to a hundredth"
    figures = dict(ratio=ratio, dropped=after[0], others=after[1], steps=size.after)
    return judged(0.8 < ratio < 1.25, f"{ratio:.2f}", said, **figures)


def second_moment(optimizer, p):
    """The second moment of p as values: by the names that adapters.py knows, else by part of one. Or None."""
    found = adapters.answering(optimizer).moment(p, "exp_avg_sq")
    if found is not None:
        return found
    for where, t in whole_tensors(optimizer.state.get(p, {})):
        if "exp_avg_sq" in where and t.shape == p.shape and t.is_floating_point():
            return t
    return None


def whole_tensors(state, path=""):
    """[(where, tensor)] of a state, codes that are a class of tensors as the values they stand for."""
    if torch.is_tensor(state):
        return [(path, local(state))]
    if not isinstance(state, dict):
        return []
    return [found for name, value in state.items() for found in whole_tensors(value, f"{path}.{name}")]


# ---- Noise -------------------------------------------------------------------------------------------------

# a step whose multiples come to no tie in eight steps: there a last bit would decide, and Kahan's sums would
# look noisy
NOISY = 0.29 * ULP
SHARED = 0.2  # correlation from which noise is called shared, where it is beyond chance too


def noise(optimizer, p):
    """{name: fp64 [n]} of what ought to be equal but for noise: weights and states of entries whose inputs
    are alike (those with the lower gradient). Packed codes are taken byte by byte.
    """
    found = {"weight": values(p).flatten()[1::2]}
    for where, t in whole_tensors(optimizer.state.get(p, {})):
        if t.numel() == p.numel():
            found[where] = values(t).flatten()[1::2]
        elif 2 * t.numel() == p.numel() and t.dtype == torch.uint8:
            found[where] = values(t).flatten()
    return {name: t for name, t in found.items() if t.std() > 0}


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a @ b / (a.norm() * b.norm())).item()


def worst_of(pairs):
    """(largest correlation of [(a, b)], 6 standard errors of chance), (None, None) without any noise."""
    found = [(correlation(a, b), 6 / len(a) ** 0.5) for a, b in pairs if a.std() > 0 and b.std() > 0]
    return max(found, default=(None, None))


def shared(subject, pairs, said):
    """The Result of a check that noise is independent. Where an entry's step depends on others, alike entries
    get steps that differ, by the noise of the moments, which lasts: that is not what is asked.
    """
    value, chance = worst_of(pairs)
    if value is None:
        return nothing("no noise")
    if value >= max(SHARED, chance) and not subject.elementwise:
        return Result("not claimed", COUPLED, figures=dict(correlation=value))
    return judged(value < max(SHARED, chance), f"{value:+.3f}", f"{said} ({value:+.2f})", correlation=value)


def between_tensors(subject, size):
    """Do the tensors of one step round independently? Three alike, whose weights and states are compared.

    Noise from one seed a step for all tensors, or from one draw that is used again, errs the same way
    everywhere: errors that ought to cancel add up. The figure is the largest correlation.
    """
    grads = chequered(128)
    with drawn(3):
        params, optimizer = subject.start([full(128)] * 3, NOISY / subject.unit(128))
        for _ in range(2):
            feed(params, optimizer, [grads] * 3)
    all_noise = [noise(optimizer, p) for p in params]
    pairs = [(a[k], b[k]) for a, b in itertools.combinations(all_noise, 2) for k in a if k in b]
    return shared(subject, pairs, "tensors of one step share their noise")


def increments(params, optimizer, steps):
    """[fp64 [n]]: by how much each of `steps` steps under equal gradients changed the first parameter."""
    found, before = [], values(params[0]).flatten()
    for _ in range(steps):
        feed(params, optimizer, [torch.full_like(params[0], GRADIENT)])
        after = values(params[0]).flatten()
        found.append(after - before)
        before = after
    return found


def between_steps(subject, size):
    """Do the steps round independently? Writes of equal steps, eight in a row.

    Noise that is keyed by the place alone gives each entry the same luck at every step: most never move. The
    figure is the largest correlation between two steps.
    """
    with drawn(4):
        found = increments(*subject.start([full(128)], NOISY / subject.unit(128)), 8)
    return shared(subject, itertools.combinations(found, 2), "noise repeats from step to step")


def between_seeds(subject, size):
    """Do ranks or runs of other seeds round independently, and those of one seed alike?

    Where the class takes a `seed`, that; else torch's global generator. Replicas must agree bit for bit, else
    their weights drift apart; runs of several seeds must not, else they are no sample.
    """
    own = "seed" in subject.takes

    def run(seed):
        more = {"seed": seed} if own else {}
        with drawn(100 if own else seed):
            params, optimizer = subject.start([full(128)], NOISY / subject.unit(128), **more)
            for _ in range(2):
                feed(params, optimizer, [chequered(128)])
        return noise(optimizer, params[0]), parts(optimizer, params)

    (a, bits), (b, _), (_, again) = run(0), run(1), run(0)
    differ = unequal(bits, again)
    if differ:
        said = f"two runs of one seed differ in {differ:.1%} of all values"
        return judged(False, differing(differ), said, differ=differ)
    result = shared(subject, [(a[k], b[k]) for k in a if k in b], "runs of other seeds share their noise")
    result.figures["by"] = "seed" if own else "torch's generator"
    return result


# ---- Around a run ------------------------------------------------------------------------------------------


def continued(subject, params, optimizer, lr):
    """(parameters, optimiser) made anew, with the state of another one as its state_dict tells it."""
    new = [nn.Parameter(p.detach().clone()) for p in params]
    again = subject.over(new, lr)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    return new, again


def through_a_file(state):
    """As a checkpoint does it: some classes of codes can be saved and not be copied."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # what was written a line above, of classes of any library


def after_a_resume(subject, size):
    """Does noise go on after a resume, or begin again? Four steps, a new object with the state, four more.

    A generator that the class makes itself, and does not save, draws the first steps' noise again. `anew` is
    the same where the program seeds torch's generator at each start, as scripts do: noise of the global
    generator repeats then, which is the script's to prevent. The figure is the largest correlation.
    """
    lr = NOISY / subject.unit(128)
    with drawn(5):
        params, optimizer = subject.start([full(128)], lr)
        first = increments(params, optimizer, 4)
        params, again = continued(subject, params, optimizer, lr)
        state, at = through_a_file(again.state_dict()), params[0].detach().clone()
    with drawn(6):
        second = increments(params, again, 4)
    with drawn(5):
        with torch.no_grad():
            params[0].copy_(at)
        fresh = subject.over(params, lr)
        fresh.load_state_dict(state)
        anew = worst_of(itertools.product(first, increments(params, fresh, 4)))[0]
    result = shared(subject, itertools.product(first, second), "noise begins again after a resume")
    result.figures["anew"] = anew
    if anew is not None and anew > SHARED and result.verdict == "holds":
        result.said = f"its noise repeats ({anew:+.2f}) where a script seeds torch's generator at each start"
    return result


def resume(subject, size):
    """Does a run go on with the same bits? Three steps, state_dict, a new object, three more.

    A state that is not saved, or cast to the weights' dtype by the loader, goes another way from there. "by
    torch's generator" means: only if the program saves and restores that too. The figure is the share of all
    values that differ.
    """
    shapes = [(128, 128), (7, 9)]
    grads, lr = random_grads(shapes, 6), ULP / 4
    weights = random_weights(shapes)

    def tail(params, optimizer):
        for g in grads[3:]:
            feed(params, optimizer, g)
        return parts(optimizer, params)

    with drawn(8):
        params, optimizer = subject.start(weights, lr)
        for g in grads[:3]:
            feed(params, optimizer, g)
        copies = [continued(subject, params, optimizer, lr) for _ in range(2)]
        kept = dtypes(params, optimizer) == dtypes(*copies[0])
        generator = torch.get_rng_state()
        whole = tail(params, optimizer)
        torch.set_rng_state(generator)
        restored = unequal(whole, tail(*copies[0]))
    with drawn(9):
        alone = unequal(whole, tail(*copies[1]))
    said = f"a resumed run differs in {restored:.1%} of all values from an uninterrupted one"
    said += "" if kept else "; load_state_dict gives states of other dtypes than were saved"
    shown = "by torch's generator" if alone and not restored else differing(restored)
    return judged(not restored, shown, said, restored=restored, alone=alone)


def compiled(subject, size):
    """Does the step that torch.compile builds write what the eager one writes?

    A fused kernel may drop a rounding that stands in the source: bf16 and back is no change to a compiler.
    Where noise is drawn in another order, the compiled writes must be right on average; else they must be the
    same.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    weights, grads = random_weights([(128, 128)]), random_grads([(128, 128)], 3)

    def run(stance, seed=12):
        with drawn(seed), torch.compiler.set_stance(stance):
            params, optimizer = subject.start(weights, ULP)
            for g in grads:
                feed(params, optimizer, g)
        return values(params[0])

    eager, noisy = run("force_eager"), None
    fused = run("default")
    if not torch._dynamo.utils.counters["stats"]["calls_captured"]:
        return nothing("compiles nothing")
    share, most = (eager != fused).double().mean().item(), ((eager - fused).abs().max() / ULP).item()
    noisy = bool((eager != run("force_eager", seed=13)).any())
    if share and noisy:
        with torch.compiler.set_stance("default"):
            result = writes(subject, 1 / 3, size)
        shown = f"{result.shown} (other noise)"
        return Result(result.verdict, shown, result.said and f"compiled: {result.said}", result.figures)
    said = f"the compiled step writes other values than the eager one: {share:.1%}, by up to {most:.2f} ulp"
    return judged(not share, differing(share), said, differ=share, most=most)


# ---- Values ------------------------------------------------------------------------------------------------


def stepped(subject, weights, gradients, lr=1e-3, dtype=BF16):
    """fp64 weights after a step for each of the gradients."""
    with drawn(14):
        params, optimizer = subject.start([weights], lr, dtype)
        for g in gradients:
            feed(params, optimizer, [g])
    return values(params[0])


def spreading(subject, value, name):
    """(entries beside the struck one that are not finite, whether the struck one hides it), worst of the two
    ways to strike: by the gradient and by the weight."""
    place, (clean,) = (3, 5), random_grads([(128, 128)], 1)[0]
    spread, hidden = 0, []
    for by in ("gradient", "weight"):
        weights, struck = full(128), clean.clone()
        (struck if by == "gradient" else weights)[place] = value
        after = stepped(subject, weights, [struck, clean, clean])
        bad = ~after.isfinite()
        spread = max(spread, int(bad.sum() - bad[place].int()))
        if not bad[place]:
            hidden.append(by)
    return spread, hidden


def nan(subject, size):
    """Does a NaN stay where it is? One in a gradient or in a weight, then two clean steps.

    It must not spread to other entries (a block's scale in codes takes it to the whole block), and must not
    become a number: a run that diverged would look healthy. The figure is how many other entries it reaches.
    """
    spread, hidden = spreading(subject, math.nan, "NaN")
    said = [f"NaN spreads from one entry to {spread} others"] if spread else []
    said += [f"NaN in a {by} is turned into a number" for by in hidden]
    shown = f"{spread} others" + (", hidden" if hidden else "")
    if spread and not subject.elementwise:
        return Result("not claimed", COUPLED, figures=dict(others=spread, hidden=hidden))
    return judged(not said, shown, "; ".join(said), others=spread, hidden=hidden)


def infinity(subject, size):
    """Does an infinity stay where it is? As `nan`; that a clipped gradient makes it a number is no fault."""
    spread, hidden = spreading(subject, math.inf, "infinity")
    said = f"an infinity spreads from one entry to {spread} others"
    if spread and not subject.elementwise:
        return Result("not claimed", COUPLED, figures=dict(others=spread, hidden=hidden))
    return judged(not spread, f"{spread} others", said, others=spread, hidden=hidden)


def extremes(subject, size):
    """Do denormal and very large numbers go through? And does a zero gradient leave every weight as it is?

    Weights from 2^-133 (bf16's smallest) to its largest number, zeros and ties. Then gradients of 2^-130, and
    of 1e15, whose squares fp32 still holds.
    """
    g = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(-133, 128, (128, 128), generator=g).float())
    weights = (torch.randn(128, 128, generator=g) * scale).clamp(-3.3e38, 3.3e38).to(BF16)
    weights[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(BF16).max, -torch.finfo(BF16).max], dtype=BF16)
    wrong = []
    changed = int((stepped(subject, weights, [torch.zeros(128, 128)]) != values(weights)).sum())
    if changed:
        wrong.append(f"a zero gradient changes {changed} weights")
    for height in (2.0**-130, 1e15):
        after = stepped(subject, weights, [weights.float().sign() * height] * 2)
        broken = int((~after.isfinite()).sum())
        if broken:
            wrong.append(f"gradients of {height:.0e} make {broken} finite weights infinite or NaN")
    if wrong and not subject.elementwise:
        return Result("not claimed", COUPLED)
    return judged(not wrong, "as they should" if not wrong else f"{len(wrong)} wrong", "; ".join(wrong))


def layouts(device="cpu"):
    """{name: bf16 weights}: odd sizes, none at all, no dimension, and two whose entries are not in order."""

    def weights(*shape):
        return torch.full(shape, WEIGHT, dtype=BF16, device=device)

    sizes = {"1": (1,), "7": (7,), "4097": (4097,), "empty": (0,), "0-d": ()}
    found = {name: weights(*shape) for name, shape in sizes.items()}
    return {**found, "not contiguous": weights(64, 64).T, "every other": weights(4200)[::2]}


def sizes(subject, size):
    """Are tensors of any size and layout stepped? Alone and beside one of ordinary size, whose weights then
    are looked at too. A step of four ulps, which no rounding hides. A class may refuse one when it is made.
    """
    lr, failed, refused = 4 * ULP / subject.unit(64), {}, []
    for name in layouts():
        try:
            for beside in ([], [full(64).to(subject.device, BF16)]):
                with drawn(15):
                    # made here: Subject.start would copy the entries into order
                    params = [nn.Parameter(w) for w in [layouts(subject.device)[name], *beside]]
                    try:
                        optimizer = subject.over(params, lr)
                    except Exception:
                        refused.append(name)
                        break
                    for _ in range(2):
                        feed(params, optimizer, [torch.full_like(p, GRADIENT) for p in params])
                moved = [(WEIGHT - values(p)) / ULP for p in params]
                # two steps of four ulps, with room for optimisers whose steps depend on the shape
                most = 64 if subject.elementwise else math.inf
                if not all(((m > 0.5) & (m < most)).all() for m in moved):
                    failed[name] = "is not moved as it should be"
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
    shown = f"{len(layouts()) - len(failed) - len(refused)} of {len(layouts())}"
    shown += f", {len(refused)} refused" if refused else ""
    said = "; ".join(f"a tensor of size {name}: {why}" for name, why in failed.items())
    return judged(not failed, shown, said, failed=failed, refused=refused)


def memory(subject, size):
    """Bytes of state a parameter, as allocated: what a claim of low precision is about. No verdict."""
    params, optimizer = subject.start([full(256)])
    feed(params, optimizer, [full(256, GRADIENT)])
    found = state_bytes(optimizer) / 256**2
    return Result("holds", f"{found:.2f}", figures=dict(bytes=found))
