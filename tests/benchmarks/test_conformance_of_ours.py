"""bench.py conformance: ours keeps to what it claims, and tools to what experiments measured; bad input."""

import json

import common
import pytest
import test_conformance
import torch
from test_conformance import SMALL, WRITES, found

import bench
from benchmarks import averages, conformance_command, subjects
from benchmarks.allocated import state_bytes
from benchmarks.conformance_command import AVERAGE_CHECKS, CHECKS, answer_of

eager, small = common.eager, test_conformance.small

# ---- Ours and others ---------------------------------------------------------------------------------------

# what ours is known to lose: to nearest all, with Kahan the moments, which it writes to nearest
LOSES = {"nearest": {*WRITES, "decay alone", "v after a drop"}, "kahan": {"v after a drop"}}
# what it does wrong today: codes of 4 bits have no value under a sixteenth of their block's largest
WRONG = {"stochastic-4bit": {"v after a drop"}}


OURS = "nearest stochastic kahan split stochastic-8bit stochastic-4bit".split()


@pytest.mark.parametrize("name", OURS)
def test_ours_keeps_to_what_it_claims(name):
    if "bit" in name:
        pytest.importorskip("bitsandbytes" if "8bit" in name else "torchao")
    checks = set(CHECKS) - (set() if name == "nearest" else {"write of 1/10 ulp", "write of 1/2 ulp"})
    findings = found(subjects.subject_of_name(f"ours:{name}", "cpu"), *checks)
    told = {check: result.said for check, result in findings.items()}
    assert set(told) == LOSES.get(name, set()) | WRONG.get(name, set()), told


def test_averages_arrive_or_stand_still():
    shown = {}
    for name in ("ours:ema-fp32", "ours:ema-bf16", "ours:ema-bf16-stochastic", "torch-ema"):
        subject = subjects.subject_of_name(name, "cpu")
        results = {check: answer_of(ask, subject) for check, ask in AVERAGE_CHECKS.items()}
        findings = [check for check, result in results.items() if result.verdict == "finding"]
        stands = name in ("ours:ema-bf16", "torch-ema")
        assert findings == (["way, distance"] if stands else []), name
        assert ("does not arrive" in results["way, distance"].said) == stands
        shown[name] = results["way, distance"].figures["share"]
    assert shown["ours:ema-bf16"] < 0.9 and abs(shown["ours:ema-fp32"] - 1) < 1e-4


@pytest.mark.parametrize("name", subjects.TOOLS)
def test_rules_of_tools_are_measured_as_the_experiment_measures_them(name):
    rule = subjects.TOOLS[name]
    rules = {rule: averages.RULES[rule]}
    wanted = averages.measure_rules(subjects.AVERAGE_DECAY, *SMALL.path, rules=rules)[rule]
    found = answer_of(AVERAGE_CHECKS["way, distance"], subjects.subject_of_name(name, "cpu")).figures
    assert (found["share"], found["distance"]) == pytest.approx(wanted, abs=1e-2)


def test_bytes_of_states_that_hold_other_tensors_are_counted_once():
    pytest.importorskip("torchao")
    subject = subjects.subject_of_name("torchao-8bit", "cpu")
    params, optimizer = subject.start([torch.ones(256, 256)])
    subjects.feed(params, optimizer, [torch.ones(256, 256)])
    # codes of both moments, a scale a block of 256, the two tables of 256 values
    assert state_bytes(optimizer) == pytest.approx(2 * (65536 + 4 * 256 + 4 * 256), rel=0.02)


# ---- The command -------------------------------------------------------------------------------------------

