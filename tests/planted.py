"""Loops of real clients that a fault is planted in: nets of transformers, diffusers and torchvision in plain
loops, Lightning, Accelerate, transformers' Trainer, and tasks of this repository.

faults.py and held_out.py plant the faults, recipes_that_work.py holds healthy loops, and
test_planted_faults.py asks what Watch says of them.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "lowprec")]

import test_clients as clients  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from lowprec import rounding  # noqa: E402
from lowprec.precision import recipe  # noqa: E402
from lowprec.view import View  # noqa: E402
from lowprec.watch.watch import Watch  # noqa: E402

BF16 = torch.bfloat16
# as small as they can be: each case trains one
NETS = {
    "GPT-2": functools.partial(clients.gpt2, layers=1),
    "Llama": functools.partial(clients.llama, tied=False, layers=1),
    "U-Net": functools.partial(clients.unet, levels=1),
    "deeper U-Net": clients.unet,
    "DiT": functools.partial(clients.dit, layers=1),
    "ResNet": functools.partial(clients.resnet, stages=1),
}


class Everything:
    """All kernels: none is compiled."""

    def __contains__(self, kernel):
        return True


# ---- A loop ------------------------------------------------------------------------------------------------


class Loop:
    """A training loop as strangers write it. A case changes what it needs before `train`."""

    def __init__(self, client, steps, lr=1e-3, dtype=torch.float32, autocast=None):
        torch.manual_seed(0)
        self.client, self.steps, self.lr, self.autocast = NETS[client](), steps, lr, autocast
        self.net = self.client.build().to(dtype)
        self.make = torch.optim.AdamW
        self.params, self.optimizer, self.ema, self.watched = None, None, None, self.net
        self.before, self.after, self.averaging = [], [], []  # called with the number of the step
        self.micro, self.clears, self.clip = 1, True, 1.0

    def opt(self, make=None, **options):
        params = self.params or [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = (make or self.make)(params, **{"lr": self.lr, **options})
        return self.optimizer

    def train(self):
        if self.optimizer is None:
            self.opt()
        watch = Watch(self.watched, self.optimizer, self.ema, every=max(3, self.steps // 12))
        low = next(self.net.parameters()).dtype == BF16
        called = View(self.net, recipe(pure_bf16=True)) if low else self.net
        for step in range(self.steps):
            torch.manual_seed(rounding.hash64(7, step) >> 1)
            for act in self.before:
                act(step)
            for micro in range(self.micro):
                cast = torch.autocast("cpu", self.autocast) if self.autocast else nullcontext()
                with cast:
                    loss = self.client.loss(called, step * self.micro + micro)
                (loss / self.micro).backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
            self.optimizer.step()
            for act in (*self.after, *self.averaging):
                act(step)
            if self.clears:
                self.optimizer.zero_grad()
        watch.remove()
        return watch

    # -- what several cases need

    def named(self, part):
        return {name: p for name, p in self.net.named_parameters() if part in name}

    def third(self):
        """Every third parameter, in order."""
        return [p for p in self.net.parameters() if p.requires_grad][::3]

    def stochastic(self, noise=None, **options):
        self.optimizer = StochasticAdamW(self.net.parameters(), lr=self.lr, noise=noise, **options)
        return self.optimizer

    def average(self, decay=0.9, update=None):
        """A fp32 average by hand: {name: tensor}."""
        self.ema = {name: p.detach().float().clone() for name, p in self.net.named_parameters()}

        def move(step):
            for name, p in self.net.named_parameters():
                if update is None or update(name):
                    self.ema[name].lerp_(p.detach().float(), 1 - decay)

        self.averaging.append(move)

    def diffusers_average(self, decay=0.9):
        from diffusers.training_utils import EMAModel

        self.ema = EMAModel(self.net.parameters(), decay=decay, min_decay=decay)
        self.averaging.append(lambda step: self.ema.step(self.net.parameters()))


class StochasticAdamW(torch.optim.AdamW):
    """A stranger's AdamW: fp32 arithmetic and moments, bf16 weights written by noise that a case may spoil.

    noise: (optimizer, number of the tensor, shape, step) -> int32 below 2^16. decay_apart: decay is a write
    of its own, to nearest.
    """

    def __init__(self, params, lr, noise=None, weight_decay=0.0, decay_apart=False):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.noise, self.decay_apart = noise or uniform, decay_apart

    @torch.no_grad()
    def step(self, closure=None):
        group, number = self.param_groups[0], 0
        (b1, b2), lr, eps = group["betas"], group["lr"], group["eps"]
        for number, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            state, g = self.state[p], p.grad.float()
            if not state:
                state.update(step=torch.tensor(0.0), exp_avg=g * 0, exp_avg_sq=g * 0)
            state["step"] += 1
            t = int(state["step"])
            m = state["exp_avg"].float().lerp(g, 1 - b1)
            v = b2 * state["exp_avg_sq"].float() + (1 - b2) * g * g
            state["exp_avg"].copy_(m)
            state["exp_avg_sq"].copy_(v)
            root = (v / (1 - b2**t)).sqrt() + eps
            x, shrink = p.float(), 1 - lr * group["weight_decay"]
            x = (p * shrink).float() if self.decay_apart else x * shrink
            x = x - lr * m / (1 - b1**t) / root
            bits = self.noise(self, number, p.shape, t)
            p.copy_(rounding.stochastic_round(x.flatten(), bits.flatten()).view_as(p))


def seeded(*words):
    return torch.Generator().manual_seed(rounding.hash64(*words) >> 1)


def uniform(optimizer, number, shape, step):
    return torch.randint(1 << 16, shape, dtype=torch.int32)


# ---- Cases -------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """plant(loop) changes a Loop, or trains it and gives its Watch; plant(steps) -> Watch where `client` is
    none of NETS. expect: (site, part of a tensor's name[, words]) that must be named, none for healthy ones.
    missed: why it can't be found.
    """

    name: str
    client: str
    plant: Callable
    expect: tuple = ()
    missed: str = ""
    options: dict = field(default_factory=dict)

    def run(self, steps):
        if self.client in NETS:
            loop = Loop(self.client, steps, **self.options)
            found = self.plant(loop)
            return found if isinstance(found, Watch) else loop.train()
        return self.plant(steps)


def entering(cases):
    """A decorator that enters a case among these: (name, client, *expect, missed=..., options of a Loop)."""

    def of_case(name, client, *expect, missed="", **options):
        def enter(plant):
            cases.append(Case(name, client, plant, expect, missed, options))
            return plant

        return enter

    return of_case


FAULTS, HELD_OUT, HEALTHY = [], [], []
fault, held_out, healthy = map(entering, (FAULTS, HELD_OUT, HEALTHY))


def says(case, diagnosis):
    """(whether each expected site and tensor is named, the findings that lose something)."""
    losing = [f for f in diagnosis.findings if f.severity != "note"]
    return bool(losing) and all(any(fits(f, *wanted) for f in losing) for wanted in case.expect), losing


def fits(finding, site, part, words=""):
    """Whether a finding names this site and tensor, in these words."""
    return finding.site.startswith(site) and part in finding.tensor and words in finding.text


# ---- Frameworks


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 2))


def by_accelerate(steps, spoil=None, **options):
    """An Accelerate loop with a prepared net, optimiser and loader."""
    from accelerate import Accelerator

    net = small()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, **options)
    net, optimizer = accelerator.prepare(net, optimizer)
    watch = Watch(net, optimizer, every=max(3, steps // 12))
    for step in range(steps):
        if spoil:
            spoil(step, optimizer, net)
        pictures, labels = clients.images(step)
        loss = nn.functional.cross_entropy(net(pictures.flatten(1)), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return watch


def by_lightning(steps, spoil=None, average=False):
    """A Lightning module with automatic optimisation, whose step runs forward and backward in a closure."""
    import lightning

    from lowprec.watch import callbacks

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small()

        def training_step(self, batch, index):
            pictures, labels = batch
            return nn.functional.cross_entropy(self.net(pictures.flatten(1)), labels)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)

        def on_train_batch_start(self, batch, index):
            if spoil:
                spoil(self.global_step, self.optimizers().optimizer, self.net)

    callback = callbacks.lightning_watch(every=max(3, steps // 12), show=False)
    data = torch.utils.data.DataLoader([clients.images(i) for i in range(15)], batch_size=None)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", enable_checkpointing=False, callbacks=[callback], **quiet
    )
    trainer.fit(Module(), data)
    return callback.watch


def by_trainer(steps, spoil=None, **options):
    """transformers' Trainer on a tiny GPT-2."""
    import tempfile

    import transformers

    from lowprec.watch import callbacks

    torch.manual_seed(0)
    client = clients.gpt2()
    data = []
    for step in range(5):
        data += [{"input_ids": ids, "labels": ids} for ids in clients.tokens(step)]
    callback = callbacks.transformers_watch(every=max(3, steps // 12), show=False)
    extra = [callback, *([spoil] if spoil else [])]
    with tempfile.TemporaryDirectory() as folder:
        fixed = dict(output_dir=folder, max_steps=steps, per_device_train_batch_size=4, use_cpu=True)
        quiet = dict(report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
        args = transformers.TrainingArguments(**fixed, **quiet, **{"learning_rate": 1e-3, **options})
        trainer = transformers.Trainer(client.build(), args, train_dataset=data, callbacks=extra)
        trainer.train()
    return callback.watch


def by_task(steps, *flags, spoil=None):
    """A task of this repository, by its own Trainer."""
    import strategies
    import train
    import trainer
    from harness.batches import BatchIndices

    table = strategies.flag_table(train.task_flag_of(list(flags)))
    words = ["--batch_size", "8", "--warmup", "0", "--steps", str(steps), "--threads", "1", *flags]
    run = trainer.Trainer(strategies.settle(vars(train.build_parser(table).parse_args(words))))
    c, data = run.config, run.task.train_set(run)
    run.batches = (data[i] for i in BatchIndices(len(data), c.batch_size, c.seed))
    p = run.precision
    watch = Watch(p.model, p.optimizer, p.ema, every=max(3, steps // 12))
    for step in range(steps):
        if spoil:
            spoil(step, p)
        run.train_step(measure=False)
    return watch
