"""experiments/048-averages-of-others/task.py: averages of other tools beside those of a training."""

import statistics

import cli
import pytest
import torch
from cli import ROOT, command, one_line, quick, summary
from common import BF16, same

import strategies
from benchmarks.averages import DECAYS, RULES, weight_path

TASK = f"{ROOT}/experiments/048-averages-of-others/task.py:Flow"
FLAGS = ["--task", TASK, "--pure_bf16", "--stochastic", "--weights", "all", "--samples", "4"]

in_a_folder_of_its_own = cli.in_a_folder_of_its_own


@pytest.mark.parametrize("name", RULES)
def test_each_average_is_its_rule_over_the_weights_after_each_step(name):
    module = __import__(strategies.find_task(TASK).__module__)
    start, *rest = weight_path(30, 500)
    params = [torch.nn.Parameter(part.clone()) for part in start.split([200, 300])]
    average = module.Ruled([("a", params[0]), ("b", params[1])], name, 0.9, seed=3)
    rule, wanted, draw = RULES[name], start, torch.Generator().manual_seed(3)
    for step, weights in enumerate(rest, 1):
        for p, part in zip(params, weights.split([200, 300]), strict=True):
            p.data.copy_(part)
        average.update()
        if rule.due(step):
            wanted = rule.update(wanted, weights, 1 - rule.decay_at(0.9, step), draw)
        assert same(torch.cat([average.shadow["a"], average.shadow["b"]]), wanted), step
    assert wanted.dtype == (torch.float32 if name.startswith("fp32") else BF16)
    assert average.decay == (rule.decay_at(0.9, 30) if rule.due(30) else 1)


def test_a_training_scores_each_rule_at_each_decay(capsys):
    assert quick(*FLAGS, steps=12) == 0
    scores = summary()["scores"]
    assert len(scores) == len(RULES) * len(DECAYS) + 2 and "OneTrainer-every-step:0.9999" in scores
    loss = {name: statistics.fmean(found["loss_by_timestep"]) for name, found in scores.items()}
    assert loss["fp32-constant:0.999"] == pytest.approx(loss["ema"], rel=1e-4)  # ours, by another kernel
    assert loss["fp32-constant:0.9999"] != loss["fp32-constant:0.99"] != loss["diffusers:0.99"]
    capsys.readouterr()
    assert command(*cli.QUICK, *FLAGS, "--name", "run", "--steps", 14) == 2
    assert "can't go on" in one_line(capsys)
