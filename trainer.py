"""The loop. One step reads top to bottom in `Trainer.train_step`.

All randomness is a function of (seed, step), noise of rounding included. So an interrupted run equals an
uninterrupted one, on a CPU bit for bit; the same command again resumes it. harness/run_folder.py says what a
run leaves in its folder, tasks/task.py what is trained, harness/ranks.py what several processes do together.
"""

import shlex
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from harness import code, initial
from harness.advice import check_processes, late_average, recipe_notes, smaller_run
from harness.batches import end_workers, read_batches
from harness.checkpoints import check_optimizer, fitting
from harness.ending import Stopped, StopRequest, check_loss, check_weights, what_is_kept
from harness.flags import LARGEST_WHOLE
from harness.progress import Profile, Progress, TrainingClock
from harness.ranks import lost_process, ranks_here
from harness.run_folder import (
    CHECKPOINT,
    folder_of,
    peak_memory,
    start_peak_memory,
    write_json,
)
from harness.validation import BEST_FILE, Validation, is_due, steps_an_epoch
from lowprec.errors import Refused
from lowprec.optimizers import adafactor
from lowprec.optimizers.build import classes_of
from lowprec.parts import finish as exact_end
from lowprec.parts.activations import Meter, recompute, recomputed_blocks
from lowprec.parts.loss_scale import LossScale
from lowprec.parts.ranks import of_a_rank, refuse_whole
from lowprec.precision import Precision
from lowprec.rounding import Stream, stream
from lowprec.trials.schedule import lr_factor
from precision import check_options, check_origin, finish_of, recipe_of_run
from tasks.task import Rng, to_device

# ---- Trainer -----------------------------------------------------------------------------------------------


