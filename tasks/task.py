"""What a task is: everything that is special to it, in one class.

A task says which flags and sites it has of its own, which data and net it takes, what is learnt from a
batch, and how the result is scored. The loop, the folder, the parser and the doctor ask it; none of them
knows a task by name. `--task FILE.py:CLASS` trains a class of your own. The least that it needs:

    class Lines(Task):
        flags = (Flag("width", 32, "hidden units", type=natural),)

        def net(self):
            return nn.Sequential(nn.Linear(1, self.config.width), nn.SiLU(), nn.Linear(self.config.width, 1))

        def loss(self, model, batch, rng, step):
            x, y = batch
            return F.mse_loss(model(x), y)

strategies.py lists the tasks that come with the program, and holds the smallest.
"""

import functools

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler

from harness import code
from harness.checkpoints import read as read_checkpoint
from lowprec.errors import Refused
from lowprec.roles import roles
from lowprec.rounding import Stream, stream
from lowprec.rules import refuse
from precision import check_origin, recipe_of_run
from tasks import data as datasets

VALIDATED_ITEMS = 256  # held-out items that `Task.validate` looks at
CALIBRATED_ITEMS = 1024  # training items that `Task.calibrate` calls a net on

# ---- Randomness --------------------------------------------------------------------------------------------


class Rng:
    """The randomness of one batch, a function of its generator alone.

    Every draw is made for the whole batch of `world` ranks on the CPU; a rank keeps its own rows. So a run
    on two processes draws what one process draws, and a CPU run what a GPU run draws.
    """

    def __init__(self, seed, rank=0, world=1, device="cpu"):
        self.generator = torch.Generator().manual_seed(seed)
        self.rank, self.world, self.device = rank, world, device

    def _own(self, x, device=None):
        n = len(x) // self.world
        return x[self.rank * n : (self.rank + 1) * n].to(device or self.device)

    def normal(self, n, *shape, device=None):
        """fp32 [n, *shape], standard normal. device: where it lies, if not on the Rng's."""
        return self._own(torch.randn(n * self.world, *shape, generator=self.generator), device)

    def uniform(self, n):
        """fp32 [n] in [0, 1)."""
        return self._own(torch.rand(n * self.world, generator=self.generator))


# ---- Task --------------------------------------------------------------------------------------------------


