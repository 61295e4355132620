"""--profile STEPS: where the time of a step goes, by torch.profiler.

After a few steps of warm-up, so many steps are traced. profile.json in the run's folder opens in a trace
viewer (ui.perfetto.dev, chrome://tracing); the operators that take longest are printed. Tracing slows these
steps down and changes no number.
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

WARM = 5  # steps before the trace: compiling and allocating are not what is asked
ROWS = 15


class Profile:
    """Traces `steps` steps of a run, 0 for none. path: of the trace."""

    def __init__(self, steps, path, device):
        self.left, self.path, self.wait, self.running = steps, path, WARM, None
        self.cuda = device.type == "cuda"

    def step(self):
        """To be called after each step."""
        if not self.left:
            return
        if self.wait:
            self.wait -= 1
            if not self.wait:
                kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.cuda
                self.running = profile(activities=kinds)
                self.running.start()
            return
        self.left -= 1
        if not self.left:
            self.close()

    def close(self):
        """Write and print what was traced so far."""
        if self.running is None:
            if self.left:
                late = f"--profile: the run ended before step {WARM + 1}, where a trace begins"
                print(late, file=sys.stderr)
            return
        if self.cuda:
            torch.cuda.synchronize()
        self.running.stop()
        self.running.export_chrome_trace(str(self.path))
        by = f"self_{'cuda' if self.cuda else 'cpu'}_time_total"
        print(self.running.key_averages().table(sort_by=by, row_limit=ROWS), file=sys.stderr)
        print(f"the trace is in {self.path}", file=sys.stderr)
        self.running, self.left = None, 0
