"""Two nets of this log in a plain loop of torch, with the optimisers that others publish. Nothing of lowprec
steps, casts or scores but in the arm `ours`.

    python experiments/086-others-in-a-bare-loop/bare.py gpt 0-5     a line of bare.jsonl each run
    python experiments/086-others-in-a-bare-loop/bare.py dit 0-5
    python experiments/086-others-in-a-bare-loop/bare.py table       what the lines say

Products are fp32 in every arm, of weights that are widened for them: what an arm changes are the weights that
it holds, the gradients, and the optimiser. Needs torchao and heavyball. Both compile their steps; here the
same steps run uncompiled.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported

import torch
import torch.nn.functional as F
from torch.func import functional_call

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECORD = HERE / "bare.jsonl"
sys.path.insert(0, str(ROOT))

STEPS, WARMUP, DECAY = 300, 30, 0.01
BETAS, EPS = (0.9, 0.999), 1e-8
ARMS = "fp32", "nearest", "torchao", "heavyball-fp32", "heavyball", "ours"
BASELINE_OF = {"heavyball": "heavyball-fp32"}


# ---- The nets ----------------------------------------------------------------------------------------------


class Text:
    """The GPT of 025 on the first 50 chapters of the King James Version: the next byte of 64."""

    block, batch, lr = 64, 8, 1e-3

    def __init__(self):
        text = torch.tensor(list((ROOT / "tasks/text.txt").read_bytes()))
        cut = len(text) * 9 // 10
        self.train, self.held_out = text[:cut], text[cut:]

    def net(self):
        from tasks.language import GPT

        return GPT(depth=4, width=64, heads=4, block=self.block)

    def loss_of(self, net, starts, text):
        windows = text[starts[:, None] + torch.arange(self.block + 1)]
        logits = net(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def loss(self, net, drawn):
        starts = torch.randint(len(self.train) - self.block, (self.batch,), generator=drawn)
        return self.loss_of(net, starts, self.train)

    def score(self, net):
        starts = torch.arange(0, len(self.held_out) - self.block, self.block)
        losses = [self.loss_of(net, part, self.held_out) * len(part) for part in starts.split(64)]
        return float(sum(losses)) / len(starts)


TRAINED = 1437


class Digits:
    """The DiT of 011 on digits: the velocity from noise to image."""

    batch, lr = 16, 5e-4

    def __init__(self):
        from safetensors.torch import load_file

        held = load_file(ROOT / "tasks/digits.safetensors")
        images, labels = held["images"][:, None].float() / 8 - 1, held["labels"].long()
        self.train = images[:TRAINED], labels[:TRAINED]  # the file is in the order of scikit-learn's split
        self.held_out = images[TRAINED:], labels[TRAINED:]

    def net(self):
        from models import dit

        return dit(channels=1, num_classes=10, image_size=8)

    def loss_of(self, net, images, labels, drawn):
        noise = torch.randn(images.shape, generator=drawn)
        t = torch.rand(len(images), generator=drawn)
        mixed = images.lerp(noise, t[:, None, None, None])
        return F.mse_loss(net(mixed, 1000 * t, labels), images - noise)

    def loss(self, net, drawn):
        chosen = torch.randint(len(self.train[0]), (self.batch,), generator=drawn)
        return self.loss_of(net, self.train[0][chosen], self.train[1][chosen], drawn)

    def score(self, net):
        drawn = torch.Generator().manual_seed(1)
        images, labels = self.held_out
        losses = [self.loss_of(net, images, labels, drawn) for _ in range(20)]
        return float(sum(losses)) / len(losses)


NETS = {"gpt": Text, "dit": Digits}


def widened(net):
    """Called as the net, with its weights in fp32. A gradient has the dtype of the weight that is held."""

    def call(*args):
        return functional_call(net, {name: p.float() for name, p in net.named_parameters()}, args)

    return call


# ---- The arms ----------------------------------------------------------------------------------------------


def optimiser_of(arm, parameters, lr):
    usual = dict(lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY)
    if arm in ("fp32", "nearest"):
        return torch.optim.AdamW(parameters, foreach=False, **usual)
    if arm == "torchao":
        from torchao.optim import _AdamW

        return _AdamW(parameters, bf16_stochastic_round=True, **usual)
    if arm == "ours":
        import lowprec

        low = dict(update="stochastic", exp_avg="bf16", exp_avg_sq="bf16")
        return lowprec.AdamW(parameters, **usual, **low)
    import heavyball

    heavyball.utils.compile_mode = None
    storage = "float32" if arm == "heavyball-fp32" else "bfloat16"
    return heavyball.AdamW(parameters, storage_dtype=storage, **usual)


def set_rate(optimiser, lr, step):
    share = min(1, (step + 1) / WARMUP)
    if step >= WARMUP:
        share = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
    for group in optimiser.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr * share)
        else:
            group["lr"] = lr * share


def trained(task, arm, seed):
    """The held-out loss of the last weights, in fp32, of one training."""
    torch.manual_seed(seed)
    net = task.net()
    if not arm.endswith("fp32"):
        for p in net.parameters():
            p.data = p.data.bfloat16()
    optimiser = optimiser_of(arm, list(net.parameters()), task.lr)
    drawn = torch.Generator().manual_seed(1000 + seed)
    for step in range(STEPS):
        set_rate(optimiser, task.lr, step)
        task.loss(widened(net), drawn).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        return task.score(net.float())


# ---- The record --------------------------------------------------------------------------------------------


def record(name, seeds):
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode
    if changed:
        sys.exit("bare.py: the code has changes that are in no commit")
    task = NETS[name]()
    for seed in seeds:
        for arm in ARMS:
            begun = time.time()
            loss = trained(task, arm, seed)
            line = dict(net=name, arm=arm, seed=seed, loss=loss, seconds=round(time.time() - begun, 1))
            with RECORD.open("a") as file:
                file.write(json.dumps({**line, "torch": torch.__version__, "commit": commit}) + "\n")


def table():
    """Change of the held-out loss against the same optimiser in fp32, over pairs of a seed."""
    from experiments.log.stats import mean_at_level

    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    losses = {(line["net"], line["arm"], line["seed"]): line["loss"] for line in lines}
    for name in NETS:
        for arm in ARMS[1:]:
            base = BASELINE_OF.get(arm, "fp32")
            seeds = [seed for net, own, seed in losses if (net, own) == (name, arm)]
            changes = [100 * (losses[name, arm, seed] / losses[name, base, seed] - 1) for seed in seeds]
            if len(changes) > 1:
                found = mean_at_level(changes)
                interval = f"{found.mean:+.2f} % ({found.low:+.2f} to {found.high:+.2f})"
                print(f"{name} {arm} against {base}: {interval}, {len(changes)} pairs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "table":
        table()
    else:
        first, _, last = sys.argv[2].partition("-")
        record(sys.argv[1], range(int(first), int(last or first) + 1))
