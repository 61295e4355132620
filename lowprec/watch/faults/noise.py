"""Faults of the noise of stochastic rounding, of weights and of second moments; see write_errors.py."""

import functools
import math

from ..fault import Figure, of_run, of_tensor

of_noise = functools.partial(of_tensor, "noise", family="noise")
DRAW_NEW_BITS = "draw new bits for each step and each entry"
OF_WEIGHTS, OF_SECOND_MOMENTS = "noise", "noise of exp_avg_sq"  # sites


def by_chance(one):
    """[(site, errors of a tensor)] of what is written by chance."""
    found = []
    for site, error in ((OF_WEIGHTS, one.error), (OF_SECOND_MOMENTS, one.moment_error)):
        if one.to_nearest(error) is False and error.far <= 0.01 * error.entries:
            found.append((site, error))
    return found


@of_noise("the entries of this tensor round together: they share one noise value", DRAW_NEW_BITS)
def noise_in_lumps(one):
    """All entries of a tensor err together, beyond 6 standard errors."""
    for site, error in by_chance(one):
        alternates = abs(error.score) < 0.5 * math.sqrt(error.burst * error.variance)
        if error.lumps and alternates:
            yield Figure(site=site)


@of_noise("rounding errs {side} zero by {mean:.2g} ulp on average",
          "noise must be uniform over all that is rounded away", above=0.05)
def noise_biased(one):
    """Mean error over the wanted steps, where it is certain."""
    for site, error in by_chance(one):
        side = "away from" if error.bias > 0 else "toward"
        yield Figure(abs(error.bias), site=site, side=side, mean=abs(error.score) / max(1.0, error.entries))


@of_noise("the same noise at every step: errors of two looks correlate by {figure:.2f}", DRAW_NEW_BITS,
          above=0.0)
def noise_repeated(one):
    """Correlation of the errors of two looks, where it is certain."""
    return [Figure(error.repeats, site=site) for site, error in by_chance(one)]


@of_noise("neighbours share their noise: their errors correlate by {figure:.2f}", DRAW_NEW_BITS, above=0.0)
def noise_of_neighbours(one):
    """Correlation of the errors of neighbours, where it is certain."""
    return [Figure(error.neighbours, site=site) for site, error in by_chance(one)]


@of_run("noise", "shares its noise with {other}: errors correlate by {figure:.2f}",
        "noise by place or name of a tensor", above=0.0)
def noise_shared(seen):
    """Correlation of the errors of two tensors, where it is certain."""
    watch = seen.watch
    for site, errors in ((OF_WEIGHTS, watch.errors), (OF_SECOND_MOMENTS, watch.moment_errors)):
        if seen.by_chance and errors.to_nearest is False:
            for (a, b), value in errors.shares().items():
                yield Figure(value, seen.names[b], site, other=seen.names[a])
