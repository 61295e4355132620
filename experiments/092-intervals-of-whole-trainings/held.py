"""What the tenths of this experiment foresee of their whole trainings, and whether these hold it.

    python experiments/092-intervals-of-whole-trainings/held.py
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments.log.analysis import finished, loss_changes, losses, records_of  # noqa: E402
from experiments.log.definition import load_experiment  # noqa: E402
from experiments.log.records import recorded  # noqa: E402
from lowprec import evidence  # noqa: E402
from lowprec.trials.intervals import LEVEL_OF_A_LOOK, mean_at_level, of_whole_training  # noqa: E402

WHOLE = {  # net: experiment of its whole training, what its arms' names begin with
    "gpt": ("025", "gpt-"),
    "bdh": ("025", "bdh-"),
    "moe": ("089", ""),
    "cnn": ("026", ""),
    "vit": ("026", "vit-"),
    "autoencoder": ("028", ""),
}
RECIPES = {"nearest": "pure_bf16", "stochastic": "pure_bf16+stochastic"}


def changes_of(number, name):
    """(changes of an arm's held-out loss against its base, in percent, a pair each; the mean loss of that)"""
    arm = load_experiment(number).arm(name)
    known = recorded(arm.experiment)
    of_base = losses(finished(records_of(arm.base, known)), "ema")
    mean = statistics.fmean(held for held, _ in of_base.values())
    return list(loss_changes(arm, known, "ema")[1].values()), mean


def main():
    for recipe, key in RECIPES.items():
        foreseen = own = 0
        print(recipe)
        for net, (number, prefix) in WHOLE.items():
            tried, little = changes_of("092", f"{net}-{recipe}")
            pairs, all_of_it = changes_of(number, f"{prefix}{recipe}")
            whole = statistics.fmean(pairs)
            look = mean_at_level(tried, LEVEL_OF_A_LOOK)
            low, high = of_whole_training(tried, evidence.miniatures(key))
            own += look.low <= whole <= look.high
            foreseen += low <= whole <= high
            told = f"tried {look.mean:+.2f} ({look.low:+.2f} to {look.high:+.2f}), "
            told += f"foreseen {low:+.2f} to {high:+.2f}, whole {whole:+.2f}"
            held = "held" if low <= whole <= high else "not held"
            print(f"  {net}: {told}: {held}; fp32's loss {little:.3f}, whole {all_of_it:.3f}")
        print(f"  foreseen holds {foreseen} of {len(WHOLE)}, the trial's own interval {own}")


if __name__ == "__main__":
    main()
