"""One training step of the same net, batch and loss in a bare loop, Lightning's, Accelerate's and ours.

    step = stepper("Lightning", "bf16", "--task rflow --batch_size 8", folder, torch.device("cpu"))
    step()                                  # one batch: forward, backward, clip, optimiser, average

Every loop draws the same batches, forms the same loss, clips the gradient's norm alike and keeps an average
of the weights. "bf16 weights" is what each loop offers under that name: rounding to nearest and an average in
bf16, except ours, where weights round stochastically and the average is fp32.
"""

import copy
import logging
import threading

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.bench.systems import SteppedRun
from lowprec import cast
from lowprec.machine import quiet_import
from lowprec.rounding import Stream, stream
from tasks.task import Rng

ENDLESS_STEPS = 10**6  # steps of a run that is stopped by hand


class Job:
    """What every loop trains: a net, its batches and its loss, as a Trainer sets them up."""

    def __init__(self, flags, folder, device):
        self.run = SteppedRun(flags, folder, ENDLESS_STEPS, device).run
        self.config, self.task = self.run.config, self.run.task
        self.net = copy.deepcopy(self.run.precision.model)
        self.count = 0

    def batches(self):
        return self.run.new_batches()

    def loss(self, net, batch):
        self.count += 1
        seed = stream(self.config.seed, Stream.BATCH, self.count, 0)
        return self.task.loss(net, batch, Rng(seed, 0, 1, self.run.device), self.count)

    def optimizer(self, net):
        config = self.config
        options = dict(lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay, fused=True)
        return torch.optim.AdamW(net.parameters(), **options)

    def clip(self, net):
        if self.config.clip_grad:
            nn.utils.clip_grad_norm_(net.parameters(), self.config.clip_grad)

    def average(self, net, decay=None):
        decay = self.config.ema_decay if decay is None else decay
        return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def averages(self, net):
        """All averages that a run keeps: its own, and the one that a task's loss reads as its target."""
        averages = [self.average(net)]
        for spec in self.task.averages().values():
            decay, _, _ = spec.partition(":")
            average = self.average(net, float(decay))
            averages.append(average)

            def target(model, target=average.module):
                return target

            self.task.target = target
        return averages


class Bf16Net(nn.Module):
    """A net of bf16 weights that takes and gives fp32, as the losses here do."""

    def __init__(self, net):
        super().__init__()
        self.net = net.bfloat16()

    def forward(self, *args, **kwargs):
        args, kwargs = cast.tree_to(torch.bfloat16, (args, kwargs))
        return cast.tree_to(torch.float32, self.net(*args, **kwargs))


# ---- The loops ---------------------------------------------------------------------------------------------


def bare_loop(job, kind):
    """step() of a loop of torch alone."""
    net = Bf16Net(job.net) if kind == "bf16 weights" else job.net
    optimizer = job.optimizer(net)
    averages = job.averages(net)
    batches = job.batches()

    def step():
        with torch.autocast(job.run.device.type, torch.bfloat16, enabled=kind == "bf16"):
            loss = job.loss(net, next(batches))
        loss.backward()
        job.clip(net)
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters(net)

    return step


def accelerate(job, kind):
    """step() by Accelerate, which has one mode in a process: bf16 autocast."""
    library = quiet_import("accelerate", "bench.py peers", "accelerate")
    accelerator = library.Accelerator(mixed_precision="bf16", cpu=job.run.device.type == "cpu")
    net, optimizer = accelerator.prepare(job.net, job.optimizer(job.net))
    average = job.average(job.net)
    batches = job.batches()

    def step():
        with accelerator.autocast():
            loss = job.loss(net, next(batches))
        accelerator.backward(loss)
        if job.config.clip_grad:
            accelerator.clip_grad_norm_(net.parameters(), job.config.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(accelerator.unwrap_model(net))

    return step


class BatchByBatch:
    """Batches for a loop that can't be called step by step: it runs in a thread and waits for each batch.

    loop(batches): runs until `batches` ends, which it never does.
    """

    def __init__(self, batches, loop):
        self.batches, self.error = batches, None
        self.wanted, self.given = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._guarded, args=(loop,), daemon=True).start()
        self.wanted.acquire()

    def _guarded(self, loop):
        try:
            loop(self)
        except Exception as error:  # raised where the step was called
            self.error = error
        self.wanted.release()

    def __iter__(self):
        while True:
            self.wanted.release()
            self.given.acquire()
            yield next(self.batches)

    def step(self):
        """Hand over a batch, and wait for the loop to want the next."""
        self.given.release()
        self.wanted.acquire()
        if self.error:
            raise self.error


def lightning(job, kind):
    """step() by Lightning's Trainer: it fetches one batch ahead, and trains on one each time."""
    library = quiet_import("lightning", "bench.py peers", "lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Bf16Net(job.net) if kind == "bf16 weights" else job.net

        def training_step(self, batch, index):
            return job.loss(self.net, batch)

        def configure_optimizers(self):
            return job.optimizer(self)

        def configure_gradient_clipping(self, *given, **named):
            job.clip(self)  # Lightning's own clipping refuses fused optimisers

    def loop(batches):
        precision = {"fp32": "32-true", "bf16": "bf16-mixed", "bf16 weights": "bf16-true"}[kind]
        trainer = library.Trainer(
            accelerator="cpu" if job.run.device.type == "cpu" else "gpu",
            devices=1,
            precision=precision,
            max_epochs=1,
            max_steps=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[EMAWeightAveraging(decay=job.config.ema_decay)],
        )
        trainer.fit(Module(), batches)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return BatchByBatch(job.batches(), loop).step


LOOPS = {"bare loop": bare_loop, "Lightning": lightning, "Accelerate": accelerate}
KINDS_OF_PRECISION = {"fp32": "", "bf16": "--bf16", "bf16 weights": "--pure_bf16 --stochastic"}


def stepper(loop, kind, flags, folder, device):
    """step() of a loop of LOOPS, or "ours", in a kind of precision. Raises Refused without its package."""
    if loop == "ours":
        return SteppedRun(f"{flags} {KINDS_OF_PRECISION[kind]}", folder, ENDLESS_STEPS, device).step
    return LOOPS[loop](Job(flags, folder, device), kind)