MINE = """
import torch

class Mine(torch.optim.SGD):
    def __init__(self, params, lr, momentum=0.0, dtype=None):
        super().__init__(params, lr=lr, momentum=momentum)
        assert dtype in (None, torch.float32)

class Seeded(torch.optim.AdamW):
    def __init__(self, params, lr, weight_decay=0.0, seed=0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)

class HandsOn(Seeded):
    def __init__(self, params, more=0, **options):
        super().__init__(params, **options)

class Groups(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, **{**options, "eps": 1e-9})

class NoRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

class Slow:
    def __init__(self, parameters, decay, update_after=0):
        self.decay = decay
        self.shadow_params = [p.detach().float().clone() for p in parameters]
    def update(self, parameters):
        for s, p in zip(self.shadow_params, parameters):
            s.lerp_(p.detach().float(), 1 - self.decay)

class NeverMoves(Slow):
    def update(self, parameters):
        raise RuntimeError("no step")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import no_such_package")
    (tmp_path / "script_that_ends.py").write_text("import sys\nsys.exit(5)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_command_writes_every_figure_and_its_status_tells(mine, capsys):
    names = ["mine.py:Slow(decay=0.99)", "mine.py:Mine(momentum=0.9, dtype=torch.float32)", "ours:ema-fp32"]
    argv = ["conformance", "--device", "cpu", "--out", "found.json"]
    assert bench.main([*argv, names[0], names[2]]) == 0
    assert "all holds" in capsys.readouterr().out
    assert bench.main([*argv, *names]) == 1
    out = capsys.readouterr().out
    record = json.loads((mine / "found.json").read_text())
    assert record["bench"] == "conformance" and record["settings"]["names"] == names
    rows = record["results"]
    lists = zip(names, (AVERAGE_CHECKS, CHECKS, AVERAGE_CHECKS), strict=True)
    wanted = [(name, check) for name, checks in lists for check in checks]
    assert [(row["name"], row["check"]) for row in rows] == wanted
    biased = next(row for row in rows if row["check"] == "write of 1/3 ulp")
    assert biased["verdict"] == "finding" and biased["figures"]["draws"] > 100_000
    assert f"{names[1]}: writes are biased: nothing of a step of 0.33 ulp is written" in out
    assert all(check in out for check in (*CHECKS, *AVERAGE_CHECKS))
    assert "| write of 1/3 ulp | **" in conformance_command.table(rows, names[1:2])


def test_an_optimiser_is_given_what_its_constructor_takes(mine):
    assert subjects.subject_of_name("mine.py:Seeded", "cpu").takes == {"lr", "weight_decay", "seed"}
    assert subjects.subject_of_name("mine.py:Groups", "cpu").takes == {"lr", "betas", "weight_decay"}
    assert subjects.subject_of_name("mine.py:Mine", "cpu").takes == {"lr"}
    given = subjects.subject_of_name("torch.optim:AdamW(betas=(0.8, 0.9), lr=3.0)", "cpu")
    group = given.start([torch.ones(2)], 0.5)[1].param_groups[0]
    assert group["betas"] == given.betas == (0.8, 0.9) and group["lr"] == 0.5, "lr belongs to the checks"


@pytest.mark.parametrize(
    "name, words",
    [
        ("nonsense", "write module:Class"),
        ("ours:fastest", "ours are nearest, stochastic"),
        ("no_such_package:AdamW", "can't be imported"),
        ("broken.py:AdamW", "no_such_package"),
        ("torch.optim:Adamw", "has no class Adamw"),
        ("torch.nn:Linear", "neither derives from torch.optim.Optimizer nor is an average"),
        ("torch.optim:AdamW(eps=one)", "plain values"),
        ("torch.optim:AdamW(eps=1", "plain values"),
        ("torch.optim:AdamW(decay=1)", "unexpected keyword argument 'decay'"),
        ("torch.optim:AdamW(eps=-1)", "Invalid epsilon"),
        ("mine.py:NoRate", "takes no lr"),
        ("mine.py:HandsOn(more=1)", "unexpected keyword argument 'betas'"),
        ("mine.py:NeverMoves", "can't be stepped with bf16 weights: RuntimeError: no step"),
        ("torch.optim:LBFGS", "argument: 'closure'"),
        ("script_that_ends:Mine", "can't be imported (it calls sys.exit(5))"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(mine, name, words, capsys):
    assert bench.main(["conformance", name, "--device", "cpu", "--out", "found.json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and not (mine / "found.json").exists()
    assert err.count("\n") == 1 and err.startswith(f"bench.py: {name.partition('(')[0]}") and words in err


def test_a_package_that_is_absent_is_a_line_unless_it_was_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(subjects, "SUBJECT_NAMES", ["ours:ema-fp32", "absent"])
    monkeypatch.setitem(subjects.PEER_CLASSES, "absent", "no_such_package:AdamW")
    assert bench.main(["conformance", "--device", "cpu"]) == 0
    assert "absent: not asked: absent: no_such_package can't be imported" in capsys.readouterr().out
    assert bench.main(["conformance", "absent"]) == 2
