"""The log of this repository: it is what its records give, its commands run, its links lead to files."""

import functools
import re
import shlex

import pytest

import strategies
from experiments import report, run
from experiments.log import definition, figures, overview
from experiments.log import records as log

ROOT = definition.ROOT
EXPERIMENTS = [definition.load_experiment(number) for number in definition.experiment_folders()]
DOCUMENT = ROOT / "EXPERIMENTS.md"
logged = pytest.mark.skipif(not DOCUMENT.exists(), reason="there is no EXPERIMENTS.md yet")


def named(arm):
    """The flags that an arm adds."""
    return {flag.removeprefix("--") for flag in arm.flags if flag.startswith("--")}


def all_flags(arm):
    """The flags that its scores come from."""
    flags = arm.trained.experiment.common + arm.trained.flags
    return flags + arm.source.flags if arm.of else flags


@functools.cache
def known(experiment):
    """{key: record}. Raises Refused where a record's command is not the one of its arm."""
    return log.recorded(experiment)


@functools.cache
def flags_of(*words):
    return run.flags_of_words(list(words))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.folder.name)
def test_arms_differ_from_their_baseline_in_their_flags_alone(experiment, monkeypatch):
    monkeypatch.chdir(ROOT)  # where run.py types them: a task may be a file
    beside = {"average", "weights"}  # what is kept and scored beside the main average is no training
    for arm in experiment.arms:
        base = experiment.arm(arm.baseline)
        mine, other = flags_of(*all_flags(arm)), flags_of(*all_flags(base))
        both = mine.keys() & other.keys()  # a task has flags of its own
        differ = {name for name in both if mine[name] != other[name]}
        own = {name for a in (arm, base) for b in (a, a.trained, a.source) for name in named(b)}
        if mine["task"] != other["task"]:  # each has defaults of its own
            for flags in (mine, other):
                own |= set(strategies.find_task(flags["task"]).own_defaults())
        assert differ <= beside | own, arm.name
        elsewhere = "on another kind of CPU" in arm.note
        again = f"{arm.name} is its baseline again"
        assert arm is base or differ or arm.metric != base.metric or elsewhere, again
    known(experiment)


@logged
def test_the_log_is_what_the_results_give():
    assert report.main(["--check"]) == 0


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.folder.name)
def test_the_pictures_of_the_log_show_its_records(experiment):
    """So that nothing but new records redraws them. Samples are not checked: their runs are not kept here."""
    read = {}
    for number in sorted({key[0] for arm in experiment.arms for key in keys_read(arm)}):
        read |= known(next(e for e in EXPERIMENTS if e.number == number))
    for name, data in report.data_of_figures(experiment, read, runs="nowhere"):
        digest = figures.digest_of(data, figures.FIGURES[name][1])
        assert figures.drawn_from(experiment.folder / f"{name}.png") == digest, name


def keys_read(arm):
    return [definition.run_key(other, 0) for other in (arm.source, arm.trained, arm.start)]


@logged
def test_every_command_of_the_log_dry_runs(capsys):
    texts = [path.read_text() for path in (DOCUMENT, *ROOT.glob("experiments/*/README.md"))]
    lines = dict.fromkeys(line for text in texts for line in re.findall(r"`(python [^`\n]+)`", text))
    found = [shlex.split(line, comments=True)[1:] for line in lines]
    assert found
    for script, *words in found:
        if script == "experiments/run.py":
            assert run.main([*words, "--dry_run"]) == 0, words
        elif script == "train.py":
            if not set(words) & {"--sample", "--check", "--diagnose"}:
                assert run.dry_run(words) == 0, words
        else:
            assert (ROOT / script).exists(), script
        capsys.readouterr()


@logged
def test_links_of_the_log_lead_somewhere():
    pages = [ROOT / "experiments" / name for name in ("rules.md", "settings.md", "missed.md")]
    for path in (DOCUMENT, *pages, *ROOT.glob("experiments/*/README.md")):
        text = path.read_text()
        named = re.findall(r"^\[\d+\]: (\S+)$", text, re.M)
        for target in {*re.findall(r"\]\(([^)#:]+)[^)]*\)", text), *named}:
            assert (path.parent / target).exists(), (path, target)


def test_the_figures_of_the_front_pages_show_the_records():
    every = {key: record for e in EXPERIMENTS for key, record in known(e).items()}
    found = overview.settings(EXPERIMENTS, every)
    data = {
        definition.HERE / "sizes.png": overview.figure_data(found),
        ROOT / "docs/cost.png": overview.cost_data(found, EXPERIMENTS, every),
    }
    for path, shown in data.items():
        assert figures.drawn_from(path) == figures.digest_of(shown, figures.FIGURES[path.stem][1]), path
