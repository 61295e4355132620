"""The claims table: its rules, with a fault planted for each, its figures, and CLAIMS.md as it is kept."""

import json
import re
import statistics

import numpy as np
import pytest
from lab import TOML, records_of, write
from scipy import stats

from experiments import report
from experiments.log import claims, definition, evidence, tables
from experiments.log.records import recorded
from lowprec.errors import Refused

ROOT = definition.ROOT
ITEMS = {"000": 40, "001": 41, "002": 41, "003": 50, "004": 49}  # of the five documents, as they were counted
ENTRY = dict(id="000.01", claim="It holds.", verdict="built", evidence=["file:notes.md"])
MEMORY = {
    "bench": "memory",
    "command": "python bench.py memory --out x.json",
    "machine": {"cpu": "a bench's CPU", "gpu": None},
    "results": [
        dict(net="n", flags="", weights=4.0, states=8.0, bytes_per_parameter=16.0),
        dict(net="n", flags="--opt8bit", weights=4.0, states=2.0, bytes_per_parameter=10.0),
    ],
}
KEPT = [
    dict(net="n", recipe=recipe, batch=batch, again=again, flags="", total=total * batch)
    for recipe, again, total in [("fp32", False, 100), ("bf16", False, 55), ("fp32", True, 20)]
    for batch in (2, 8)
]


@pytest.fixture(autouse=True)
def root(tmp_path):
    """experiments/ with 001-rounding without records and a benchmark's record; notes.md and a test beside."""
    write(tmp_path / "experiments", TOML)
    (tmp_path / "experiments" / "bench").mkdir()
    bench(tmp_path / "experiments", MEMORY)
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def test_there():\n    pass\n")
    return tmp_path / "experiments"


def bench(root, record):
    (root / "bench" / "memory.json").write_text(json.dumps(record))


def record_all(root, shift=(0.0, 0.9, 0.01)):
    write(root, TOML, records_of(definition.load("1", root), shift))


