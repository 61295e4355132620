"""The doctor: names, with figures, the sites of a run that are losing information.

    python train.py --diagnose runs/NAME        its checkpoint.pt, and metrics.jsonl where there is one;
                                                exit status 0: healthy, 1: findings
    python doctor.py BEFORE AFTER               two checkpoints of any program: python -m lowprec compare

It reads the run and writes nothing. It concludes nothing from the recipe: it takes the run some steps further
in memory, by its own code and data, and compares what is written and computed with fp32 arithmetic. A kind of
fault is one function of lowprec/watch/faults/runs.py. A task examines sites of its own by the probes that it
brings. docs/doctor.md says more.
"""

import functools
import math
import sys
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from harness.batches import BatchIndices
from harness.checkpoints import read as read_checkpoint
from harness.files import read_lines
from lowprec.parts.loss_scale import LossScale
from lowprec.parts.micro_batches import MicroBatches
from lowprec.rounding import Stream, stream
from lowprec.telemetry import sample_entries
from lowprec.watch.average_watch import AverageWrites
from lowprec.watch.averages import Average
from lowprec.watch.faults.runs import of_finite_run, of_records
from lowprec.watch.net_state import floating_buffers
from lowprec.watch.verdicts import Diagnosis, Finding
from lowprec.watch.writes import Writes
from strategies import settle
from tasks.task import Rng, to_device
from trainer import Trainer

FURTHER_STEPS = 8  # further steps in memory
# parameters x pixels x images of one step; about a second on a CPU core. Beyond it the batch is cut
MOST_WORK_A_STEP = 5e9
# how far from its place, at most, a bf16 running mean stands still: an update of a tenth of the difference,
# which is BatchNorm's, is lost below half an ulp, 2^-8 of the value
STANDSTILL_DISTANCE = 10 * 2**-8


def diagnose(path, table, flags):
    """Diagnosis of a checkpoint file or a run's folder.

    table: train.FLAGS. flags: {name: value} typed beside --diagnose. Raises Refused for what is no checkpoint
    of this program, and what Trainer raises (data that have moved, a GPU that is not here).
    """
    checkpoint = read_checkpoint(path)
    table.check_given(flags, "diagnose", checkpoint["config"])
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    # steps of full size, as in most of the run: without warm-up or schedule
    here = {"device": "auto", "threads": 0, "export": "", "warmup": 0, "lr_schedule": "constant", **flags}
    with torch.compiler.set_stance("force_eager"):  # compiling a peer's step costs more than these few
        config = {**vars(table.obeyed(checkpoint["config"])), **here}
        return Examination(config, checkpoint, folder).diagnosis()


def relative(a, b):
    """Relative RMS difference of tensor a from b; inf where either is not finite."""
    a, b = a.double(), b.double()
    difference = (a - b).square().mean().sqrt()
    size = b.square().mean().sqrt()
    value = float(difference / size.clamp_min(1e-300))
    return math.inf if math.isnan(value) else value


def relative_tree(a, b):
    """`relative` of all floating tensors in two trees alike."""
    leaves = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    pairs = [(x, y) for x, y in leaves if torch.is_tensor(x) and x.is_floating_point()]
    return relative(torch.cat([x.flatten() for x, _ in pairs]), torch.cat([y.flatten() for _, y in pairs]))


def count_not_finite(tree):
    """{innermost name: entries that are not finite} of tensors of more than one number, in a nest of dicts
    and lists.
    """
    found = {}
    leaves, _ = pytree.tree_flatten_with_path(tree)
    for path, value in leaves:
        if torch.is_tensor(value) and value.is_floating_point() and value.numel() > 1:
            name = [str(key.key) for key in path if isinstance(key, pytree.MappingKey)][-1]
            found[name] = found.get(name, 0) + int((~value.isfinite()).sum())
    return found


# ---- The examination ---------------------------------------------------------------------------------------


