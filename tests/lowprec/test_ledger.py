"""ledger.py: the bytes that it tells are those allocated, and why."""

import json

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, PEERS, RECIPES, batches, fp32_sums, net, start
from test_every_run import WAYS
from test_view import Rotary

from lowprec.recipes import SITES, Site, recipe

eager = common.eager


def allocated(run):
    """Bytes after one step: (weights, gradients, their fp32 sums and optimiser; the average; the sums alone).

    Shared memory counts once.
    """
    (x, y) = batches(1)[0]
    for _ in range(run.options.accumulate):
        run.backward(F.mse_loss(run(x, torch.arange(8.0)), y))
    weights = gradients = sum(p.nbytes for p in run.params)
    sums = sum(t.nbytes for t in fp32_sums(run).values())
    if not sums:
        gradients = sum(getattr(p, "acc_grad", p.grad).nbytes for p in run.params)
    run.step()
    states = {}
    for p in run.params:
        for t in run.optimizer.state[p].values():
            if torch.is_tensor(t) and t.dim():  # a step counter is no state of a weight
                states[t.data_ptr()] = t.nbytes
    for coder in getattr(run.optimizer, "coders", {}).values():
        states.update({t.data_ptr(): t.nbytes for t in getattr(coder, "tables", {}).values()})
    average = sum(t.nbytes for t in run.ema.shadow.values())
    return weights + gradients + sums + sum(states.values()), average, sums


def check_ledger(run):
    for coder in getattr(run.optimizer, "coders", {}).values():
        getattr(coder, "tables", {}).clear()  # those that other tests have made
    n = sum(p.numel() for p in run.params)
    ledger = run.ledger()
    state, average, sums = allocated(run)
    assert ledger.state_bytes * n == pytest.approx(state, abs=0.01)
    size = {row["site"]: row["bytes"] for row in ledger.rows}
    assert size["ema"] * n == pytest.approx(average, abs=0.01)
    assert size["accumulate"] * n == pytest.approx(sums, abs=0.01)
    assert json.loads(json.dumps(ledger.json()))["bytes_per_parameter"] == ledger.state_bytes
    assert f"{ledger.state_bytes:.2f} bytes a parameter" in str(ledger) and f"{n:,} parameters" in str(ledger)
    assert run.ledger().rows == ledger.rows, "a step changes nothing"
    return ledger


@pytest.mark.parametrize("name", WAYS)
def test_ledger_equals_the_bytes_allocated(name):
    # 24*24*9 values: 8-bit states begin at 4,096, and their last block is not full
    ledger = check_ledger(start(WAYS[name], net(width=24), accumulate=2 if name == "islands" else 1))
    assert [row["site"] for row in ledger.rows] == [site for site in SITES if site != "frozen"]


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "adafactor", "muon", common.Lion])
@pytest.mark.parametrize("name", ["kahan", "split", "stochastic opt8bit"])
def test_ledger_of_other_optimisers(name, optimizer):
    if "opt" in name and optimizer in ("adafactor", "muon"):
        return
    ledger = check_ledger(start(name, net(width=32), optimizer=optimizer))
    sites = {row["site"] for row in ledger.rows if row["bytes"]}
    assert sites & {"exp_avg", "momentum", "row_var"}


@pytest.mark.parametrize("optimizer", [*PEERS, "bitsandbytes"])
def test_ledger_of_peers(optimizer):
    pytest.importorskip(optimizer)
    name = "opt8bit" if optimizer == "bitsandbytes" else "pure_bf16"
    ledger = check_ledger(start(name, net(width=32), optimizer=optimizer))
    (why,) = [row["why"] for row in ledger.rows if row["site"] == "exp_avg_sq"]
    assert why.endswith(f"as {optimizer} does it")


def test_sites_of_a_task_have_their_rows():
    times = Site(("fp32", "bf16"), {"fp32": "all distinct", "bf16": "few of them"})
    for value, why in times.why.items():
        run = common.Precision(net(), recipe(more={"times": times}, sites=[f"times={value}"]))
        row = run.ledger().rows[-1]
        assert row == dict(site="times", value=value, bytes=None, why=why)
        assert f"times {value} " in " ".join(str(run.ledger()).split())


def buffers_row(flags, model):
    (row,) = [row for row in start(flags, model).ledger().rows if row["site"] == "buffers"]
    return row


def test_the_row_of_the_buffers():
    low = RECIPES["stochastic"]
    row = buffers_row(low, Rotary())
    # 8 frequencies, 16 means and 16 variances; the gains and offsets of the norm stay fp32 with them
    assert row["value"] == "fp32" and row["bytes"] is None
    assert row["why"] == "40 values; 1 norm layers with running statistics keep 32 weights in fp32"
    assert buffers_row(low, net())["why"] == "this net has none"
    assert buffers_row({}, Rotary())["why"] == SITES["buffers"].why["fp32"]
    cast = buffers_row(dict(low, sites=["buffers=bf16"]), Rotary())
    assert (cast["value"], cast["why"]) == ("bf16", SITES["buffers"].why["bf16"])


def test_weights_that_stay_fp32_beside_statistics_are_counted():
    model = Rotary()
    run = start("stochastic", model)
    assert model.norm.weight.dtype == torch.float32 and model.layer.weight.dtype == BF16
    n = sum(p.numel() for p in run.params)
    assert run.ledger().rows[0]["bytes"] * n == 2 * 2 * 272 + 4 * 32
    run.backward(run(torch.randn(16, 16)).square().mean())
    gradients = sum(p.grad.nbytes for p in run.params)
    run.step()
    held = sum(t.nbytes for p in run.params for t in run.optimizer.state[p].values() if torch.is_tensor(t))
    told = run.ledger().state_bytes * n
    assert told == pytest.approx(sum(p.nbytes for p in run.params) + gradients + held, abs=0.01)
