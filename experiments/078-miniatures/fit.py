"""What the miniatures tell of the whole trainings, by the rules of this experiment's prediction.

    python experiments/078-miniatures/fit.py tenth quarter

Of each length: the cost of nearest and of stochastic rounding against fp32 in percent, tried and whole; the
factor, the geometric mean of whole / tried over the four settings to fit; and what it foretells of the four
to test.
"""

import math
import statistics
import sys
from pathlib import Path

from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments.log.analysis import scores_by_seed  # noqa: E402
from experiments.log.definition import load_experiment  # noqa: E402
from experiments.log.records import recorded  # noqa: E402
from experiments.log.stats import mean_at_level  # noqa: E402

WAYS = "fp32", "nearest", "stochastic"
WHOLE = {  # setting: experiment, its arms of fp32, nearest and stochastic, and the weights that are scored
    "unet-1e-3": ("012", "fp32", "nearest-lr-1e-3", "stochastic-lr-1e-3", "ema"),
    "unet-3e-5": ("012", "fp32-lr-3e-5", "nearest-lr-3e-5", "stochastic-lr-3e-5", "ema"),
    "dit-cosine": ("039", *(f"dit-cosine-64-{way}" for way in WAYS), "raw"),
    "dit-constant": ("039", *(f"dit-constant-64-{way}" for way in WAYS), "raw"),
    "unet-1e-4": ("012", "fp32-lr-1e-4", "nearest-lr-1e-4", "stochastic-lr-1e-4", "ema"),
    "unet-cosine": ("039", *(f"unet-cosine-64-{way}" for way in WAYS), "raw"),
    "dit-5e-4": ("065", *WAYS, "ema"),
    "unet-lion": ("072", *(f"lion-{way}" for way in WAYS), "ema"),
}
FITTED = list(WHOLE)[:4]
TESTED = list(WHOLE)[4:]
RECIPES = WAYS[1:]


def change(number, name, base, weights):
    """The Mean of the change of an arm's held-out loss against that of its base, in percent."""
    experiment, losses = load_experiment(number), []
    for arm in (experiment.arm(name), experiment.arm(base)):
        arm.metric = f"{weights}.loss_by_timestep"
        losses.append(scores_by_seed(arm, recorded(arm.source.experiment)))
    own, reference = losses
    return mean_at_level([100 * (own[seed] / reference[seed] - 1) for seed in own if seed in reference])


def said(mean):
    return f"{mean.mean:+.2f} ({mean.low:+.2f} to {mean.high:+.2f}), {mean.pairs} pairs"


def factor_of(tried, whole):
    """The geometric mean of whole / tried, and the settings whose miniature tells 0 or less, left out."""
    lost = [name for name in FITTED if tried[name].mean <= 0]
    ratios = [whole[name].mean / tried[name].mean for name in FITTED if name not in lost]
    return math.exp(statistics.fmean(map(math.log, ratios))), lost


def main(lengths):
    whole = {recipe: {} for recipe in RECIPES}
    for name, (number, base, *arms, weights) in WHOLE.items():
        for recipe, arm in zip(RECIPES, arms, strict=True):
            whole[recipe][name] = change(number, arm, base, weights)
    for length in lengths:
        tried = {recipe: {} for recipe in RECIPES}
        for name, (*_, weights) in WHOLE.items():
            for recipe in RECIPES:
                arm = f"{name}-{length}-{recipe}"
                tried[recipe][name] = change("078", arm, f"{name}-{length}-fp32", weights)
        print(f"\n{length}")
        for recipe in RECIPES:
            held = 0
            for name, mean in tried[recipe].items():
                all_of_it = whole[recipe][name]
                held += mean.low <= all_of_it.mean <= mean.high
                ratio = all_of_it.mean / mean.mean
                print(f"  {recipe} {name}: {said(mean)}; whole {said(all_of_it)}; {ratio:.2f} times")
            print(f"  {recipe}: the miniature's interval holds the whole mean in {held} of {len(WHOLE)}")
        factor, lost = factor_of(tried["nearest"], whole["nearest"])
        print(f"  factor {factor:.2f}; left out: {', '.join(lost) or 'none'}")
        errors = []
        for name in TESTED:
            foretold, cost = factor * tried["nearest"][name].mean, whole["nearest"][name].mean
            errors.append(100 * abs(foretold - cost) / abs(cost))
            print(f"  {name}: foretold {foretold:+.2f}, whole {cost:+.2f}, error {errors[-1]:.0f} % of it")
        print(f"  median error {statistics.median(errors):.0f} %")
        costs = [[means[name].mean for name in WHOLE] for means in (tried["nearest"], whole["nearest"])]
        print(f"  rank correlation of the eight {spearmanr(*costs).statistic:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