class Examination:
    """One run, loaded and examined. A task's `probes` read `config`, `device`, `data`, `work`, `pixels` and
    `images`, and call `task`, `net`, `rng`, `relative` and `judge`.
    """

    images = 16  # that are looked at
    relative = staticmethod(relative)

    def __init__(self, config, checkpoint, folder):
        self.checkpoint = checkpoint
        self.found = []  # findings
        self.sound = {}  # {site: its figure}, where that is no finding
        self.reports = []  # of the steps of `writes`
        self.averages = {}  # {name: AverageWrites in those steps}
        self.metrics = read_lines(folder / "metrics.jsonl")
        self.trainer = trainer = Trainer(settle(config), draws=True, folder=folder)
        self.config = trainer.config
        self.device = trainer.device
        self.data = trainer.data
        self.precision = trainer.precision
        self.recipe = trainer.recipe
        self.train = trainer.task.train_set(trainer)
        self.start = None  # samples of the initial weights; None where the run started from another's
        if not trainer.task.starts_elsewhere:
            weights = self.precision.weights("raw")
            names = [name for name, _ in self.precision.named_params]
            self.start = {name: sample_entries(weights[name]).clone() for name in names}
        trainer.load_state_dict(checkpoint)
        args, _ = self.precision.view_of_model.example
        parameters = sum(p.numel() for p in self.precision.params)
        self.pixels = math.prod(args[0].shape[2:] or args[0].shape[1:]) * parameters
        self.work = MOST_WORK_A_STEP * (100 if self.device.type == "cuda" else 1)
        for part in (self.precision.optimizer, *self.precision.averages.values()):
            part.compiled = False

    def diagnosis(self):
        """Diagnosis of everything that can be examined."""
        self.look(of_records)
        if not any(self.not_finite.values()):
            self.trainer.task.probes(self)
            self.look(of_finite_run)
        self.found.sort(key=lambda finding: finding.rank)
        lost = {finding.site for finding in self.found if finding.severity != "note"}
        sound = {site: figure for site, figure in self.sound.items() if site not in lost}
        done, planned = self.checkpoint["step"], self.config.steps
        head = f"step {done} of {planned}, {self.trainer.task} on {self.data.name}"
        return Diagnosis(head, self.found, sound)

    def look(self, faults):
        """Add what these Faults find."""
        for finding in faults.findings(self, sound=self.sound):
            finding.cause = ""  # a site has one row, which says all
            self.found.append(finding)

    def judge(self, limit, figure, text, remedy, certain=False):
        """For probes: a finding if `figure` is beyond the task's limits[limit] or `certain`, else `sound`."""
        low, high = self.trainer.task.limits[limit]
        if certain or figure > low:
            severity = "severe" if figure > high else "moderate"
            self.found.append(Finding(limit, severity, text, remedy))
        else:
            self.sound[limit] = figure

    # -- for probes

    def task(self, **sites):
        """The run's task with some sites changed, and nothing in it that has been used."""
        return self.trainer.task.again(self.recipe.replace(**sites))

    def net(self, **sites):
        """The net with its last weights, frozen: they tell of a site even where the average is ruined."""
        return self.precision.frozen("raw", **sites)

    def rng(self, *words):
        """The randomness of one probe, which `words` (whole numbers) tell apart."""
        return Rng(stream(self.config.seed, Stream.DOCTOR, *words), device=self.device)

    def some(self, count):
        """`count` examples of the training data, evenly spread, as a batch on the device."""
        stride = max(1, len(self.train) // count)
        return to_device(self.train[list(range(0, len(self.train), stride))[:count]], self.device)

    # -- for faults

    @functools.cached_property
    def not_finite(self):
        """{site: entries that are not finite} of weights, states and averages."""
        saved = self.checkpoint["precision"]
        found = {"weights": sum(count_not_finite(saved["model"]).values())}
        found.update(count_not_finite(saved["optimizer"]))
        for name, average in saved["averages"].items():
            found[self.title(name)] = sum(count_not_finite(average).values())
        return found

    @property
    def skipped(self):
        """(share of the last steps in the log that the loss scaler skipped, its scale)."""
        scale = self.metrics[-1].get("loss_scale") if self.metrics else None
        if scale is None:
            scale = self.precision.part(LossScale).scaler.get_scale()
        recent = [row for row in self.metrics if "skipped_steps" in row][-11:]
        if not recent:
            return 0.0, scale
        steps = recent[-1]["step"] - recent[0]["step"]
        return (recent[-1]["skipped_steps"] - recent[0]["skipped_steps"]) / max(1, steps), scale

    def loss(self, net):
        """The task's loss of a net on one batch of the training data."""
        batch = self.some(self.images)
        return self.task().loss(net, batch, self.rng(3), self.trainer.step)

    @property
    @torch.no_grad()
    def losses(self):
        """(the mean loss, that in fp32)."""
        return float(self.loss(self.net())), float(self.loss(self.net(loss="fp32")))

    @functools.cached_property
    @torch.no_grad()
    def exact(self):
        """(an fp32 copy of the net; args and kwargs that the task calls it with; what it gives for these)."""
        net, calls = self.net(loss="fp32", generation="fp32"), []

        def note(module, args, kwargs):
            calls.append((args, kwargs))

        handle = net.net.register_forward_pre_hook(note, with_kwargs=True)
        self.loss(net)
        handle.remove()
        args, kwargs = calls[0]
        return net, args, kwargs, net(*args, **kwargs)

    @property
    @torch.no_grad()
    def output_change(self):
        """Relative RMS difference of the net's output from that of its fp32 copy."""
        _, args, kwargs, full = self.exact
        return relative_tree(self.net(loss="fp32")(*args, **kwargs), full)

    @property
    @torch.no_grad()
    def rounded_buffers(self):
        """(how far the output of the fp32 copy is from that with the values that were rounded away in buffers
        which hold bf16 values, words of these); (0.0, {}) without such buffers, (None, {}) without any.
        """
        fresh = dict(self.trainer.new_net().named_buffers())
        held, narrow = 0, []
        for name, b in floating_buffers(self.precision.model):
            if name in fresh:
                held += 1
                b, made = b.float(), fresh[name].to(self.device).float()
                if torch.equal(b.bfloat16().float(), b) and not torch.equal(b, made):
                    narrow.append((name, b, made))
        if not narrow:
            return (0.0 if held else None), {}
        exact, args, kwargs, full = self.exact
        own = dict(exact.net.named_buffers())
        changes = "changes"
        for name, b, made in narrow:
            if torch.equal(made.bfloat16(), b.bfloat16()):  # it never changes, like the frequencies of RoPE
                own[name].copy_(made)
            else:  # what it would be in fp32 is not known, but how far off it can be
                off = self.rng(5).uniform(b.numel()).view(b.shape) * 2 - 1
                own[name].copy_(b * (1 + STANDSTILL_DISTANCE * off))
                changes = "may change"
        change = relative_tree(exact(*args, **kwargs), full)
        return change, dict(count=len(narrow), all=held, name=narrow[0][0], changes=changes)

    def batches(self, size, micro):
        """The run's next micro-batches of `size` examples, `micro` a step."""
        start = self.trainer.step * micro
        for indices in BatchIndices(len(self.train), size, self.config.seed, start):
            yield self.train[indices]

    def backward(self, count, size):
        """Yields after the backward pass of each of `count` micro-batches."""
        trainer = self.trainer
        for micro, batch in zip(range(count), self.batches(size, 1), strict=False):
            batch = to_device(batch, self.device)
            # dropout: the same in each pass
            torch.manual_seed(stream(self.config.seed, Stream.DOCTOR, 4, micro))
            loss = trainer.task.loss(self.precision, batch, self.rng(4, micro), trainer.step)
            self.precision.backward(loss)
            yield

    def take_gradients(self):
        """{parameter: gradient} as summed so far, which are then forgotten."""
        summed = self.precision.part(MicroBatches).sums
        grads = summed or {p: p.grad for p in self.precision.params if p.grad is not None}
        self.precision.zero_grad()
        return grads

    @functools.cached_property
    def accumulated(self):
        """(relative error of the sum of a step's micro-batches, against their sum in float64; how many these
        are); None where nothing is summed in 16 bits.
        """
        c = self.config
        if c.accumulate == 1 or not self.recipe.low_weights:
            return None
        count = min(64, c.accumulate)
        self.precision.options.accumulate = count
        size = int(max(1, min(c.batch_size, 8, self.work / (self.pixels * count))))
        exact = {}
        for _ in self.backward(count, size):
            for p, g in self.take_gradients().items():
                exact[p] = exact.get(p, 0) + g.double()
        for _ in self.backward(count, size):
            pass
        summed = self.take_gradients()
        if not summed:  # an optimiser has taken them away in hooks
            return None
        off = sum(float((summed[p].double() - g).square().sum()) for p, g in exact.items())
        size = sum(float(g.square().sum()) for g in exact.values())
        return math.sqrt(off / max(size, 1e-300)), count

    @functools.cached_property
    def writes(self):
        """Writes of the run's own next steps, in memory, against what fp32 wanted. The report of each step is
        added to `reports`, and what each average took over is `averages`.
        """
        trainer, precision, c = self.trainer, self.precision, self.config
        images = c.batch_size * c.accumulate
        c.accumulate = max(1, min(c.accumulate, FURTHER_STEPS, int(self.work / (self.pixels * c.batch_size))))
        c.batch_size = int(max(1, min(c.batch_size, self.work / self.pixels)))
        # else gradients are noisier than those that v has seen
        whole = images == c.batch_size * c.accumulate
        precision.options.accumulate = c.accumulate
        trainer.batches = self.batches(c.batch_size, c.accumulate)
        stepped = precision.optimizer, precision.named_params
        for name, ema in precision.averages.items():
            self.averages[name] = AverageWrites(Average.of(ema, precision.model), *stepped)
        writes = Writes(*stepped)
        looks = writes, *self.averages.values()
        hooks = [precision.optimizer.register_step_pre_hook(look.before) for look in looks]
        measured = bool(precision.methods)  # `reports` alone ask for it; Writes looks for itself
        for _ in range(FURTHER_STEPS // c.accumulate if whole else 2):
            self.reports.append(trainer.train_step(measure=measured)[1])
            for look in looks:
                look.after()
        for hook in hooks:
            hook.remove()
        return writes

    @functools.cached_property
    def decayed(self):
        """Tally of the weights in steps without gradient or momentum; None where nothing decays. They spoil
        the state.
        """
        precision = self.precision
        optimizer = precision.optimizer
        if not self.config.weight_decay or not all(optimizer.still(p) for p in precision.params):
            return None
        writes = Writes(optimizer, precision.named_params)
        grads = {p: torch.zeros_like(p) for p in precision.params}
        for _ in range(FURTHER_STEPS):
            writes.before(optimizer, (), {"grads": grads})
            optimizer.step(grads=grads)
            writes.after()
        return writes.weights

    def writing(self, remedy="--stochastic, --kahan or --master split"):
        """The remedy for writes that lose something."""
        if not self.precision.optimizer.by_recipe:
            return f"--stochastic without --optimizer {self.config.optimizer}"
        return remedy

    def casting(self, operand):
        """The remedy for casts to FP8 or FP4."""
        if self.recipe.compute == "fp4":
            return "--fp4_keep last:2 or --fp4_finish 15, which leave some layers or steps in bf16, or --fp8"
        options = self.recipe.fp8
        # a scale from the past is too small after a spike, and too large while values grow
        if options.recipe == "delayed":
            return "--fp8_recipe tensorwise, or a shorter --amax_history_len"
        if operand == "grad" and options.format == "e4m3":
            return "--fp8_format hybrid"
        return "--fp8_recipe rowwise" if options.recipe == "tensorwise" else "train without --fp8"

    def title(self, name):
        """The site of an average; one that the task's loss reads has a site of its own."""
        own = {spec: site for site, spec in self.trainer.task.averages().items()}
        return name if name == "ema" else own.get(name, f"average {name}")

    def way_back(self, average):
        """How far the average is from the last weights on the way to the initial ones: 0 to 1."""
        gap = toward = 0.0
        for name, p in self.precision.named_params:
            held = self.precision.optimizer.held(p, sample_entries).double()
            shadow = sample_entries(average.shadow[name]).double()
            way = self.start[name].double() - held
            gap += float(((shadow - held) * way).sum())
            toward += float(way.square().sum())
        return gap / max(toward, 1e-300)


if __name__ == "__main__":
    from lowprec.__main__ import main

    sys.argv.insert(1, "compare")
    sys.exit(main())
