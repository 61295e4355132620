"""The doctor: names, with figures, the sites of a run that are losing information.

    python train.py --diagnose runs/NAME        its checkpoint.pt, and metrics.jsonl where there is one;
                                                exit status 0: healthy, 1: findings
    python doctor.py BEFORE AFTER               two checkpoints of any program: python -m lowprec compare

It reads the run and writes nothing. It concludes nothing from the recipe: it takes the run some steps further
in memory, by its own code and data, and compares what is written and computed with fp32 arithmetic. A task
examines sites of its own by the probes that it brings. docs/doctor.md says more.
"""

import math
import sys
from pathlib import Path

import torch

from harness.batches import BatchIndices
from harness.checkpoints import read as read_checkpoint
from harness.files import read_lines
from lowprec.formats import FORMATS, Format
from lowprec.parts.loss_scale import LossScale
from lowprec.parts.micro_batches import MicroBatches
from lowprec.rounding import Stream, stream
from lowprec.telemetry import sample_entries
from lowprec.watch import verdicts
from lowprec.watch.computed import Recorder, count_not_finite, relative, relative_tree
from lowprec.watch.net_state import rounded_to_bf16
from lowprec.watch.verdicts import Diagnosis, Finding
from lowprec.watch.writes import Writes
from strategies import settle
from tasks.task import Rng, to_device
from trainer import Trainer

FURTHER_STEPS = 8  # further steps in memory
DIAGNOSED_IMAGES = 16
# parameters x pixels x images of one step; about a second on a CPU core. Beyond it the batch is cut
MOST_WORK_A_STEP = 5e9
DEFAULT_DECAY = 0.999  # of the average
# how far from its place, at most, a bf16 running mean stands still: an update of a tenth of the difference,
# which is BatchNorm's, is lost below half an ulp, 2^-8 of the value
STANDSTILL_DISTANCE = 10 * 2**-8

DIAGNOSIS_LIMITS = {**verdicts.FINDING_LIMITS, **verdicts.RUN_LIMITS}  # a task adds its own


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


# ---- The examination ---------------------------------------------------------------------------------------


