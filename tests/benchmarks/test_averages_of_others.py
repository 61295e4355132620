"""bench.py averages: rules of other tools, against the tools where they are here; what is measured."""

import itertools
import json

import pytest
import torch
from common import BF16, same

import bench
from benchmarks.averages import DECAYS, RULES, diffusers_decay, measure_rules, weight_path


def steps(count=60, n=400):
    return list(weight_path(count, n))


@pytest.mark.parametrize("foreach", [False, True])
def test_diffusers_rule_is_bit_for_bit_that_of_the_package(foreach, decay=0.9):
    EMAModel = pytest.importorskip("diffusers.training_utils").EMAModel
    start, *rest = steps()
    p = torch.nn.Parameter(start.clone())
    theirs = EMAModel([p], decay=decay, foreach=foreach)
    rule, ours = RULES["diffusers, foreach" if foreach else "diffusers"], start
    for step, weights in enumerate(rest, 1):
        p.data.copy_(weights)
        theirs.step([p])
        assert theirs.cur_decay_value == diffusers_decay(decay, step)
        ours = rule.update(ours, weights, 1 - diffusers_decay(decay, step), None)
        assert same(ours, theirs.shadow_params[0]), step
    assert ours.dtype == BF16


def test_fp32_arrives_bf16_to_nearest_does_not_and_stochastic_rounding_does():
    found = measure_rules(0.999, steps=1500, n=2000)
    for name in ("fp32, constant", "fp32, warm-up"):
        share, distance = found[name]
        assert share == pytest.approx(1, abs=1e-4) and distance < 1e-4
    for name in ("OneTrainer, stochastic", "ai-toolkit"):
        share, distance = found[name]
        assert share == pytest.approx(1, abs=0.02) and 0 < distance < 0.1
    for name in ("diffusers", "diffusers, foreach", "OneTrainer, every step"):
        assert found[name][1] > 3 * found["OneTrainer, stochastic"][1], name


def test_the_command_prints_every_rule_and_keeps_its_figures(capsys, tmp_path):
    found = tmp_path / "found.json"
    assert bench.main(["averages", "--steps", "5", "--out", str(found)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RULES)
    rows = json.loads(found.read_text())["results"]
    assert {(row["rule"], row["decay"]) for row in rows} == set(itertools.product(RULES, DECAYS))
