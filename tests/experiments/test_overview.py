"""All nets and recipes at once, and the tables of the pages that come from records."""

import itertools
import shutil
import statistics

import pytest
from lab import TOML, record, write

from experiments.log import definition, doc_tables, overview
from experiments.log.records import recorded
from lowprec.errors import Refused

ARMS = """
[[arms]]
name = "stochastic"
flags = ["--pure_bf16", "--stochastic"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "experiments"


def with_losses(folder, up):
    """001-rounding, whose arms have these held-out losses over fp32's, and scores that are all alike."""
    write(folder, TOML + ARMS)
    experiment = definition.load_experiment("1", folder)
    records = []
    for name in ("fp32", "nearest", "sampler", "stochastic"):
        for seed in experiment.seeds:
            made = record(experiment, name, seed, 1.5 + seed / 1000)
            loss = 0.4 * (1 + up.get(name, 0.0) * (1 + seed / 10))
            made["scores"]["ema"]["loss_by_timestep"] = [loss, loss]
            records.append(made)
    write(folder, TOML + ARMS, records)
    return experiment, recorded(experiment)


def twice(folder, known, seeds):
    """Another experiment, 002, with the same setting and these seeds, whose nearest arm loses 1 %."""
    (folder / "002-again").mkdir()
    shutil.copy(folder / "001-rounding/experiment.toml", folder / "002-again")
    experiment = definition.load_experiment("2", folder)
    experiment.seeds = seeds
    for seed, (name, loss) in itertools.product(seeds, [("fp32", 0.4), ("nearest", 0.404)]):
        made = known["002", name, seed] = record(experiment, name, seed, 1.5)
        made["scores"]["ema"]["loss_by_timestep"] = [loss]
    return experiment


def test_records_of_one_setting_are_merged_and_a_seed_counts_once(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03})
    again = twice(folder, known, [4, 5, 6, 7])
    [setting] = overview.settings([experiment, again], known)
    cell = setting.cells["--pure_bf16"]
    assert sorted(cell.ratios) == list(range(8)) and set(setting.numbers) == {"001", "002"}
    assert cell.ratios[6] == pytest.approx(1.01)
    assert cell.ratios[5] == pytest.approx((1.01 + 1.045) / 2), "the mean of both pairs of seed 5"


def test_a_cell_whose_own_page_waits_is_open_and_never_bold(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03})
    experiment.looks = [definition.Look(12, 0.05)]
    [setting] = overview.settings([experiment], known)
    page, groups = overview.settings_page([setting]), overview.groups_table([setting])
    assert "(6, open)" in page and "**+" not in page
    assert "not measured" in groups and "fewer than six pairs" in groups


def test_bold_is_what_withstands_holm_over_its_table():
    alone = overview.Cell({0: [1.001], 1: [1.002], 2: [1.004], 3: [1.005]})
    open_ones = [overview.Cell({0: [1.0 + i / 1e3], 1: [0.99], 2: [1.02]}) for i in range(12)]
    assert alone.change.p < 0.05 and overview.withstanding([alone]) == {id(alone)}
    assert overview.withstanding([alone, *open_ones]) == set()


def test_what_a_finetuning_keeps_is_a_share_of_what_fp32_gains(folder):
    write(folder, TOML)
    experiment = definition.load_experiment("1", folder)
    records = []
    for seed in experiment.seeds:
        records.append(record(experiment, "sampler", seed, 3.0))  # stands for the net before
        records.append(record(experiment, "fp32", seed, 1.0))
        records.append(record(experiment, "nearest", seed, 2.1 if seed % 2 else 1.9))  # keeps 45 or 55 %
    write(folder, TOML, records)
    known = recorded(experiment)
    half = 2.5706 * statistics.stdev([45, 55] * 3) / 6**0.5
    said = doc_tables.share_kept(experiment, ("sampler", "fp32", "nearest"), known)
    assert said == f"50.0 ± {half:.1f} (6)"
    assert doc_tables.share_kept(experiment, ("sampler", "fp32", "absent"), known) == "-"


def test_a_figure_of_a_group_that_is_not_there_is_refused(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03})
    found = overview.settings([experiment], known)
    assert overview.figure_of(f"{overview.SMALL}: to nearest.median", found) == "+3.75 %"
    for words in ("text: to nearest.median", f"{overview.SMALL}: to nearest.harmony", "all: quickly.median"):
        with pytest.raises(Refused, match=words):
            overview.figure_of(words, found)
