"""All nets and recipes at once, and the tables of the pages that come from records."""

import itertools
import shutil
import statistics

import pytest
from lab import TOML, record, write

from experiments import report
from experiments.log import definition, doc_tables, front, overview, pages, quality, second
from experiments.log.analysis import verdict_by_rule
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


def test_a_recipe_is_what_an_arm_adds_to_its_baseline(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03, "stochastic": -0.001})
    [setting] = overview.settings([experiment], known)
    assert set(setting.cells) == {"--pure_bf16", "--pure_bf16 --stochastic"}, "an arm that samples is none"
    changes = [3 * (1 + seed / 10) for seed in range(6)]
    found = setting.cells["--pure_bf16"].change
    assert found.mean == pytest.approx(statistics.fmean(changes)) and found.low > 0
    assert setting.cells["--pure_bf16 --stochastic"].change.high < 0
    assert f"**{found.mean:+.2f} ±{found.half:.2f}**" in overview.settings_page([setting])


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


def test_against_autocast_an_fp32_run_that_both_share_cancels():
    low = overview.Cell({0: [1.02], 1: [1.03], 7: [9.0]})
    autocast = overview.Cell({0: [1.01], 1: [1.02]}, level=0.02)
    beside = low.against(autocast)
    assert beside.ratios == {0: pytest.approx(1.02 / 1.01), 1: pytest.approx(1.03 / 1.02)}
    assert beside.level == 0.02
    assert low.against(overview.Cell({0: [1.0]})) is None, "one seed is no interval"


def test_groups_are_found_by_flags(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03})
    assert [one.group for one in overview.settings([experiment], known)] == [overview.SMALL]
    again, known = with_losses(folder, {"nearest": 0.03})
    again.common.extend(["--eps", "1e-6"])
    assert [one.group for one in overview.settings([again], known)] == [overview.OTHER]


def test_bold_is_what_withstands_holm_over_its_table():
    alone = overview.Cell({0: [1.001], 1: [1.002], 2: [1.004], 3: [1.005]})
    open_ones = [overview.Cell({0: [1.0 + i / 1e3], 1: [0.99], 2: [1.02]}) for i in range(12)]
    assert alone.change.p < 0.05 and overview.withstanding([alone]) == {id(alone)}
    assert overview.withstanding([alone, *open_ones]) == set()


def test_a_row_whose_loss_lies_above_0_is_called_slightly_worse(folder):
    experiment, known = with_losses(folder, {"nearest": 0.001, "stochastic": -0.001})
    said = {arm.name: verdict_by_rule(arm, known) for arm in experiment.arms}
    assert said["nearest"] == "slightly worse" and said["stochastic"] == "equal"
    assert report.main([], folder, folder.parent / "EXPERIMENTS.md") == 0
    assert "slightly worse, within 0.5" in (folder / "001-rounding/README.md").read_text()


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


def test_a_table_takes_the_place_of_the_one_below_its_marker():
    page = "a\n\n<!-- t -->\n| old |\n|---|\n\nb\n"
    assert doc_tables.with_table(page, "t", "| new |", "page") == "a\n\n<!-- t -->\n| new |\n\nb\n"
    empty = "a\n\n<!-- t -->\n\nb\n"
    assert doc_tables.with_table(empty, "t", "| new |", "page") == "a\n\n<!-- t -->\n| new |\n\nb\n"
    with pytest.raises(Refused, match="must stand there once"):
        doc_tables.with_table("a", "t", "| new |", "page")


def test_the_evidence_of_the_package_is_what_the_records_say(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03, "stochastic": -0.001})
    nearest, stochastic = quality.comparisons([experiment], known)
    assert nearest.recipe == "pure_bf16" and nearest.flags == "--pure_bf16" and nearest.kind == "U-Net"
    changes = [3 * (1 + seed / 10) for seed in range(6)]
    assert nearest.change == pytest.approx(statistics.fmean(changes), abs=1e-3) and nearest.pairs == 6
    assert nearest.low == pytest.approx(nearest.change - (nearest.high - nearest.change), abs=2e-3)
    assert nearest.weights == "average" and nearest.experiment == "001" and nearest.steps == 4
    assert stochastic.high < 0


def test_what_git_does_not_show_was_fixed_before_is_marked_and_counted_apart(folder):
    marked = TOML + ARMS.replace('name = "stochastic"', 'name = "stochastic"\nmarked = "known"')
    marked = marked.replace('name = "sampler"', 'name = "sampler"\nbaseline_was = "nearest"')
    with_losses(folder, {})
    (folder / "001-rounding/experiment.toml").write_text(marked)
    experiment = definition.load_experiment("1", folder)
    known = recorded(experiment)
    next(r for k, r in known.items() if k[1:] == ("nearest", 3))["clean"] = False
    assert "[001]\\* " in front.index([experiment], known)
    told = pages.marks_told(experiment, known)
    which = [line.rpartition(": ")[2] for line in told]
    assert which == ["stochastic.", "sampler (was nearest).", "nearest."]
    wrong = marked.replace('"known"', '"guessed"')
    (folder / "001-rounding/experiment.toml").write_text(wrong)
    with pytest.raises(Refused, match="marked is one of"):
        definition.load_experiment("1", folder)


def test_a_second_reading_tells_the_last_weights_and_gives_no_verdict(folder):
    toml = TOML.replace("margin = 0.5", 'margin = 0.5\nsecond_reading = "Late averages."')
    experiment, known = with_losses(folder, {"nearest": 0.03})
    assert second.second_reading(experiment, known) == ""
    (folder / "001-rounding/experiment.toml").write_text(toml + ARMS)
    experiment = definition.load_experiment("1", folder)
    for (_, name, _), r in known.items():
        up = float(name == "nearest")
        r["scores"]["raw"] = {"frechet": 2 + up, "loss_by_timestep": [1 + up]}
    head, *rows = second.second_reading(experiment, known).splitlines()
    assert "decided on after the results.** Late averages." in head
    [nearest] = [row for row in rows if row.startswith("| nearest ")]
    assert "+1.000 [+1.000, +1.000]" in nearest and "+100.00 [+100.00, +100.00]" in nearest
    assert "equal" not in nearest and "worse" not in nearest
