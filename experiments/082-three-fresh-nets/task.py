"""The three nets beside this file as tasks of train.py, for their whole trainings.

python train.py --task experiments/082-three-fresh-nets/task.py:Vit --bf16
"""

import runpy
from pathlib import Path

import torch

from tasks import Task


class Places:
    """As many places of a batch as are asked for; `loss` draws what stands there."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return {"x": torch.zeros(len(index), 1)}


class Fresh(Task):
    """A task of the file `file`, which a trial takes too."""

    class Data:
        name, train, heldout = "drawn", Places(), Places()

        def __str__(self):
            return "drawn anew for each batch"

    file = ""

    @classmethod
    def load(cls, config):
        return cls.Data()

    def __init__(self, *args):
        super().__init__(*args)
        self.mine = runpy.run_path(str(Path(__file__).with_name(self.file)))

    def net(self):
        return self.mine["build"]()

    def loss(self, model, batch, rng, step):
        seed = int(torch.randint(2**40, (), generator=rng.generator))
        return self.mine["loss"](model, next(self.mine["batches"](seed)))

    @torch.no_grad()
    def evaluate(self, model, rng):
        losses = [float(self.mine["loss"](model, batch)) for batch in self.mine["held_out"]()]
        return {"loss": sum(losses) / len(losses)}, {}


class Vit(Fresh):
    file = "vit.py"


class Gpt2(Fresh):
    file = "gpt2.py"


class Unetr(Fresh):
    file = "unetr.py"
