"""Trials: pairs differ by their recipe alone, a kill loses one training, intervals hold what they promise,
and bad input is one line. Forecasts: what is foreseen is what then happens.
"""

import json

import common
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import lowprec
import lowprec.__main__ as command
import train
from lowprec.optimizers.rounded import AdamW
from lowprec.trials import intervals

eager = common.eager
MINE = """
import itertools
import os
import torch
import torch.nn.functional as F
from torch import nn

TARGET = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
left = iter(range(int(os.environ.get("CALLS", 10**9))))

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 2))

def loss(model, batch):
    if next(left, None) is None:
        raise KeyboardInterrupt
    return F.mse_loss(model(batch + 0.01 * torch.randn_like(batch)), torch.tanh(batch @ TARGET))

def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(16, 8, generator=draw)

def held_out():
    return itertools.islice(batches(99), 2)

options = dict(lr=5e-4)  # half a gap of bf16 is more than most steps then
"""
FLAGS = "--steps 40 --within 2 --budget 5m --recipes pure_bf16".split()


def tried(folder, monkeypatch, mine=MINE, flags=FLAGS):
    """The exit status of a trial in a folder of its own."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(mine)
    return command.main(["trial", "mine.py", *flags])


def losses(folder):
    runs = json.loads((folder / "trial-mine.json").read_text())["runs"]
    return {(name, seed): result["loss"] for name, of in runs.items() for seed, result in of.items()}


# ---- A trial -----------------------------------------------------------------------------------------------


def test_a_trial_tells_recipes_apart_and_goes_on_after_a_kill(tmp_path, monkeypatch, capsys):
    # a file of which no training was finished stands in nobody's way
    assert tried(tmp_path / "whole", monkeypatch, MINE.replace("0.01", "'0.01'")) == 2
    assert tried(tmp_path / "whole", monkeypatch) == 0
    rows = {row["recipe"]: row for row in json.loads(open("trial-mine.json").read())["rows"]}
    assert abs(rows["a last bit moved"]["change"]) < 0.1 * abs(rows["bf16"]["change"])
    assert rows["bf16"]["low"] < 0 < rows["bf16"]["high"]
    nearest = rows["pure_bf16"]
    assert nearest["low"] > 1 and "worse, by" in nearest["verdict"]
    assert nearest["whole_low"] < nearest["change"] < nearest["whole_high"] and not rows["bf16"]["whole_low"]
    assert (tmp_path / "whole" / "trial-mine.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert "not written" in said and f"{nearest['whole_low']:+.2g} to {nearest['whole_high']:+.2g}" in said

    # killed in its third training; the two before are kept
    monkeypatch.setenv("CALLS", "160")
    assert tried(tmp_path / "killed", monkeypatch) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(losses(tmp_path / "killed")) == 2
    monkeypatch.delenv("CALLS")
    assert tried(tmp_path / "killed", monkeypatch) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")

    assert tried(tmp_path / "whole", monkeypatch, MINE.replace("0.01", "0.02")) == 2
    assert "holds a trial with version" in capsys.readouterr().err
    assert command.main("advise --params 1e6 --trial trial-mine.json".split()) == 0
    assert f"{rows['pure_bf16']['change']:+.2f} %" in capsys.readouterr().out


BAD = {
    "no-build": (("def build", "def make"), (), "has no function build"),
    "build-none": (("    return nn.Sequential", "    nn.Sequential"), (), "build() returned a NoneType"),
    "build-raises": (("    return nn", "    1 / 0\n    return nn"), (), "build() raised ZeroDivisionError"),
    "loss-raises": (("model(batch +", "model(None +"), (), "of batches(0) raised TypeError"),
    "one-held-out": (("islice(batches(99), 2)", "chain([None])"), (), "of a batch of held_out() raised"),
    "no-data": (("    while True:", "    while False:"), (), "batches(0) yields nothing"),
    "data-end": (("    while True:", "    for _ in range(7):"), (), "batches(0) ended after 7 of 40 steps"),
    "nothing-held-out": (("99), 2)", "99), 0)"), (), "held_out() yields nothing"),
    "not-finite": (("F.mse_loss(", "float('nan') * F.mse_loss("), (), "the reference's loss is not finite"),
    "learns-nothing": (("lr=5e-4", "lr=1e-9"), (), "too short to tell"),
    "budget": ((), ("--budget", "1s", "--steps", "20000"), "a pair of each recipe takes about"),
    "no-time": ((), ("--budget", "soon"), "write a time, as 90s"),
    "recipe": ((), ("--recipes", "pure_bf61"), "there is no flag pure_bf61"),
    "file": ((), ("--from", "nowhere.pt"), "no such file"),
    "other-net": ((), ("--from", "other.pt"), "another net's"),
    "option": (("dict(lr", "dict(rate"), (), "unexpected keyword argument 'rate'"),
}


@pytest.mark.parametrize("change, flags, said", BAD.values(), ids=BAD)
def test_bad_input_is_one_line(change, flags, said, tmp_path, monkeypatch, capsys):
    torch.save({"weight": torch.zeros(2, 3)}, tmp_path / "other.pt")
    mine = MINE.replace(*change) if change else MINE
    assert tried(tmp_path, monkeypatch, mine, [*FLAGS, *flags]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("lowprec: ") and said in line


def test_one_net_and_one_lot_of_batches_for_all_seeds_are_no_pairs_and_the_net_stays():
    net, batch = nn.Linear(3, 2), torch.ones(4, 3)
    before = net.weight.detach().clone()
    functions = (lambda: net), (lambda model, x: model(x).square().mean()), lambda seed: [batch] * 9
    options = dict(recipes=["pure_bf16"], steps=9, lr=0.1, quiet=True)
    common.refused(lambda: lowprec.trial(*functions, lambda: [batch], **options), "same with two seeds")
    assert net.weight.equal(before)


def test_a_trial_of_a_task_of_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--trial --trial_steps 4 --within 500 --recipes bf16"
    task = "--task classify --steps 400 --batch_size 8 --lr 1e-2 --warmup 0"
    assert train.main(f"{flags} {task}".split()) == 0
    assert "4 steps a training" in capsys.readouterr().out


def test_intervals_hold_the_truth_although_pairs_are_added_until_they_are_narrow():
    draws = np.random.default_rng(0).normal(0.5, 0.4, (4000, intervals.LOOKS[-1]))
    waiting, held = np.ones(len(draws), bool), 0
    for n in intervals.LOOKS:
        mean, spread = draws[:, :n].mean(1), draws[:, :n].std(1, ddof=1)
        half = stats.t.isf(intervals.LEVEL_OF_A_LOOK / 2, n - 1) * spread / n**0.5
        done = waiting & ((half <= 0.3) | (n == intervals.LOOKS[-1]))
        held += (np.abs(mean - 0.5) <= half)[done].sum()
        waiting &= ~done
    assert 0.95 < held / len(draws) < 0.995
    few = intervals.mean_at_level(draws[0, :4], intervals.LEVEL_OF_A_LOOK)
    n = 4
    assert few.half == pytest.approx(stats.t.isf(0.00605, n - 1) * draws[0, :n].std(ddof=1) / n**0.5)


def test_a_whole_training_is_foreseen_as_one_more_setting_is():
    recorded = [(0.5, 1.0), (2.0, 30.0), (-0.1, 0.3), (1.0, 9.0)]
    gaps = [np.arcsinh(whole) - np.arcsinh(tried) for tried, whole in recorded]
    half = stats.t.isf(0.1, 3) * np.std(gaps, ddof=1) * (1 + 1 / 4) ** 0.5
    low, high = intervals.of_whole_training([0.7, 0.7], recorded)
    middle = np.arcsinh(0.7) + np.mean(gaps)
    assert np.arcsinh([low, high]) == pytest.approx([middle - half, middle + half])
    wider = intervals.of_whole_training([0.6, 0.8], recorded)
    assert wider[0] < low and high < wider[1]


# ---- A forecast --------------------------------------------------------------------------------------------


def bowl(update, steps=1200, size=4096, rate=5e-3):
    """(excess loss of a settled bowl, ceiling that is foreseen), means over some looks."""
    optimum = torch.rand(size, generator=torch.Generator().manual_seed(0)) + 1
    net = nn.Module()
    net.w = nn.Parameter(optimum.to(torch.float32 if update is None else torch.bfloat16))
    start = net.w.detach().float().clone()
    optimizer = AdamW(net.parameters(), lr=rate, weight_decay=0.0, update=update or "nearest")
    draw = torch.Generator().manual_seed(1)
    excess, ceilings = [], []
    for step in range(steps):
        away = net.w.detach().float() - start
        net.w.grad = (away + torch.randn(size, generator=draw)).to(net.w.dtype)
        optimizer.step()
        if step >= steps // 2 and step % 50 == 0:
            excess.append(away.square().sum().item() / 2)
            ceilings.append(lowprec.foresee(net, optimizer).ceiling)
    return sum(excess) / len(excess), sum(ceilings) / len(ceilings)


def test_the_ceiling_is_what_stochastic_writes_add_in_a_settled_bowl():
    exact, ceiling = bowl(None)
    written, _ = bowl("stochastic")
    # a step is a tenth of a gap here; of smaller steps it is nearer to 1
    assert 0.7 < (written - exact) / ceiling < 1


def trained_net(steps=20):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        net(common.draw(4, 8, seed=step)).square().mean().backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_foresees_what_its_optimiser_does(named, tmp_path, capsys):
    net, optimizer = trained_net()
    if named:  # the states of a file are then found by name: the last layer's first
        state = optimizer.state_dict()
        parameters = list(net.named_parameters())[::-1]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        state["state"] = {5 - key: value for key, value in state["state"].items()}
        state["param_groups"][0]["param_names"] = [name for name, _ in parameters]
        optimizer.load_state_dict(state)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    of_file, live = lowprec.foresee(tmp_path / "both.pt"), lowprec.foresee(net, optimizer)
    assert of_file.ceiling == pytest.approx(live.ceiling) and of_file.noise == pytest.approx(live.noise)
    # gains of 1 are half a gap of bf16 or more away from their neighbours
    by_name = {one.name: live.unwritten(tensors=[one]) for one in live.tensors}
    assert by_name["1.weight"] == 1 and 0 < by_name["0.weight"] < 1
    assert "1.weight" in str(of_file) and of_file.unwritten([0.01]) > live.unwritten() > 0

    torch.save(net.state_dict(), tmp_path / "weights.pt")
    assert command.main(["foresee", str(tmp_path / "weights.pt")]) == 2
    assert "no moments of Adam yet" in capsys.readouterr().err


def test_a_checkpoint_of_ours_foresees_its_average_and_starts_a_trial(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    scope = {}
    exec(MINE, scope)
    run = lowprec.Precision(scope["build"](), lr=1e-3, ema_decay=0.99)
    for step in range(30):
        run.backward(run(common.draw(4, 8, seed=step)).square().mean())
        run.step()
    torch.save({"step": 30, "precision": run.state_dict()}, tmp_path / "checkpoint.pt")
    found = lowprec.foresee(tmp_path / "checkpoint.pt", ema_decay=0.99)
    share = found.average
    slower = lowprec.foresee(tmp_path / "checkpoint.pt", ema_decay=0.9999).average
    assert 0 < share < 0.9 < slower and f"{share:.1%} of its movement is not written" in str(found)
    flags = ["--from", "checkpoint.pt", "--steps", "30", "--within", "500", "--recipes", "bf16"]
    assert tried(tmp_path, monkeypatch, flags=flags) == 0, capsys.readouterr()


def test_a_watch_foresees_writes():
    net, optimizer = trained_net()
    watch = lowprec.Watch(net, optimizer, writes=True, products=["nvfp4"])
    assert str(lowprec.foresee(net, optimizer, products=watch.products)) in str(watch)
    assert "products in FP8 and FP4: not known" in str(lowprec.foresee(net, optimizer))
    net(common.draw(4, 8, seed=0)).square().mean().backward()
    optimizer.step()
    assert "in nvfp4" in str(watch) and "2 nn.Linear layers" in str(watch)
    new = torch.optim.AdamW(net.parameters())
    assert "no moments of Adam yet" in str(lowprec.Watch(net, new, writes=True))
