"""What the miniatures tell of the whole trainings, by the rules of this experiment's prediction.

    python experiments/078-miniatures/fit.py tenth quarter
    python experiments/078-miniatures/fit.py whole

Of each length: the cost of nearest and of stochastic rounding against fp32 in percent, tried and whole; the
factor, the geometric mean of whole / tried over the four settings to fit; and what it foretells of the four
to test. Of `whole`: the interval that is foreseen of each whole training (lowprec/trials/intervals.py), and
whether it holds the mean.
"""

import math
import statistics
import sys
from pathlib import Path

from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments.log.analysis import loss_changes, weights_of_score  # noqa: E402
from experiments.log.definition import load_experiment  # noqa: E402
from experiments.log.records import recorded  # noqa: E402
from experiments.log.stats import mean_at_level  # noqa: E402
from lowprec import evidence  # noqa: E402
from lowprec.trials.book import AUTOCAST, REFERENCE, Book, read_file  # noqa: E402
from lowprec.trials.intervals import of_whole_training  # noqa: E402

FITTED = ["unet-1e-3", "unet-3e-5", "dit-cosine", "dit-constant"]
TESTED = ["unet-1e-4", "unet-cosine", "dit-5e-4", "unet-lion"]
SETTINGS = FITTED + TESTED
RECIPES = {"nearest": "pure_bf16", "stochastic": "pure_bf16+stochastic"}


def changes_of(arm, weights):
    """The changes of an arm's held-out loss against that of its base, in percent, a pair each."""
    known = {**recorded(arm.experiment), **recorded(arm.base.source.experiment)}
    known |= recorded(arm.source.experiment)
    return list(loss_changes(arm, known, weights)[1].values())


def both(name, length, recipe):
    """(changes of a miniature, changes of the whole training it stands for)"""
    arm = load_experiment("078").arm(f"{name}-{length}-{recipe}")
    number, _, whole = arm.whole.partition("/")
    weights = weights_of_score(arm)
    return changes_of(arm, weights), changes_of(load_experiment(number).arm(whole), weights)


def said(mean):
    return f"{mean.mean:+.2f} ({mean.low:+.2f} to {mean.high:+.2f}), {mean.pairs} pairs"


# ---- One factor --------------------------------------------------------------------------------------------


def factor_of(tried, whole):
    """The geometric mean of whole / tried, and the settings whose miniature tells 0 or less, left out."""
    lost = [name for name in FITTED if tried[name].mean <= 0]
    ratios = [whole[name].mean / tried[name].mean for name in FITTED if name not in lost]
    return math.exp(statistics.fmean(map(math.log, ratios))), lost


def tell_length(length):
    tried, whole = ({recipe: {} for recipe in RECIPES} for _ in range(2))
    for recipe in RECIPES:
        for name in SETTINGS:
            little, all_of_it = map(mean_at_level, both(name, length, recipe))
            tried[recipe][name], whole[recipe][name] = little, all_of_it
    print(f"\n{length}")
    for recipe in RECIPES:
        held = 0
        for name, mean in tried[recipe].items():
            all_of_it = whole[recipe][name]
            held += mean.low <= all_of_it.mean <= mean.high
            ratio = all_of_it.mean / mean.mean
            print(f"  {recipe} {name}: {said(mean)}; whole {said(all_of_it)}; {ratio:.2f} times")
        print(f"  {recipe}: the miniature's interval holds the whole mean in {held} of {len(SETTINGS)}")
    factor, lost = factor_of(tried["nearest"], whole["nearest"])
    print(f"  factor {factor:.2f}; left out: {', '.join(lost) or 'none'}")
    errors = []
    for name in TESTED:
        foretold, cost = factor * tried["nearest"][name].mean, whole["nearest"][name].mean
        errors.append(100 * abs(foretold - cost) / abs(cost))
        print(f"  {name}: foretold {foretold:+.2f}, whole {cost:+.2f}, error {errors[-1]:.0f} % of it")
    print(f"  median error {statistics.median(errors):.0f} %")
    costs = [[means[name].mean for name in SETTINGS] for means in (tried["nearest"], whole["nearest"])]
    print(f"  rank correlation of the eight {spearmanr(*costs).statistic:.2f}")


# ---- An interval for the whole training ------------------------------------------------------------------


def tell_held(title, cells):
    """cells: [(name, changes that were tried, those of the whole training, [(tried, whole)] of the rule)]"""
    count = 0
    print(f"\n{title}")
    for name, tried, whole, recorded_gaps in cells:
        low, high = of_whole_training(tried, recorded_gaps)
        mean = statistics.fmean(whole)
        held = low <= mean <= high
        count += held
        told = f"tried {statistics.fmean(tried):+.2f}, foreseen {low:+.2f} to {high:+.2f}, whole {mean:+.2f}"
        print(f"  {name}: {told}: {'held' if held else 'not held'}")
    print(f"  held: {count} of {len(cells)}")


def tell_whole():
    for recipe, key in RECIPES.items():
        tenths = {name: both(name, "tenth", recipe) for name in SETTINGS}
        quarters = {name: both(name, "quarter", recipe) for name in SETTINGS}
        means = {name: tuple(map(statistics.fmean, pair)) for name, pair in tenths.items()}
        of_four = [means[name] for name in FITTED]
        others = {name: [means[other] for other in SETTINGS if other != name] for name in SETTINGS}
        print(f"\n---- {recipe}")
        by_four = [(name, *tenths[name], of_four) for name in TESTED]
        tell_held("tenths of the four to test, by the four to fit", by_four)
        by_four = [(name, *quarters[name], of_four) for name in SETTINGS]
        tell_held("quarters, by the tenths of the four to fit", by_four)
        for length, pairs in (("tenths", tenths), ("quarters", quarters)):
            by_seven = [(name, *pairs[name], others[name]) for name in SETTINGS]
            tell_held(f"{length}, each by the tenths of the seven others", by_seven)
        fresh = [fresh_cell(net, recipe, key) for net in ("vit", "gpt2", "unetr")]
        tell_held("082, against autocast, by all eight tenths, as a trial does it", fresh)


def fresh_cell(net, recipe, key):
    """A cell of tell_held of a net of 082."""
    experiment = load_experiment("082")
    file = experiment.folder / f"trial-{net}.json"
    book = Book(file, read_file(file)["plan"], within=0.3)
    book.reference = REFERENCE
    tried = list(book.changes(key, AUTOCAST).values())
    return net, tried, changes_of(experiment.arm(f"{net}-{recipe}"), "raw"), evidence.miniatures(key)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        if word == "whole":
            tell_whole()
        else:
            tell_length(word)
