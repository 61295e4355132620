"""All nets and recipes at once, and the tables of the pages that come from records."""

import statistics
from types import SimpleNamespace

import pytest
from lab import TOML, record, write

from experiments import report
from experiments.log import definition, doc_tables, front, overview, pages, quality, second, stats
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
    [row] = overview.overview_rows([experiment], known)
    assert row.net == "001/fp32" or row.net == overview.NETS_OF_BASELINES["001/fp32"][0]
    assert set(row.cells) == {"--pure_bf16", "--pure_bf16 --stochastic"}, "an arm that only samples is none"
    cell = row.cells["--pure_bf16"]
    changes = [3 * (1 + seed / 10) for seed in range(6)]
    assert cell.change.mean == pytest.approx(statistics.fmean(changes)) and cell.side == "worse"
    assert cell.error == pytest.approx(statistics.stdev(changes) / 6**0.5)
    assert row.cells["--pure_bf16 --stochastic"].side == "better"
    assert f"**{cell.change.mean:+.2f} ±{cell.half:.2f}**" in overview.overview_table([experiment], known)


def test_a_net_of_another_optimizer_has_no_row_and_is_counted(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03})
    table = overview.overview_table([experiment], known)
    experiment.common.extend(["--optimizer", "lion"])
    of_lion = overview.overview_table([experiment], known)
    assert len(table.splitlines()) - len(of_lion.splitlines()) == 1
    assert of_lion.splitlines()[-3:] == table.splitlines()[-3:], "all nets, their median, those above 0"


def test_cells_of_two_pairs_stand_in_the_table_and_count_nowhere(folder):
    experiment, known = with_losses(folder, {"nearest": 0.03})
    few = {key: r for key, r in known.items() if key[2] < 2}
    [row] = overview.overview_rows([experiment], few)
    assert row.cells["--pure_bf16"].pairs == 2 and row.cells["--pure_bf16"].side == "open"
    assert overview.summary([row], "--pure_bf16") is None


def test_a_row_whose_loss_lies_above_0_is_called_slightly_worse(folder):
    experiment, known = with_losses(folder, {"nearest": 0.001, "stochastic": -0.001})
    said = {arm.name: verdict_by_rule(experiment, arm, known) for arm in experiment.arms}
    assert said["nearest"] == "slightly worse" and said["stochastic"] == "equal"
    assert "|1 slightly worse" in front.index([experiment], known).replace("2 equal, ", "|")
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
    known = {key: r for key, r in known.items() if key[1] != "fp32"}
    assert doc_tables.share_kept(experiment, ("sampler", "fp32", "nearest"), known) == "-"


def test_random_effects_of_studies_that_agree_and_that_do_not():
    mean, half = stats.random_effects([1.0, 1.0, 1.0, 1.0], [0.1] * 4)
    assert mean == pytest.approx(1.0) and half == pytest.approx(stats.errors_in_half_interval(4) * 0.05)
    mean, half = stats.random_effects([0.0, 1.0, 2.0, 3.0], [1e-3] * 4)
    spread = statistics.stdev([0.0, 1.0, 2.0, 3.0])
    wanted = stats.errors_in_half_interval(4) * spread / 2
    assert mean == pytest.approx(1.5) and half == pytest.approx(wanted, rel=1e-3)


def test_a_figure_over_all_nets_that_is_not_there_is_refused(folder):
    experiment, known = with_losses(folder, {})
    rows = overview.overview_rows([experiment], known)
    for words in ("stochastic.harmony", "quickly.mean", "stochastic.mean"):
        with pytest.raises(Refused, match=words):
            overview.figure_of(words, rows)


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
    assert "|1 equal; apart: 2 equal|" in front.index([experiment], known)
    next(r for k, r in known.items() if k[1:] == ("nearest", 3))["clean"] = False
    assert "|apart: 3 equal|" in front.index([experiment], known)
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


def test_missed_predictions_are_counted_on_the_front_page_and_listed_on_their_own(tmp_path):
    missed = {"001": [], "002": ["one"], "003": ["two", "three"]}
    experiments = []
    for number, titles in missed.items():
        experiments.append(SimpleNamespace(number=number, missed=titles, folder=tmp_path / f"{number}-name"))
    assert front.missed_told(experiments, "log").startswith("[3 in 2 of the experiments](log/missed.md)")
    last = front.missed_page(experiments).splitlines()[-3:]
    assert last[0] == "- [002](002-name/README.md) one"
    assert last[1:] == ["- [003](003-name/README.md) two", "- [003](003-name/README.md) three"]