class Task:
    """What a run trains. data: what `load` returned; recipe: a Recipe with the task's sites;
    config: a flags.Config.
    """

    flags = ()  # flags.Flag rows beside the general ones; a row of a general flag's name takes its place
    sites = {}  # {name: Site} of tensors that only this task has
    needs = {}  # {one of them: the flag without which it does nothing}, as `needs` of a Flag says of a flag
    rules = ()  # rules.Rule of flags.Config: flags that don't go together
    # {site: (figure above which it is a finding, a severe one)} for `probes`, which doctor.Examination judges
    limits = {}
    implied = {}  # {flag: what it stands for where it was not given}; "model" is written into the config
    defaults = {}  # {flag: default} of flags that all tasks have, where this task's is another
    targets = "labels"  # what data.load reads beside the images: labels or masks
    distances = ()  # scores whose floor lies below their ceiling, where they mean anything
    unprinted = ()  # scores that are written, and are too long to be printed
    watched = ("loss", "lower")  # the score of `validate` that --early_stop and best.pt go by; the better way
    items = ("images", 1)  # what is counted a second: its name, and how many an entry of a batch has

    def __init__(self, data, recipe, config):
        self.data, self.recipe, self.config = data, recipe, config

    def __str__(self):
        if type(self).net is not Task.net:
            return type(self).__name__
        return self.config.model

    # -- before the run

    @classmethod
    def own_defaults(cls):
        """`defaults`, and the default of --model from `implied`."""
        found = dict(cls.defaults)
        if "model" in cls.implied:
            found.setdefault("model", cls.implied["model"])
        return found

    @classmethod
    def settle(cls, table, given):
        """{flag: value} that the task decides, as a teacher's net decides its student's. table: of all flags;
        given: {flag: value} as typed.
        """
        return {}

    @classmethod
    def check(cls, config):
        """Raise Refused for flags that don't go together."""
        refuse(cls.rules, config)

    @classmethod
    def load(cls, config):
        """The data: `name`, and `train` and `heldout`, which map a list of indices to a batch."""
        return datasets.load_by_flags(config, config.data or cls.implied["data"], cls.targets)

    def notes(self):
        """Lines that are printed before a run: what may not be meant, and which flag mends it."""
        return list(getattr(self.data, "notes", ()))

    # -- the net

    @classmethod
    def sizes_of_nets(cls):
        """{--model: its --size, as the keys of a dict}, for --list."""
        return {}

    def nets(self):
        """{--model: build(channels, num_classes, image_size, size)}."""
        return {}

    def net(self):
        """A new net in fp32, its initial weights drawn from torch's global generator, on torch's default
        device.
        """
        c, nets = self.config, self.nets()
        if c.model not in nets:
            raise Refused(f"no model {c.model!r} for task {c.task!r}; choose {' or '.join(nets)}")
        return self.make(nets[c.model])

    def make(self, build):
        """The net of one of `nets`."""
        data = self.data
        return build(data.channels, data.num_classes, data.image_size, self.config.size)

    def own_net(self):
        """{--model: build} where that is FILE.py:build, called as `nets` are; {} where it is no file."""
        spec = self.config.model
        if not code.is_code(spec):
            return {}
        return {spec: functools.partial(code.built, spec, code.load("model", spec, "function {}", callable))}

    def example(self):
        """(args, kwargs) of a call of the net, on the meta device: the shapes that FLOPs are counted on."""
        batch = self.data.train[[0, 0]]
        if isinstance(batch, dict):
            batch = list(batch.values())
        inputs = next(iter(batch))  # the first part of a batch
        return (inputs.to("meta"),), {}

    def groups(self, net):
        """torch's parameter groups, or None for one group of everything. See --weight_decay_on."""
        c = self.config
        if not c.weight_decay or c.weight_decay_on == "all" or c.lora:  # adapters are matrices
            return None
        spared = set()
        found = roles(net)
        for name, module in net.named_modules():
            for p in module.parameters(recurse=False):
                if p.dim() < 2 or found[name] & {"norm", "embedding"}:
                    spared.add(p)
        trained = [p for p in net.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p not in spared]},
            {"params": [p for p in trained if p in spared], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def averages(self):
        """{name: "DECAY:DTYPE[:UPDATE]"} of averages of the weights that the loss reads, as `model.averages`
        by that text; the run keeps them beside its own. A site of the same name says how one is held.
        """
        return {}

    def again(self, recipe):
        """This task in a recipe, on the same data, with nothing in it that has been used."""
        return type(self)(self.data, recipe, self.config)

    # -- what a run starts from

    @property
    def starts_elsewhere(self):
        """Whether training starts from weights of another run."""
        return bool(self.config.finetune)

    def start(self, run):
        """The checkpoint whose averaged weights training starts from, or None. Raises Refused when they
        don't fit.

        run: the Trainer. Asked also when the run goes on from a checkpoint of its own.
        """
        c = self.config
        if not c.finetune:
            check_origin(self.recipe, None)
        if not c.finetune or run.folder.has_checkpoint:
            return None
        checkpoint = read_checkpoint(c.finetune)
        theirs = run.table.config(checkpoint["config"])
        for row in run.table.fitting():
            if row.name == "data":  # the shapes of the weights tell whether a net fits other data
                continue
            its = row.comparable(self.meant(row.name, theirs))
            own = row.comparable(self.meant(row.name, c))
            if its != own:
                raise Refused(
                    f"--finetune {c.finetune} was trained with --{row.name} {its}, and this run has "
                    f"--{row.name} {own}: use the same, or another checkpoint"
                )
        check_origin(self.recipe, recipe_of_run(theirs, run.table, self.sites), f"--finetune {c.finetune}")
        return checkpoint

    @classmethod
    def meant(cls, flag, config):
        """The value of a flag, or what it stands for where it was not given."""
        value = getattr(config, flag)
        if value is None:
            return cls.implied.get(flag)
        return value

    def train_count(self):
        """How many items `train_set` will have."""
        return len(self.data.train)

    def train_set(self, run):
        """What is trained on: len(set), and set[[3, 1, 4]] -> a batch. run: the Trainer."""
        return self.data.train

    # -- training and scoring

    def loss(self, model, batch, rng, step):
        """Mean loss of a batch on the run's device, a scalar.

        model: called like the net; it returns the dtype of the loss site, fp32. All randomness comes from
        `rng`, an Rng. step: the optimiser's steps done.
        """
        raise NotImplementedError(f"{type(self).__name__}.loss")

    @torch.no_grad()
    def validate(self, model, rng):
        """{name: number} on held-out data, cheap enough to be asked often; here the mean loss, as at the last
        step. model: the averaged weights, called like the net.
        """
        return {"loss": self._mean_loss(model, self.data.heldout, VALIDATED_ITEMS, rng)}

    def calibrate(self, view, run):
        """Call a frozen net on training data, whose inputs to its layers GPTQ reads. run: the Trainer."""
        train = self.train_set(run) if run.train is None else run.train
        rng = Rng(stream(self.config.seed, Stream.CALIBRATION), device=run.device)
        self._mean_loss(view, train, CALIBRATED_ITEMS, rng)

    def _mean_loss(self, model, items, most, rng):
        """Of `most` of the items, or all."""
        c = self.config
        total = 0.0
        count = min(len(items), most)
        chosen = [i * len(items) // count for i in range(count)]  # of all classes, where these come in turn
        for index in BatchSampler(chosen, c.batch_size, False):
            batch = to_device(items[index], rng.device)
            total += float(self.loss(model, batch, rng, c.steps)) * len(index)
        return total / count

    def preview(self, model, rng):
        """{title: picture grid [C, H, W] in [0, 1]} while training."""
        return {}

    def evaluate(self, model, rng):
        """(scores, pictures): {name: number or list of numbers a class}, and grids as of `preview`."""
        return {}, {}

    def told(self, scores):
        """What a person reads below the table of one source's scores, as a text; "" for nothing."""
        return ""

    def reference(self):
        """{"floor": scores of something perfect, "ceiling": scores of something useless}, or {}."""
        return {}

    def probes(self, exam):
        """What the task's own sites lose: exam.judge(limit, figure, text, remedy). See doctor.Examination."""


# ---- What tasks share --------------------------------------------------------------------------------------


def two_of_each(data):
    """`data`, which scores compare part with part. Raises Refused for a part of a single image."""
    if min(len(data.train), len(data.heldout)) < 2:
        raise Refused(
            f"{data.name} has {len(data.train)} images to train on and {len(data.heldout)} held out, and the "
            "scores need two of each: add images, 30 or more"
        )
    return data


def to_device(batch, device):
    """A batch, a tensor or any nest of tuples, lists and dicts of tensors, on another device."""

    def moved(leaf):
        return leaf.to(device, non_blocking=True) if torch.is_tensor(leaf) else leaf

    return tree_map(moved, batch)


def picture(images, columns):
    """Grid [C, H, W] in [0, 1] of images [N, C, H, W] in [-1, 1], each at least 48 pixels wide so that a
    person sees it.
    """
    from torchvision.utils import make_grid

    scale = max(1, -(-48 // images.shape[-1]))
    # a NaN shows as mid-grey; the scores count it
    images = ((images + 1) / 2).nan_to_num(0.5).clamp(0, 1)
    return make_grid(
        F.interpolate(images, scale_factor=scale, mode="nearest"), nrow=columns, padding=4, pad_value=0.5
    )
