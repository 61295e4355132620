"""--profile STEPS: where the time of a step goes, by torch.profiler.

After a few steps of warm-up, so many steps are traced. profile.json in the run's folder opens in a trace
viewer (ui.perfetto.dev, chrome://tracing); the operators that take longest are printed. Tracing slows these
steps down and changes no number.
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM = 5  # steps before the trace: compiling and allocating are not what is asked
ROWS = 15


class Profile:
    """Traces `steps` steps of a run, 0 for none. path: of the trace."""

    def __init__(self, steps, path, device):
        self.path, self.cuda, self.running, self.written = path, device.type == "cuda", None, False
        if steps:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.cuda
            when = schedule(wait=WARM - 1, warmup=1, active=steps, repeat=1)
            self.running = profile(activities=kinds, schedule=when, on_trace_ready=self._write)
            self.running.start()

    def step(self):
        """To be called after each step."""
        if self.running is not None:
            self.running.step()

    def close(self):
        """Write and print what was traced so far."""
        if self.running is None:
            return
        if self.cuda:
            torch.cuda.synchronize()
        self.running.stop()
        self.running = None
        if not self.written:
            late = f"--profile: the run ended before step {WARM + 1}, where a trace begins"
            print(late, file=sys.stderr)

    def _write(self, traced):
        self.written = True
        traced.export_chrome_trace(str(self.path))
        by = f"self_{'cuda' if self.cuda else 'cpu'}_time_total"
        print(traced.key_averages().table(sort_by=by, row_limit=ROWS), file=sys.stderr)
        print(f"the trace is in {self.path}", file=sys.stderr)