class Trainer:
    """A run, set up from its flags: `fit()` trains and scores it, `draw()` samples from its weights.

    run: its flags, as strategies.settle gives them. dry: shapes without memory, to print. draws: the weights
    will come from a checkpoint, nothing is trained. folder: where the run lies, when that is not
    --runs/--name. ranks: the processes, when these are not all that were started. Raises Refused before
    anything is written.
    """

    def __init__(self, run, command=(), dry=False, draws=False, folder=None, ranks=None):
        self.kind, self.table, self.config = run.kind, run.table, run.config
        self.command, self.dry, self.draws = list(command), dry, draws
        c = self.config
        # drawing and printing need no other rank
        self.ranks = ranks or ranks_here(spread=c.fsdp and not draws and not dry)
        self.device = self.ranks.device(c.device)
        if c.threads:
            torch.set_num_threads(c.threads)
        self.recipe = run.recipe.on(self.device)
        self.notes = recipe_notes(c, self.recipe, self.device, self.ranks.world, self.table)
        check_processes(c, self.recipe, self.ranks, draws)
        self.folder = folder_of(folder or Path(c.runs) / c.name, self.ranks)
        self.data = self.kind.load(c)
        self.task = self.kind(self.data, self.recipe, c)
        self.validation = self._validation()
        if c.init_scale != 1 and self.task.starts_elsewhere:
            brought = "scales new weights, and these come from a checkpoint"
            raise Refused(f"--init_scale {c.init_scale:g} {brought}: drop it, or train from scratch")
        # how far it is; load_state_dict sets these
        self.step, self.seconds, self.peak = 0, 0.0, None
        self.interval, self.since = 0, 0.0  # steps since the last logged line, and the sum of their losses
        self.train = self.batches = None
        self.stop = StopRequest()
        start = None
        if not draws:
            check_options(self.recipe, c)
            start = self.task.start(self)
        self.precision = self._precision(start)
        self.rates = [float(group["lr"]) for group in self.precision.optimizer.param_groups]

    # -- setting up

    def _validation(self):
        """When the held-out data are looked at. Settles --steps where --epochs says it."""
        c = self.config
        epoch = steps_an_epoch(c, self.task.train_count())
        if c.epochs * epoch > LARGEST_WHOLE:
            most = LARGEST_WHOLE // epoch
            raise Refused(f"--epochs {c.epochs}: an epoch is {epoch} steps; use {most} or fewer")
        if c.epochs:
            c.steps = c.epochs * epoch
        every = c.validate_every
        if not every and (c.epochs or c.early_stop):
            every = epoch
        return Validation(self.task.watched, every, c.early_stop)

    @property
    def finished(self):
        return self.step >= self.config.steps or self.validation.exhausted

    def new_net(self, device="cpu"):
        """The net in fp32 as a new run has it. Initial weights are drawn on the CPU: the same on every
        machine.
        """
        torch.manual_seed(stream(self.config.seed, Stream.INIT))
        with torch.device(device):
            net = self.task.net()
        initial.scale_matrices(net, self.config.init_scale)
        return net

    def _precision(self, start):
        """The Precision of a new net, or of one with the weights of the checkpoint `start`."""
        c = self.config
        born, lives = ("meta", "meta") if self.dry else ("cpu", self.device)  # shapes without memory, or all
        net = self.new_net(born)
        if start:
            initial.load_average(net, start, c.finetune or start["config"].get("name"))
        if c.perturb:
            initial.perturb(net, c.perturb)
        net = self.ranks.place(net, self.recipe, lives, self.table.shared(c))
        optimizer = c.optimizer
        of_optimizer = dict(
            lr=c.lr,
            betas=(0.9, c.beta2),
            eps=c.eps if c.least_rms is None else (adafactor.EPS[0], c.least_rms),
            weight_decay=c.weight_decay,
            momentum=c.momentum,
            nesterov={"on": True, "off": False, "auto": None}[c.nesterov],
        )
        if code.is_code(optimizer) and not classes_of(optimizer):
            optimizer, of_optimizer = code.strangers_optimizer(optimizer, of_optimizer), {}
        run = Precision(
            net,
            self.recipe,
            groups=self.task.groups(net),
            optimizer=optimizer,
            **of_optimizer,
            clip_grad=c.clip_grad,
            clip_tensor=c.clip_tensor,
            grad_release=c.grad_release,
            average_on=c.average_on,
            states_on=c.states_on,
            accumulate=c.accumulate,
            ema_decay=c.ema_decay,
            ema_warmup=c.ema_warmup,
            averages=[*c.average, *self.task.averages().values()],
            seed=self.noise_seed,
            blank=self.new_net,
            calibrate=lambda view: self.task.calibrate(view, self),
            **self.table.pick(c, "scaler"),
            **self.table.pick(c, "method"),
            fp4_until=round(c.steps * (1 - c.fp4_finish / 100)) if c.fp4_finish else None,
        )
        if c.finish and not self.draws:
            exact_end.check(run, finish_of(c.finish)[0])
        run.view_of_model.example = self.task.example()
        if c.checkpoint_activations:
            recompute(run.model)
        self.ranks.check(run)
        return run

    def line_of_a_rank(self):
        """What a rank of --fsdp is to hold, a line: of as many as were started, or of several numbers of them
        where this is one.
        """
        refuse_whole(self.precision.optimizer, self.precision.optimizer_name)
        return of_a_rank(self.precision, recomputed_blocks(self.precision.model), self.ranks.worlds_shown)

    # -- the loop

    def train_step(self, measure):
        """One optimiser step: `accumulate` micro-batches, then the update.

        Returns (mean loss as a tensor, what rounding did).
        """
        c, run, ranks, total = self.config, self.precision, self.ranks, 0.0
        if c.finish:
            kind, percent = finish_of(c.finish)
            if self.step == c.steps - max(1, round(c.steps * percent / 100)):
                run.finish(kind)
        run.observe(measure)
        self._set_rates(lr_factor(c, self.step))
        self._seed(c.seed, *ranks.words)  # dropout: each rank its own
        for micro in range(c.accumulate):
            batch = to_device(next(self.batches), self.device)
            rng = Rng(stream(c.seed, Stream.BATCH, self.step, micro), ranks.rank, ranks.world, self.device)
            with ranks.synchronised(run, last=micro == c.accumulate - 1):
                with self._metered():
                    loss = self.task.loss(run, batch, rng, self.step)
                run.backward(loss * c.loss_weight)
            total = total + loss.detach().float() / c.accumulate
        self._seed(self.noise_seed)  # peers that round by the global generator: alike on every rank
        report = run.step(measure=measure)
        self.step += 1
        return total, report

    @contextmanager
    def _metered(self):
        """The first micro-batch of a process tells what is kept for backward; the ledger gets that row."""
        if self.precision.part(Meter):
            yield
            return
        with Meter(self.precision.model) as meter:
            yield
        self.precision.parts.append(meter)
        if self.folder.open:
            write_json(self.folder / "ledger.json", self.precision.ledger().json())

    def _set_rates(self, factor):
        for group, rate in zip(self.precision.optimizer.param_groups, self.rates, strict=True):
            group["initial_lr"] = rate  # torch's name for it
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    @property
    def noise_seed(self):
        """The seed of rounding."""
        own = self.config.noise_seed
        return self.config.seed if own is None else own

    def _seed(self, seed, *words):
        seed = stream(seed, Stream.GLOBAL, self.step, *words)
        # torch.manual_seed seeds every kind of device; without a GPU it queues a call and a traceback a time
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def fit(self):
        """Train to config.steps, score, write everything; returns the summary dict, on the main rank.

        Goes on from the run's checkpoint if there is one.
        """
        self.ranks.meet(self.device, self.table.shared(self.config))
        try:
            return self._fit()
        except (RuntimeError, ConnectionResetError, EOFError) as error:
            reason = lost_process(error, self.ranks.world)
            if reason is None:
                raise
            raise Refused(f"{reason}; {what_is_kept(self.folder)}") from None
        finally:
            end_workers(self.batches)
            self.batches = None
            self.folder.close()

    def _fit(self):
        summary = self._open_folder()
        self.was_finished = bool(summary)
        if summary:
            self.export()
            return summary
        self.ready()
        self.folder.log_to(self.step)
        with self.stop:
            self._train()
        late = self.ranks.any(self.stop.signal, self.device)  # while the last checkpoint was written
        if late:
            raise Stopped(f"stopped after step {self.step}; the same command scores the run", late)
        return self._end()

    def ready(self):
        """What the first step needs: training data, and the net as it is called."""
        self.train = self.task.train_set(self)
        net = self.precision.model
        if self.config.compile:
            net = torch.compile(net)
        self.precision.forward = self.ranks.wrap(self.precision, net, self.noise_seed, lambda: self.step)
        self.batches = self.new_batches()

    def new_batches(self):
        """An iterator over the run's next micro-batches, this rank's rows of them."""
        return read_batches(self.train, self.config, self.ranks, self.step)

    def first_steps(self, batch_size):
        """Two steps with batches of this size, one of them measured, of a run that is thrown away."""
        self.config.batch_size = batch_size
        self.step = 0
        self.batches = self.new_batches()
        for measured in (True, False):
            self.train_step(measured)

    def _train(self):
        """Steps until the run is finished, with what is logged, drawn and saved between them."""
        c, main, first = self.config, self.ranks.main, self.step
        start_peak_memory(self.device)
        clock = TrainingClock(self.seconds)
        profile = Profile(c.profile if main else 0, self.folder / "profile.json", self.device)
        with self._bar() as bar, closing(profile):
            while not self.finished:
                looking = is_due(self.validation.every, self.step + 1)
                logging = looking or is_due(c.log_every, self.step + 1) or self.step + 1 == c.steps
                loss, report = self.train_step(measure=logging)
                profile.step()
                bar.step()
                self.since = self.since + loss
                self.interval += 1
                if logging:
                    self._log_interval(report, looking, clock, bar)
                stop_signal = self.ranks.any(self.stop.signal, self.device)
                with clock.stopped():  # pictures and files are not training
                    if is_due(c.sample_every, self.step) and not self.finished:
                        self._preview()
                    if stop_signal or self.finished or is_due(c.checkpoint_every, self.step):
                        self._save(report, clock)
                if stop_signal:
                    line = f"stopped at step {self.step} of {c.steps}; the same command resumes from there"
                    raise Stopped(line, stop_signal)
        if self.step > first:
            self.peak = peak_memory(self.device)

    def _bar(self):
        c = self.config
        compiles = self.precision.optimizer.compiled
        smaller = smaller_run(c, getattr(self.data, "image_size", 0))
        hidden = not self.ranks.main
        return Progress(c.name, self.step, c.steps, hidden, compiles or c.compile, smaller)

    def _log_interval(self, report, looking, clock, bar):
        """A line of metrics.jsonl for the steps since the last one; `looking`: with held-out scores."""
        loss = self.ranks.mean(self.since / self.interval).item()
        self.interval, self.since = 0, 0.0
        self.seconds = clock.seconds()
        heldout = {}
        if looking:
            with clock.stopped():
                heldout = self._look()
        lr = float(self.precision.optimizer.param_groups[0]["lr"])
        self.folder.log(dict(step=self.step, loss=loss, lr=lr, **report, **heldout))
        bar.show(loss=loss, **heldout)
        check_loss(loss, report, self.step, self.folder)

    def _preview(self):
        for _, model in self._drawing(self._sources()[:1]):
            pictures = self.task.preview(model, self._fixed_rng())
            self.folder.show(pictures, f"step{self.step:06d}", self.step)

    def _save(self, report, clock):
        """The checkpoint, unless it would be full of NaN: then the good one before it stays."""
        since = 0.0
        if self.interval:
            since = float(self.ranks.mean(self.since.clone()))
        check_loss(since, report, self.step, self.folder)
        check_weights(self.precision, self.step, self.folder, self.ranks, self.device)
        self.seconds = clock.seconds()
        self._write(CHECKPOINT, since)

    def _look(self):
        """Scores on held-out data, as {"heldout_<name>": number}; a checkpoint of the best so far is kept."""
        improved, waited = False, 0
        scores = self.held_out_scores(self._sources()[0])
        if scores:
            improved = self.validation.take(scores, self.step)
            waited = self.validation.waited
        self.validation.waited = self.ranks.any(waited, self.device) or 0  # all ranks end together
        improved = self.ranks.any(int(improved), self.device)
        if improved:
            self._write(BEST_FILE)
        return {f"heldout_{name}": value for name, value in scores.items()}

    def _drawing(self, sources):
        """(source of weights, the net that draws with them) of each, on the main rank; nothing on the others,
        which give it their rows where a net is spread.
        """
        for source in sources:
            model = self.ranks.gathered(self.precision.generator, source)
            if model is not None:
                yield source, model

    # -- its state

    def state_dict(self, since=0.0):
        """What a checkpoint holds. since: the sum of the losses since the last logged line, so that a resumed
        run logs what an uninterrupted one logs.
        """
        state = {
            "config": vars(self.config),
            "step": self.step,
            "seconds": self.seconds,
            "interval": self.interval,
            "since": since,
            "validation": self.validation.state_dict(),
            "precision": self.precision.state_dict(),
            "data": self._fingerprint_of_data(),
            "peak": peak_memory(self.device),
        }
        meter = self.precision.part(Meter)
        if meter:
            state["activations"] = meter.json()
        return state

    def load_state_dict(self, state):
        """Continue from a checkpoint's step. Raises Refused when it belongs to another model or recipe."""
        saved = state["precision"]
        with fitting("the checkpoint"):
            check_optimizer(saved["optimizer"], self.precision.optimizer.state_dict(), state["step"])
            self.precision.load_state_dict(saved)
        self.step, self.seconds, self.interval = state["step"], state["seconds"], state["interval"]
        self.since = torch.tensor(state["since"], device=self.device)
        if "validation" in state:
            self.validation.load_state_dict(state["validation"])

    def _fingerprint_of_data(self):
        """What stands for the content of the data; "" where a task of a file does not tell."""
        return str(getattr(self.data, "fingerprint", ""))

    def _restore_figures(self, checkpoint):
        """What a step tells, for a run that will do none. Older checkpoints hold neither figure."""
        self.peak, kept = checkpoint.get("peak"), checkpoint.get("activations")
        if kept:
            meter = Meter(self.precision.model)
            meter.bytes, meter.casts = kept["bytes"], kept["casts"]
            self.precision.parts.append(meter)

    def _write(self, name, since=0.0):
        self.folder.save(self.state_dict(since), name, self.device)

    def _open_folder(self):
        """Create or resume the run's folder. Returns its summary if the run is finished and scored, else
        None.
        """
        c, folder = self.config, self.folder

        def differences(old):
            return self.table.differences(old, c)

        folder.check(differences)
        self.ranks.first(folder.lock, self.device)
        if folder.has_checkpoint:
            checkpoint = folder.checkpoint(self.precision, self.device, differences)
            if checkpoint.get("data") and self._fingerprint_of_data() not in ("", checkpoint["data"]):
                raise folder.taken(f"holds a run on other data than --data {c.data} is now")
            self.load_state_dict(checkpoint)
            if self.finished:
                self._restore_figures(checkpoint)
        if self.step > c.steps:
            raise folder.taken(f"has {self.step:,} steps behind it, and --steps is {c.steps:,}")
        before = folder.summary() if self.finished else None
        if before and self.table.scored_alike(folder.flags(), c):
            return before
        self.ranks.wait()  # every rank has read the folder before one writes
        logged = self.step - self.interval
        folder.begin(self.command, vars(c), self.precision.ledger(), self.device, self.step, logged)
        if before:
            self.peak = before["peak_memory"]
        return None

    def _end(self):
        """Score, export, write the summary; then what the run's parts add to it, which may fail. Returns the
        summary on the main rank, None on others: they give their rows of a net that is spread.
        """
        c, precision = self.config, self.precision
        if not self.ranks.main:
            self.score()
            self.export()
            return None
        started = time.perf_counter()
        print("scoring ...", file=sys.stderr, flush=True)
        images_per_second = self.step * c.batch_size * c.accumulate / max(self.seconds, 1e-9)
        kind, number = self.task.items
        scaling, meter = precision.part(LossScale), precision.part(Meter)
        summary = {
            "step": self.step,
            "parameters": sum(p.numel() for p in precision.params),
            "seconds": self.seconds,
            "images_per_second": images_per_second,
            "skipped_steps": scaling.skipped if scaling else 0,
            "bytes_per_parameter": precision.ledger().state_bytes,
            "scores": self.score(),
            "reference": self.task.reference(),
            "peak_memory": self.peak or peak_memory(self.device),
            "scoring_seconds": time.perf_counter() - started,
        }
        if meter:
            summary["activations"] = meter.json()
        summary[f"{kind}_per_second"] = images_per_second * number
        if self.validation.every:
            summary["validation"] = self.validation.json()
        self.export()
        self.folder.close()
        write_json(self.folder / "summary.json", summary)
        figures = {}
        for part in precision.parts:
            try:
                figures.update(part.finish(precision, self.fixed_loss))
            except torch.OutOfMemoryError:
                name = type(part).__name__
                print(f"no memory left for the last figures of {name}; all else is written", file=sys.stderr)
        if figures:
            summary.update(figures)
            write_json(self.folder / "summary.json", summary)
        return summary

    # -- scores

    def _sources(self):
        """The names of the weights that are scored; the first is drawn and looked at while training too."""
        weights = self.config.weights
        if weights == "both":
            return ["ema", "raw"]
        if weights == "all":
            return [*self.precision.averages, "raw"]
        if weights == "ema" and late_average(self.config):
            return ["raw", "ema"]  # the average alone would be no result
        return [weights]

    def held_out_scores(self, source):
        """{name: number} of `Task.validate` with these weights, {} on ranks that don't draw."""
        scores = {}
        for _, model in self._drawing([source]):
            scores = self.task.validate(model, self._fixed_rng())
        return scores

    def _fixed_rng(self):
        return Rng(stream(self.config.seed, Stream.FIXED), device=self.device)

    def fixed_loss(self, model):
        """The loss of `model` on the first images of the data, one rank's micro-batch, with the same noise at
        every call.
        """
        count = min(len(self.train), self.config.batch_size // self.ranks.world)
        batch = to_device(self.train[list(range(count))], self.device)
        probe = stream(self.config.seed, Stream.PROBE)
        torch.manual_seed(probe)  # dropout: the same at each call
        rng = Rng(probe, device=self.device)
        return self.task.loss(model, batch, rng, self.step)

    def score(self, prefix=""):
        """{source of weights: scores}; pictures go to samples/."""
        scores = {}
        sources = self._sources()
        for source, model in self._drawing(sources):
            scores[source], pictures = self.task.evaluate(model, self._fixed_rng())
            name = "final"
            if len(sources) > 1 or prefix:
                name = f"{prefix}{source.replace(':', '_')}"
            self.folder.show(pictures, name, self.step)
        return scores

    def draw(self, checkpoint, label):
        """Score and picture the weights of a checkpoint; returns {source: scores}, which samples/<label>.json
        holds too.
        """
        theirs = recipe_of_run(self.table.obeyed(checkpoint["config"]), self.table, self.kind.sites)
        check_origin(self.recipe, theirs, draws=True)
        self.load_state_dict(checkpoint)
        self.export()
        started = time.perf_counter()
        facts = {
            "command": shlex.join(self.command),
            "step": self.step,
            "ledger": self.precision.ledger().json(),
            "scores": self.score(prefix=f"{label}-"),
            "reference": self.task.reference(),
            "scoring_seconds": time.perf_counter() - started,
        }
        write_json(self.folder / "samples" / f"{label}.json", facts)
        return facts["scores"]

    def export(self):
        """Write the averaged weights as safetensors, in the average's dtype, where --export says."""
        c = self.config
        if c.export:
            self.folder.export(c.export, self.precision.weights("ema"), vars(c), self.step)


class TaskTraining:
    """A trials.training.Training of a Trainer that is new."""

    def __init__(self, trainer):
        self.trainer, self.run = trainer, trainer.precision
        trainer.ready()

    def rate_at(self, step):
        return self.trainer.rates[0] * lr_factor(self.trainer.config, step)

    def step(self):
        loss, _ = self.trainer.train_step(measure=False)
        if self.trainer.finished:
            end_workers(self.trainer.batches)
        return loss

    def held_out(self):
        scores = self.trainer.held_out_scores("raw" if self.trainer.config.weights == "raw" else "ema")
        if "loss" not in scores:
            task = self.trainer.config.task
            raise Refused(f"--task {task} has no loss on held-out data: --trial can't compare it")
        return scores["loss"]