def plant(root, *entries, items=None, planned=()):
    """claims.toml of one document."""
    lines = [f"planned = {json.dumps(list(planned))}", '[documents.000]\ntitle = "It"']
    lines.append(f"items = {len(entries) if items is None else items}")
    for entry in entries:
        lines.append("[[claims]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    (root / "claims.toml").write_text("\n".join(lines))


def rows(root):
    """{item: Row} of claims.toml."""
    experiments = [definition.load(number, root) for number in definition.folders(root)]
    known = {key: record for e in experiments for key, record in recorded(e).items()}
    _, planned, found = claims.read(root / "claims.toml")
    there = evidence.Evidence(experiments, known, root, root.parent, planned)
    return {claim.id: claims.row_for(claim, there) for claim in found}


def row(root, planned=(), **entry):
    plant(root, {**ENTRY, **entry}, planned=planned)
    return rows(root)["000.01"]


# ---- Faults ------------------------------------------------------------------------------------------------

FAULTS = {
    "another key": (dict(note="x"), "unknown key 'note'"),
    "no claim": (dict(claim=""), "'claim' is missing"),
    "another type": (dict(evidence="file:notes.md"), "evidence is a list"),
    "another verdict": (dict(verdict="true"), "a verdict is a rule, or of holds"),
    "a verdict that is the program's": (dict(verdict="not measured yet"), "a verdict is a rule, or of"),
    "an empty rule": (dict(verdict="auto:", said="s"), "a rule names arms or figures"),
    "a rule not understood": (dict(verdict="auto:{001/fp32.mean} over 3", said="s"), "not understood"),
    "an expectation": (dict(verdict="auto:001/nearest", said="s", expects="same"), "expects is one of"),
    "in kind by hand": (dict(in_kind=True), "in_kind goes with a rule"),
    "nothing said": (dict(verdict="holds"), "what was measured is missing"),
    "no evidence": (dict(verdict="holds", said="so", evidence=[]), "what was measured has evidence"),
    "built of nothing": (dict(evidence=[]), "what is built has evidence"),
    "no reason": (dict(verdict="not measured"), "says why"),
    "two lines": (dict(claim="a\nb"), "'claim' is one line"),
    "a typed figure": (dict(said="it gains 0.25"), "'0.25' in 'said' is typed"),
    "a typed share": (dict(said="it gains 25 %"), "'25 %' in 'said' is typed"),
    "a typed factor": (dict(said="it is 2x as fast"), "'2x' in 'said' is typed"),
    "no reference": (dict(evidence=["notes.md"]), "'notes.md' is no reference"),
    "another kind": (dict(evidence=["page:notes.md"]), "is no reference"),
    "no file": (dict(evidence=["file:none.md"]), "no file none.md"),
    "no test file": (dict(evidence=["test:tests/test_no.py::test_there"]), "no file tests/test_no.py"),
    "no test": (dict(evidence=["test:tests/test_it.py::test_gone"]), "has no test 'test_gone'"),
    "no flag": (dict(evidence=["flag:--warp"]), "no flag --warp"),
    "no choice": (dict(evidence=["flag:--fp8_format e3m4"]), "has no value e3m4"),
    "no site": (dict(evidence=["flag:--set soul=bf16"]), "no such site"),
    "no value of a site": (dict(evidence=["flag:--set ema=int3"]), "no such value"),
    "no task": (dict(evidence=["flag:--task cook"]), "invalid choice"),
    "no experiment": (dict(evidence=["arm:009/fp32"]), "no experiment 009"),
    "no arm": (dict(evidence=["arm:001/warm"]), "no arm 'warm'; it has fp32, nearest, sampler"),
    "no figure": (dict(said="{001/nearest.warmth}"), "no figure 'warmth'"),
    "no record": (dict(evidence=["bench:speed"]), "no record experiments/bench/speed.json"),
    "no figure of a record": (dict(said="{bench:memory speed n / bf16}"), "no figure 'speed'"),
    "no row of a record": (dict(said="{bench:memory bytes n / --fp8}"), "no row for n, --fp8"),
    "too many arguments": (dict(said="{bench:memory bytes n / a / b / c}"), "these don't fit"),
    "a baseline decides": (dict(verdict="auto:001/fp32", said="s"), "its own baseline"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_with_the_items_number(fault, root):
    record_all(root)
    changed, said = FAULTS[fault]
    assert row(root).verdict == "built"
    with pytest.raises(Refused, match=re.escape(said)) as error:
        row(root, **changed)
    assert "000.01" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "ids, items, said",
    [
        (["000.01", "000.01"], 2, "000.01 stands there twice"),
        (["000.01"], 2, "item 000.02 has no entry"),
        (["000.01", "000.09"], 2, "000.09 is no item"),
        (["000.01", "005.01"], 1, "005.01 is no item"),
        (["000.02", "000.01"], 2, "in the order of their numbers"),
    ],
)
def test_every_item_has_one_entry(ids, items, said, root):
    plant(root, *({**ENTRY, "id": name} for name in ids), items=items)
    with pytest.raises(Refused, match=re.escape(said)):
        rows(root)


DOCUMENT = '[documents.000]\ntitle = "It"\nitems = 1\n'


@pytest.mark.parametrize("text", ["claims = [", "", "[more]", f"claims = [1]\n{DOCUMENT}", "documents = 3"])
def test_a_file_that_is_no_table_of_claims(text, root):
    (root / "claims.toml").write_text(text)
    with pytest.raises(Refused, match="claims.toml"):
        rows(root)


def test_a_fault_ends_report_py_with_one_line(root, capsys):
    plant(root, {**ENTRY, "evidence": ["file:none.md"]})
    assert report.main([], root, root.parent / "EXPERIMENTS.md") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "item 000.01: there is no file" in said
    assert not (root.parent / "EXPERIMENTS.md").exists() and not (root.parent / "CLAIMS.md").exists()


# ---- Verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arms, expects, found",
    [
        ("001/nearest", "equal", "does not hold"),
        ("001/sampler", "equal", "holds"),
        ("001/nearest, 001/sampler", "equal", "does not hold"),
        ("001/nearest", "worse", "holds"),
        ("001/sampler", "worse", "does not hold"),
        ("001/sampler", "better", "does not hold"),
    ],
)
def test_a_rule_follows_the_verdicts_of_its_arms(arms, expects, found, root):
    entry = dict(verdict=f"auto:{arms}", expects=expects, said="{001/sampler.verdict}")
    assert row(root, **entry).verdict == "not measured yet"
    record_all(root)
    assert row(root, **entry).verdict == found
    assert row(root, **entry, in_kind=True).verdict == ("holds in kind" if found == "holds" else found)


def test_arms_that_the_seeds_do_not_settle_are_undecided(root):
    experiment = definition.load("1", root)
    records = records_of(experiment)
    for r in records:
        if r["arm"] == "nearest":
            r["scores"]["ema"]["frechet"] += 3 * (-1) ** r["seed"]
    write(root, TOML, records)
    assert row(root, verdict="auto:001/nearest, 001/sampler", said="so").verdict == "undecided"


def test_arms_without_records_do_not_count_beside_others(root):
    experiment = definition.load("1", root)
    write(root, TOML, [r for r in records_of(experiment) if r["arm"] != "sampler"])
    assert row(root, verdict="auto:001/nearest, 001/sampler", said="so").verdict == "does not hold"
    assert row(root, verdict="auto:001/sampler", said="so").verdict == "not measured yet"


@pytest.mark.parametrize(
    "rule, found",
    [
        ("{bench:memory bytes n / --opt8bit} from 9 to 11", "holds"),
        ("{bench:memory bytes n / --opt8bit} above 10.5", "does not hold"),
        ("{bench:memory saved n / --opt8bit / states} below 0.76", "holds"),
        ("{bench:memory saved n / --opt8bit} below 0.5 and {bench:memory bytes n} above 17", "does not hold"),
        ("{001/nearest.mean} above 1", "holds"),
        ("{001/sampler.difference} from -0.1 to 0.1", "holds"),
    ],
)
def test_a_rule_compares_figures(rule, found, root):
    record_all(root)
    assert row(root, verdict=f"auto:{rule}", said="so").verdict == found


BETTER = [("equal", "holds"), ("better", "holds"), ("worse", "does not hold")]


@pytest.mark.parametrize("expects, found", BETTER)
def test_a_better_arm(expects, found, root):
    record_all(root, shift=(0.0, -0.9, 0.01))
    assert row(root, verdict="auto:001/nearest", expects=expects, said="so").verdict == found


@pytest.mark.parametrize("said, names", [("by {001/nearest.difference}", []), ("so", ["arm:001/nearest"])])
@pytest.mark.parametrize("verdict", ["holds", "holds in kind", "does not hold"])
def test_a_typed_verdict_waits_for_its_records(verdict, said, names, root):
    entry = dict(verdict=verdict, said=said, evidence=names)
    waiting = row(root, **entry)
    assert waiting.verdict == "not measured yet"
    assert "`python experiments/run.py 001` will tell" in waiting.text
    assert not waiting.machines and "?" not in waiting.text
    record_all(root)
    told = row(root, **entry)
    assert told.verdict == verdict and told.machines == {"c"}


def test_what_is_not_measured_may_name_what_has_no_records(root):
    entry = dict(verdict="not measured", why="no GPU", said="near it {001/nearest.mean}")
    assert row(root, **entry).verdict == "not measured" and "near it" not in row(root, **entry).text
    record_all(root)
    assert row(root, **entry).text.startswith("Near it ") and "No GPU." in row(root, **entry).text
    entry = dict(verdict="not measured", why="no GPU; nearest has {001/nearest.mean}")
    assert row(root, **entry).text.startswith("No GPU; nearest has 2.")


def test_what_is_planned_may_be_missing_until_it_has_records(root):
    late = dict(verdict="auto:009/bf16", said="{009/bf16.difference}")
    assert row(root, planned=["009"], **late).verdict == "not measured yet"
    misnamed = dict(verdict="auto:001/warm", said="{001/warm.difference}")
    assert row(root, planned=["001"], **misnamed).verdict == "not measured yet"
    record_all(root)
    with pytest.raises(Refused, match="no arm 'warm'"):
        row(root, planned=["001"], **misnamed)
    speed = dict(verdict="auto:{bench:speed kept n / bf16} below 1", said="so")
    assert "python bench.py speed" in row(root, planned=["bench:speed"], **speed).text
    share = "{bench:memory kept n / bf16}"
    kept = dict(verdict=f"auto:{share} from 0.4 to 0.6", said=share)
    assert "`python bench.py memory` will tell" in row(root, planned=["bench:memory"], **kept).text
    with pytest.raises(Refused, match="no row for"):
        row(root, **kept)
    bench(root, {**MEMORY, "results": MEMORY["results"] + KEPT})
    assert row(root, **kept).verdict == "holds" and row(root, **kept).machines == {"a bench's CPU"}


# ---- Figures -----------------------------------------------------------------------------------------------


def told(root, reference):
    return row(root, said=f"{{{reference}}}").text.partition(" (")[0].removesuffix(".")


def test_figures_of_an_arm(root):
    records = records_of(definition.load("1", root))
    for r in records:
        r["activation_bytes"] = 2**20 * (2.5 if r["arm"] == "nearest" else 5)
    write(root, TOML, records)
    raw = [json.loads(line) for line in (root / "001-rounding/results.jsonl").read_text().splitlines()]
    own = {}
    for r in raw:
        own.setdefault(r["arm"], []).append(r["scores"]["ema"]["frechet"])
    x, base = np.array(own["nearest"]), np.array(own["fp32"])
    d = x - base
    half = stats.t.ppf(0.975, 5) * d.std(ddof=1) / 6**0.5
    for figure, wanted in {
        "mean": f"{x.mean():.3f}",
        "baseline": f"{base.mean():.3f}",
        "difference": f"{d.mean():+.3f}",
        "interval": f"[{d.mean() - half:+.3f}, {d.mean() + half:+.3f}]",
        "verdict": "worse",
        "n": "6",
        "margin": "0.5",
        "times": f"{x.mean() / base.mean():.1f}",
        "change": f"{100 * d.mean() / base.mean():+.1f} %",
        "loss": "0.4250",
        "loss_change": "+0.0 %",
        "bytes": "16",
        "speed": "1.0",
        "kept": "2.5",
        "kept_share": "50 %",
    }.items():
        assert told(root, f"001/nearest.{figure}") == wanted, figure


def test_what_older_records_do_not_hold_is_one_line(root):
    record_all(root)
    for figure in ("kept", "covered", "survival"):
        with pytest.raises(Refused, match=re.escape(f"{{001/nearest.{figure}}}") + "|no score"):
            told(root, f"001/nearest.{figure}")


def test_figures_of_a_bench(root):
    bench(root, {**MEMORY, "results": MEMORY["results"] + KEPT})
    for words, wanted in {
        "bytes n / --opt8bit": "10.00",
        "bytes n": "16.00",
        "bytes n /  / states": "8.00",
        "saved n / --opt8bit": "38 %",
        "saved n / --opt8bit / states": "75 %",
        "share n /  / states": "50 %",
        "kept n / bf16": "55 %",
        "again n / fp32": "20 %",
        "fits n / bf16": "1.8",
        "billion n / fp32 / ": "24.0",
        "billion n / bf16 / --opt8bit": "14.4",
    }.items():
        assert told(root, f"bench:memory {words}") == wanted, words


def test_figures_of_the_systems(root):
    def system(name, ms, total, **more):
        at = dict(table="t", name=name, ms=ms, items_a_step=8, epoch_steps=10, bytes_per_parameter=16.0)
        return {**at, "kept": {"total": total}, "score": ["iou", 0.5], **more}

    results = [system("a", [100.0, 104.0, 96.0], 800), system("b, c", [50.0], 600, items_a_step=16)]
    results.append(dict(table="t", name="refused", ms=[], note="not here"))
    record = {**MEMORY, "bench": "systems", "results": results}
    (root / "bench" / "systems.json").write_text(json.dumps(record))
    for words, wanted in {
        "speed t / b, c": "4.00",
        "kept t / b, c": "75 %",
        "fits t / b, c": "2.7",
        "rate t / a": "80",
        "epoch t / a": "1.0",
        "bytes t / a": "16.00",
        "score t / a": "0.500",
    }.items():
        assert told(root, f"bench:systems {words}") == wanted, words
    with pytest.raises(Refused, match="no row for refused"):
        told(root, "bench:systems speed t / refused")


def test_figures_of_the_loops(root):
    results = [dict(net="bare operation", loop="matmul", kind="bf16", ratio=3.6)]
    shared = dict(net="DiT S/8, 64x64", kind="bf16", ms=[1.0])
    results += [dict(shared, loop=loop, ratio=ratio) for loop, ratio in LOOPS.items()]
    record = {**MEMORY, "bench": "peers", "results": results}
    (root / "bench" / "peers.json").write_text(json.dumps(record))
    for loop, ratio in LOOPS.items():
        assert told(root, f"bench:peers speed DiT S/8, 64x64 / {loop} / bf16") == f"{ratio:.2f}"
    with pytest.raises(Refused, match="no row for GPT"):
        told(root, "bench:peers speed GPT / ours / bf16")


LOOPS = {"bare loop": 1.349, "ours": 1.15}

# ---- The page ----------------------------------------------------------------------------------------------


def test_the_page_counts_and_lists_what_does_not_hold(root):
    record_all(root)
    wrong = dict(id="000.01", claim="a | b", verdict="auto:001/nearest", said="bf16 gains {001/nearest.mean}")
    plant(root, wrong, {**ENTRY, "id": "000.02"})
    document = root.parent / "EXPERIMENTS.md"
    assert report.main([], root, document) == 0
    page = (root.parent / "CLAIMS.md").read_text()
    assert "make 2 statements" in page and "**does not hold** 1 (" in page and "**built** 1 (" in page
    assert "- **000.01** a | b bf16 gains " in page
    assert "| 000.01 | a \\| b | bf16 gains " in page and "| c | does not hold |" in page
    assert "[001](experiments/001-rounding/README.md)" in page
    assert 'id="experiment-001"' in document.read_text()
    assert "| 000.02 | It holds. | [notes.md](notes.md) | - | built |" in page
    assert report.main(["--check"], root, document) == 0
    record_all(root, shift=(0.0, 0.0, 0.01))
    assert report.main(["--check"], root, document) == 1
    assert (root.parent / "CLAIMS.md").read_text() == page, "--check writes nothing"
    assert report.main([], root, document) == 0
    assert "does not hold" not in (root.parent / "CLAIMS.md").read_text()


def test_without_claims_there_is_no_page(root):
    assert report.main([], root, root.parent / "EXPERIMENTS.md") == 0
    assert not (root.parent / "CLAIMS.md").exists()


# ---- This repository's -------------------------------------------------------------------------------------

REAL = definition.HERE


def test_every_item_of_the_documents_is_there():
    documents, _, found = claims.read(REAL / "claims.toml")
    assert {number: document["items"] for number, document in documents.items()} == ITEMS
    wanted = [f"{number}.{i:02}" for number, items in ITEMS.items() for i in range(1, items + 1)]
    assert [claim.id for claim in found] == wanted and len(wanted) == 221


def test_the_page_is_what_the_records_give():
    loaded = {}
    experiments = [definition.load(number, loaded=loaded) for number in definition.folders()]
    known = {key: record for e in experiments for key, record in recorded(e).items()}
    (path, text), *_ = claims.pages(experiments, known).items()
    assert path.read_text() == text, "run python experiments/report.py"
    for file in set(re.findall(r"\]\(([^)#]+)", text)):
        assert (ROOT / file).exists(), file


def test_figures_of_the_page_are_those_of_the_log():
    """Means and differences of arms with a score of their own, from the lines of results.jsonl."""
    _, _, found = claims.read(REAL / "claims.toml")
    page = (ROOT / claims.PAGE).read_text()
    checked = 0
    for claim in found:
        line = next(line for line in page.splitlines() if line.startswith(f"| {claim.id} "))
        for number, name, figure in re.findall(r"\{(\d{3})/([\w.+=-]+)\.(mean|difference)\}", claim.said):
            arm = definition.load(number).arm(name)
            own, base = (raw_scores(a) for a in (arm, arm.experiment.arm(arm.baseline)))
            pairs = [own[seed] - base[seed] for seed in own if seed in base]
            if len(pairs) < 2 or line.endswith("| not measured yet |"):
                continue
            x = statistics.fmean(own.values()) if figure == "mean" else statistics.fmean(pairs)
            places = tables.decimals_of(arm.margin)
            assert (f"{x:.{places}f}" if figure == "mean" else f"{x:+.{places}f}") in line, (claim.id, name)
            checked += 1
    assert checked > 40


def raw_scores(arm):
    """{seed: score} of an arm, read without records.py; a run that diverged is infinite."""
    weights, _, name = arm.metric.rpartition(".")
    path, found = arm.source.experiment.folder / "results.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        r = json.loads(line)
        if r["arm"] == arm.source.name and r["seed"] in arm.experiment.seeds:
            holder = r["scores"].get(weights, {}) if weights else r
            x = float("inf") if "failed" in r else holder[name]
            found[r["seed"]] = statistics.fmean(x) if isinstance(x, list) else x  # a loss by timestep
    return found


def test_both_first_pages_link_to_the_table():
    for name in ("README.md", "EXPERIMENTS.md"):
        assert "(CLAIMS.md)" in (ROOT / name).read_text().split("\n## ")[0], name
