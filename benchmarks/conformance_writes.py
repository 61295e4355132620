"""Checks of conformance: are small steps right on average, in weights, decay, moments, compiled steps?

What an optimiser wants to write is what the same class does to fp32 weights. A class that takes bf16 alone is
asked on weights of zero, where a write rounds to one part in 512 of the step itself.
"""

import torch

from benchmarks.conformance import (
    Result,
    differing,
    judged,
    nothing,
    random_grads,
    random_weights,
    whole_tensors,
)
from benchmarks.subjects import BF16, FIRST_WEIGHT, GRADIENT, ULP, drawn, feed, full, in_fp64
from lowprec.watch import adapters


def after_a_drop(optimizer, p, read, before, after, bar=None, beta2=None, quiet=False):
    """(v of the entries whose gradients dropped, v of the others), each over the exact mean v.

    Standard normal gradients for `before` steps, then every other entry's times 0.01 for `after` steps: in
    each block of codes the scale stays, while half of the values should fall. read() gives exp_avg_sq [n] as
    the optimiser holds it. The draws are made on the CPU. beta2: that of the optimiser's groups unless given.
    quiet: let a quarter of the entries have small gradients all along, and count them nowhere. They are what
    the smallest code of a block stands for, so that the dropped ones lie between a block's two ends.
    """
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(p.numel())
    dropped = places % 2 == 0
    others = ~dropped
    heights = torch.ones(())
    if quiet:
        others = places % 4 == 3
        heights = torch.where(places % 4 == 1, 1e-3, 1.0)
    beta2 = beta2 or optimizer.param_groups[0]["betas"][1]
    exact = torch.zeros(p.numel())
    for step in range(before + after):
        grad = torch.randn(p.numel(), generator=generator) * heights
        if step >= before:
            grad = torch.where(dropped, 0.01 * grad, grad)
        exact = beta2 * exact + (1 - beta2) * grad.square()
        p.grad = grad.to(p.device, p.dtype).view_as(p)
        optimizer.step()
        if bar:
            bar.update()
    held = read().cpu()
    return tuple((held[half].mean() / exact[half].mean()).item() for half in (dropped, others))


def writes(subject, size, fraction):
    """Is a write right on average? Steps of a fraction of an ulp, on weights and steps of either sign.

    Rounding to nearest loses such steps, or doubles them at a half; truncation lengthens one sign's and
    shortens the other's. The figure is the mean of (written - wanted) a step in ulps, away from zero, with
    its standard error, of the worst of the four groups. 1/2 puts the wanted values on ties.
    """
    lr = fraction * ULP / subject.unit(size.side)
    weight_signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    grad_signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    draws_a_group = size.side**2 // 4
    weights = (FIRST_WEIGHT * weight_signs).repeat_interleave(draws_a_group).view(size.side, -1)
    grads = (GRADIENT * grad_signs).repeat_interleave(draws_a_group).view(size.side, -1)
    wanted = subject.wanted(weights, grads, lr, size.steps).view(4, -1).mean(1, keepdim=True)  # [4, 1]
    with drawn(0):
        params, optimizer = subject.start([weights], lr)
        for _ in range(size.steps):
            feed(params, optimizer, [grads])
    moved = (in_fp64(params[0]) - weights).view(4, -1)  # [4, draws / steps]
    error = (moved - wanted) * weight_signs[:, None] / ULP / size.steps
    means = error.mean(1)
    errors = error.std(1) / error.shape[1] ** 0.5
    # 2 % of the step: a bf16 moment errs by half of that
    beyond = means.abs() > 5 * errors + 0.02 * fraction
    worst = int((means.abs() - 5 * errors).argmax())
    mean = means[worst].item()
    se = errors[worst].item()
    draws = draws_a_group * size.steps
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
        return (1 - in_fp64(params[0]).mean().item() / FIRST_WEIGHT) / due

    if subject.fp32 and not 0.5 < took(torch.float32) < 2:
        return nothing("not decoupled")
    share = took(BF16)
    said = f"weight decay alone: {share:.0%} of it takes place"
    return judged(0.9 < share < 1.1, f"{share:.2f}", said, share=share)


def dropped(subject, size):
    """Does the second moment follow when gradients drop to a hundredth?

    Those of every other entry do, and those of a quarter were small before. In bf16 to nearest v * 0.999
    rounds back to v, and codes do the same while their block's scale stays. Steps are too short from then on.
    The figure is v over the exact one after the drop, as a ratio to that of the entries whose gradients did
    not drop, so that a bias correction within v does not count. 1 is right.
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
        drop = dict(beta2=subject.betas[1], quiet=True)
        fell, others = after_a_drop(optimizer, p, held, size.before, size.after, **drop)
    ratio = fell / others
    said = f"the second moment stays {ratio:.1f} times too high after gradients drop to a hundredth"
    figures = dict(ratio=ratio, dropped=fell, others=others, steps=size.after)
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
        return in_fp64(params[0])

    eager = run("force_eager")
    fused = run("default")
    if not torch._dynamo.utils.counters["stats"]["calls_captured"]:
        return nothing("compiles nothing")
    share = (eager != fused).double().mean().item()
    most = ((eager - fused).abs().max() / ULP).item()
    is_noisy = bool((eager != run("force_eager", seed=13)).any())
    if share and is_noisy:
        with torch.compiler.set_stance("default"):
            result = writes(subject, size, 1 / 3)
        said = result.said and f"compiled: {result.said}"
        return Result(result.verdict, f"{result.shown} (other noise)", said, result.figures)
    said = f"the compiled step writes other values than the eager one: {share:.1%}, by up to {most:.2f} ulp"
    return judged(not share, differing(share), said, differ=share, most=most)