class Examination:
    """One run, loaded and examined. A task's `probes` read `config`, `device`, `data`, `work`, `pixels` and
    `images`, and call `task`, `net`, `rng`, `relative` and `judge`.
    """

    images = DIAGNOSED_IMAGES
    relative = staticmethod(relative)

    def __init__(self, config, checkpoint, folder):
        self.checkpoint = checkpoint
        self.found = []  # findings
        self.sound = {}  # {site: its figure}, where that is no finding
        self.metrics = read_lines(folder / "metrics.jsonl")
        self.trainer = trainer = Trainer(settle(config), draws=True, folder=folder)
        self.config = trainer.config
        self.device = trainer.device
        self.data = trainer.data
        self.precision = trainer.precision
        self.recipe = trainer.recipe
        self.limits = {**DIAGNOSIS_LIMITS, **trainer.task.limits}
        self.train = trainer.task.train_set(trainer)
        self.start = self._start()
        trainer.load_state_dict(checkpoint)
        args, _ = self.precision.view_of_model.example
        parameters = sum(p.numel() for p in self.precision.params)
        self.pixels = math.prod(args[0].shape[2:] or args[0].shape[1:]) * parameters
        self.work = MOST_WORK_A_STEP * (100 if self.device.type == "cuda" else 1)
        for part in (self.precision.optimizer, *self.precision.averages.values()):
            part.compiled = False

    def _start(self):
        """{name: sample of the initial weight}; None where the run started from another one's weights."""
        if self.trainer.task.starts_elsewhere:
            return None
        weights = self.precision.weights("raw")
        return {name: sample_entries(weights[name]).clone() for name, _ in self.precision.named_params}

    def diagnosis(self):
        """Diagnosis of everything that can be examined."""
        self.logged()
        if self.finite():
            self.trainer.task.probes(self)
            self.computing()
            self.accumulation()
            self.stepping()
        self.found.sort(key=lambda finding: finding.rank)
        done, planned = self.checkpoint["step"], self.config.steps
        head = f"step {done} of {planned}, {self.trainer.task} on {self.data.name}"
        return Diagnosis(head, self.found, self.sound)

    def judge(self, limit, figure, text, remedy, site=None, certain=False):
        """A finding if `figure` is beyond limits[limit] or `certain`, else a line of `sound`. Returns whether
        it is one.
        """
        low, high = self.limits[limit]
        site = site or limit
        if certain or figure > low:
            severity = "severe" if figure > high else "moderate"
            self.found.append(Finding(site, severity, text, remedy))
            return True
        self.sound[site] = figure
        return False

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

    # -- what the run has written down

    def logged(self):
        rows = self.metrics
        scaled = self.recipe.compute == "fp16"
        overflows = [row for row in rows if row.get("nonfinite_grads")]
        if overflows and not scaled:
            entries = sum(row["nonfinite_grads"] for row in overflows)
            text = f"{entries} gradient entries were not finite, last at step {overflows[-1]['step']}"
            self.found.append(Finding("grads", "severe", text, "lower --lr, --clip_grad 1 or --warmup"))
        if rows and not math.isfinite(rows[-1].get("loss", 0.0)):
            text = f"the loss was {rows[-1]['loss']} at step {rows[-1]['step']}"
            self.found.append(Finding("loss", "severe", text, "lower --lr, --clip_grad 1 or --bf16"))
        if scaled:
            self.scaling(rows)

    def scaling(self, rows):
        """What the loss scaler did in the last rows that it is named in."""
        scale = rows[-1].get("loss_scale") if rows else None
        if scale is None:
            scale = self.precision.part(LossScale).scaler.get_scale()
        recent = [row for row in rows if "skipped_steps" in row][-11:]
        share = 0.0
        if recent:
            steps = recent[-1]["step"] - recent[0]["step"]
            share = (recent[-1]["skipped_steps"] - recent[0]["skipped_steps"]) / max(1, steps)
        text = f"the loss scaler skipped {share:.0%} of the last steps; the scale is {scale:g}"
        # below 1 the scaler shrinks gradients: they overflow as they are
        self.judge("skipped", share, text, "--bf16, or lower --lr", site="grads", certain=scale < 1)

    def finite(self):
        """Whether all weights, averages and states are; a finding for each kind that is not."""
        saved = self.checkpoint["precision"]
        bad = {"weights": sum(count_not_finite(saved["model"]).values())}
        bad.update(count_not_finite(saved["optimizer"]))
        for name, average in saved["averages"].items():
            bad[self.title(name)] = sum(count_not_finite(average).values())
        remedy = "train again with a lower --lr, --clip_grad 1 or --bf16"
        for site, number in bad.items():
            if number:
                self.found.append(Finding(site, "severe", f"{number:,} entries are not finite", remedy))
        return not any(bad.values())

    # -- what the net computes

    @torch.no_grad()
    def computing(self):
        """The net's output and loss against those of an fp32 copy, on one batch of the training data."""
        task, batch, step = self.task(), self.some(DIAGNOSED_IMAGES), self.trainer.step
        exact = Recorder(self.net(loss="fp32", generation="fp32"))
        task.loss(exact, batch, self.rng(3), step)
        args, kwargs = exact.inputs
        full = exact.net(*args, **kwargs)
        own_net = self.net(loss="fp32")
        change = relative_tree(own_net(*args, **kwargs), full)
        text = f"the net's output differs by {change:.1%} from that of an fp32 copy of itself"
        self.judge("compute", change, text, "--bf16, or no flag")

        own = float(self.task().loss(self.net(), batch, self.rng(3), step))
        in_fp32 = float(self.task().loss(own_net, batch, self.rng(3), step))
        change = abs(own - in_fp32) / max(abs(in_fp32), 1e-300)
        text = f"the loss is {own:.4g} and in fp32 {in_fp32:.4g}"
        self.judge("loss", change, text, "--set loss=fp32")
        self.buffers(exact.net, args, kwargs, full)

    def buffers(self, exact, args, kwargs, full):
        """Buffers that hold bf16 values: how far the output of `exact`, an fp32 copy of the net that gives
        `full`, is from that with the values that were rounded away.
        """
        fresh = dict(self.trainer.new_net().named_buffers())
        held = {}
        for name, b in self.precision.model.named_buffers():
            if name in fresh and b.is_floating_point() and b.numel():
                held[name] = b
        narrow = [name for name, b in held.items() if rounded_to_bf16(b, fresh[name])]
        if not narrow:
            if held:
                self.sound["buffers"] = 0.0
            return
        own = dict(exact.net.named_buffers())
        changes = "changes"
        for name in narrow:
            b, made = held[name].float(), fresh[name].to(self.device).float()
            if torch.equal(made.bfloat16(), b.bfloat16()):  # it never changes, like the frequencies of RoPE
                own[name].copy_(made)
            else:  # what it would be in fp32 is not known, but how far off it can be
                off = self.rng(5).uniform(b.numel()).view(b.shape) * 2 - 1
                own[name].copy_(b * (1 + STANDSTILL_DISTANCE * off))
                changes = "may change"
        change = relative_tree(exact(*args, **kwargs), full)
        text = (
            f"{len(narrow)} of {len(held)} buffers hold bf16 values, {narrow[0]} the first; with fp32 ones "
            f"the net's output {changes} by {change:.1%}"
        )
        self.judge("buffers", change, text, "--set buffers=fp32", certain=self.recipe.buffers == "fp32")

    # -- what training writes

    def batches(self, size, micro):
        """The run's next micro-batches of `size` examples, `micro` a step."""
        start = self.trainer.step * micro
        for indices in BatchIndices(len(self.train), size, self.config.seed, start):
            yield self.train[indices]

    def accumulation(self):
        """The sum of a step's micro-batches against their sum in float64."""
        c = self.config
        if c.accumulate == 1 or not self.recipe.low_weights:
            return
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
            return
        off = sum(float((summed[p].double() - g).square().sum()) for p, g in exact.items())
        size = sum(float(g.square().sum()) for g in exact.values())
        error = math.sqrt(off / max(size, 1e-300))
        text = f"the sum of {count} micro-batches of gradients is {error:.2%} off"
        self.judge("accumulate", error, text, "--set accumulate=fp32")

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

    def stepping(self):
        """The run's own next steps, in memory; what each wrote against what fp32 wanted."""
        trainer, precision, c = self.trainer, self.precision, self.config
        images = c.batch_size * c.accumulate
        c.accumulate = max(1, min(c.accumulate, FURTHER_STEPS, int(self.work / (self.pixels * c.batch_size))))
        c.batch_size = int(max(1, min(c.batch_size, self.work / self.pixels)))
        # else gradients are noisier than those that v has seen
        whole = images == c.batch_size * c.accumulate
        precision.options.accumulate = c.accumulate
        trainer.batches = self.batches(c.batch_size, c.accumulate)
        writes = Writes(precision.optimizer, precision.named_params, precision.averages)
        hook = precision.optimizer.register_step_pre_hook(writes.before)
        reports = []
        measured = bool(precision.methods)  # `casts` alone asks for it; Writes looks for itself
        for _ in range(FURTHER_STEPS // c.accumulate if whole else 2):
            reports.append(trainer.train_step(measure=measured)[1])
            writes.after()
        hook.remove()
        self.weights(writes.weights)
        self.moments(writes.moments, writes.excess() if whole else None)
        for name, tally in writes.averages.items():
            self.average(name, precision.averages[name], tally)
        self.casts(reports)
        self.decay()

    def writing(self, remedy="--stochastic, --kahan or --master split"):
        """The remedy for writes that lose something."""
        if not self.precision.optimizer.by_recipe:
            return f"--stochastic without --optimizer {self.config.optimizer}"
        return remedy

    def weights(self, tally):
        if tally.entries:
            text = f"{tally.stuck:.0%} of the updates are under half an ulp of their weight, and "
            text += f"{tally.kept:.0%} of them is written: {tally.lost:.0%} of the wanted movement is lost"
            self.judge("update", tally.lost, text, self.writing())

    def moments(self, tally, excess):
        if not tally.entries:
            return
        # no rounding helps 4-bit codes below the least one, a 16th of the largest of their block
        remedy = FORMATS.get(self.recipe.exp_avg_sq, Format).remedy
        text = f"{tally.lost:.0%} of the shrinking of v is lost: it can grow and not shrink"
        if tally.lost > 1:  # a block's scale that moves moves all of its values
            text = "v grows where it should shrink"
        if excess:
            text += f"; v is {excess:.1f} times the mean of g^2 over {FURTHER_STEPS} batches"
        self.judge("exp_avg_sq", tally.lost, text, self.writing(remedy))

    def casts(self, reports):
        """What our casts to FP8 and FP4 made zero and clipped in these steps, the worst operand of each."""
        for kind in ("fp8", "fp4"):
            self.casts_of(reports, f"{kind} zeroed", f"{kind}_underflow_", "non-zero values become zero")
            self.casts_of(reports, f"{kind} clipped", f"{kind}_saturated_", "values are clipped")
        self.casts_of(reports, "attention", "attention_underflow_", "magnitude becomes zero")

    def casts_of(self, reports, limit, prefix, effect):
        shares = {}  # {operand: its share, the mean over the steps}
        for name in reports[0]:
            if name.startswith(prefix):
                of_steps = [report.get(name, 0.0) for report in reports]
                shares[name.removeprefix(prefix)] = sum(of_steps) / len(reports)
        if shares:
            operand = max(shares, key=shares.get)
            kind = "FP4" if limit.startswith("fp4") else "FP8"
            text = f"{shares[operand]:.1%} of the {effect}, {operand} operands of {kind} products"
            remedy = "--set attention=compute" if limit == "attention" else self.casting(operand)
            self.judge(limit, shares[operand], text, remedy)

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

    def average(self, name, average, tally):
        site = self.title(name)
        q = average.decay
        done = self.checkpoint["step"]
        text = f"{tally.stuck:.0%} of the entries away from their weight can't move, "
        text += f"{tally.lost:.0%} of the wanted movement is lost"
        if self.start:
            steady = (1 - q**done) / (done * (1 - q))
            text += (
                f"; it is {self.way_back(average):.0%} of the way back to the initial weights, and an exact "
                f"one of decay {q:g} is {steady:.0%} back when the weights move steadily"
            )
        remedy = f"--set {site}=fp32, or {site}_update=stochastic"
        if site.startswith("average "):
            remedy = f"--average {q:g}:fp32"
        if not self.judge("ema", tally.lost, text, remedy, site=site) and self.start:
            self.arrival(site, q, max(done, self.config.steps))

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

    def arrival(self, site, decay, planned):
        """Whether an average that loses nothing will have left the initial weights when the run ends."""
        low, high = self.limits["arrival"]
        remains = decay**planned
        if remains <= low:
            return
        # a run so short that the default decay has not arrived either is young, not ill
        severity = "note"
        if DEFAULT_DECAY**planned <= low:
            severity = "severe" if remains > high else "moderate"
            del self.sound[site]
        text = (
            f"the average has not arrived: exp(-(1-decay) steps) = {remains:.0%} of the start remains after "
            f"{planned} steps of decay {decay:g}; nothing is lost by rounding"
        )
        remedy = f"a decay of {max(0.0, 1 - 3 / planned):.4g} or less, or more --steps"
        self.found.append(Finding(site, severity, text, remedy))

    def decay(self):
        """Weight decay alone: steps without gradient or momentum. Last, for it spoils the state."""
        precision, c = self.precision, self.config
        optimizer = precision.optimizer
        if not c.weight_decay or not all(optimizer.still(p) for p in precision.params):
            return
        writes = Writes(optimizer, precision.named_params, {})
        grads = {p: torch.zeros_like(p) for p in precision.params}
        for _ in range(FURTHER_STEPS):
            writes.before(optimizer, (), {"grads": grads})
            optimizer.step(grads=grads)
            writes.after()
        tally = writes.weights
        if not tally.entries:
            return
        wanted = f"a weight should shrink by lr*wd = {c.lr * c.weight_decay:.1g} of itself a step"
        text = f"{wanted}; {tally.lost:.0%} of that is lost"
        self.judge("weight decay", tally.lost, text, self.writing())


if __name__ == "__main__":
    from lowprec.__main__ import main

    sys.argv.insert(1, "compare")
    sys.exit(main())
