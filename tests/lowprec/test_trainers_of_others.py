"""Lightning and Accelerate arrive at the bits of the six lines of precision.py."""

import functools

import pytest
import test_clients
import torch
import torch.nn.functional as F
from test_clients import HALF, differences, images, need
from torch import nn

from lowprec.precision import Precision, recipe

eager = test_clients.eager


def small():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))


def small_run(seed=0):
    torch.manual_seed(seed)
    return Precision(small(), recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.9)


def small_loss(run, batch):
    pictures, labels = batch
    return F.cross_entropy(run(pictures.flatten(1)), labels)


def batches():
    """15 batches, the same in every epoch."""
    return [images(step) for step in range(HALF)]


@functools.cache
def plain_loop():
    """What every framework below must arrive at: two epochs of the six lines of precision.py."""
    run = small_run()
    for batch in batches() * 2:
        run.backward(small_loss(run, batch))
        run.step()
    return run


def lightning_module(run):
    import lightning

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self, run):
            super().__init__()
            self.run, self.net = run, run.model  # Lightning moves, saves and counts the net

        def training_step(self, batch, index):
            loss = small_loss(self.run, batch)
            self.run.backward(loss)
            self.run.step()
            self.log("loss", loss)

        def configure_optimizers(self):
            return None  # the run owns it

        def on_save_checkpoint(self, checkpoint):
            checkpoint["precision"] = self.run.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.run.load_state_dict(checkpoint["precision"])

    return Module(run)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = need("lightning")

    def fit(run, epochs, **options):
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
        where = dict(accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False)
        trainer = lightning.Trainer(max_epochs=epochs, **where, **quiet)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        trainer.fit(lightning_module(run), loader, **options)
        return trainer

    whole = small_run()
    fit(whole, 2)
    assert differences(whole, plain_loop()) == []

    fit(small_run(), 1).save_checkpoint(tmp_path / "halfway.ckpt")
    again = small_run(seed=99)
    fit(again, 2, ckpt_path=tmp_path / "halfway.ckpt")
    assert differences(again, whole) == []


def test_accelerate(tmp_path):
    accelerate = need("accelerate")

    def prepared(run):
        accelerator = accelerate.Accelerator(cpu=True)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        run.forward, loader = accelerator.prepare(run.model, loader)  # wraps the net, moves the batches
        accelerator.register_for_checkpointing(run)
        return accelerator, loader

    def epoch(run, loader):
        for batch in loader:
            run.backward(small_loss(run, batch))
            run.step()

    whole = small_run()
    accelerator, loader = prepared(whole)
    epoch(whole, loader)
    accelerator.save_state(tmp_path / "halfway")
    epoch(whole, loader)
    assert differences(whole, plain_loop()) == []

    again = small_run(seed=99)
    accelerator, loader = prepared(again)
    accelerator.load_state(tmp_path / "halfway")
    epoch(again, loader)
    assert differences(again, whole) == []
