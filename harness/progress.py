"""What a run shows while it trains: the bar, the clock of training, and with --profile its trace."""

import sys
import time
from contextlib import contextmanager

import torch
from tqdm import tqdm

LONG_RUN = 2 * 3600  # seconds, from which on a run is said to take long


class TrainingClock:
    """The seconds of training; what happens within `stopped` is not training. before: those of the run so
    far.
    """

    def __init__(self, before):
        self._before = before
        self._started = time.perf_counter()
        self._stopped_at = None

    def seconds(self):
        now = time.perf_counter() if self._stopped_at is None else self._stopped_at
        return self._before + now - self._started

    @contextmanager
    def stopped(self):
        self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - self._stopped_at
            self._stopped_at = None


class Progress:
    """The bar of the steps. name: of the run; step: those done, of `steps`; compiles: whether the first step
    compiles kernels, which takes long and is no part of the rate. smaller: what makes steps faster, a text
    that is said once where they take hours.
    """

    def __init__(self, name, step, steps, hidden, compiles, smaller):
        self.compiles, self.smaller, self.began = compiles, smaller, time.perf_counter()
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=hidden, dynamic_ncols=True, desc=name)
        self.figures = {}
        self.is_first_step = True
        if compiles:
            self.bar.set_postfix_str("compiling the optimiser step, once")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()

    def step(self):
        """A step is done."""
        self.bar.update()
        now = time.perf_counter()
        took, self.began = now - self.began, now
        is_timed = not (self.is_first_step and self.compiles)
        left = self.bar.total - self.bar.n
        if is_timed and self.smaller and took * left > LONG_RUN:
            hours = took * left / 3600
            line = f"a step takes {took:.3g} s here, and {left:,} take {hours:.0f} hours: {self.smaller}"
            self.bar.write(line, file=sys.stderr)
        if is_timed:
            self.smaller = ""
        if self.is_first_step:  # it compiled: the clock of the rate starts here
            self.bar.initial = self.bar.n
            self.bar.start_t = self.bar.last_print_t = time.time()
            self.bar.set_postfix_str("")
        self.is_first_step = False

    def show(self, **figures):
        """Show these figures beside the bar, and those shown before of other names."""
        self.figures.update(figures)
        self.bar.set_postfix({name: f"{value:.4f}" for name, value in self.figures.items()})


STEPS_BEFORE_TRACE = 5  # steps before a trace: compiling and allocating are not what is asked
OPERATOR_ROWS = 15  # of the table of operators


class Profile:
    """--profile STEPS: traces so many steps of a run, after a few of warm-up; 0 for none. path: of the trace,
    which opens in a trace viewer (ui.perfetto.dev). Tracing slows these steps down and changes no number.
    """

    def __init__(self, steps, path, device):
        self.path = path
        self.cuda = device.type == "cuda"
        self.profiler = None
        self.written = False
        if steps:
            from torch.profiler import ProfilerActivity, profile, schedule

            activities = [ProfilerActivity.CPU]
            if self.cuda:
                activities.append(ProfilerActivity.CUDA)
            when = schedule(wait=STEPS_BEFORE_TRACE - 1, warmup=1, active=steps, repeat=1)
            self.profiler = profile(activities=activities, schedule=when, on_trace_ready=self._write)
            self.profiler.start()

    def step(self):
        """To be called after each step."""
        if self.profiler is not None:
            self.profiler.step()

    def close(self):
        """Write and print what was traced so far."""
        if self.profiler is None:
            return
        if self.cuda:
            torch.cuda.synchronize()
        self.profiler.stop()
        self.profiler = None
        if not self.written:
            late = f"--profile: the run ended before step {STEPS_BEFORE_TRACE + 1}, where a trace begins"
            print(late, file=sys.stderr)

    def _write(self, traced):
        self.written = True
        traced.export_chrome_trace(str(self.path))
        kind = "cuda" if self.cuda else "cpu"
        operators = traced.key_averages()
        table = operators.table(sort_by=f"self_{kind}_time_total", row_limit=OPERATOR_ROWS)
        print(table, file=sys.stderr)
        print(f"the trace is in {self.path}", file=sys.stderr)
