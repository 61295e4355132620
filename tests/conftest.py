import gc
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lowprec.kernels import cpu_products  # noqa: E402

# The nets of the tests are so small that a second thread costs more than it brings, most of all on busy
# cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Tests of bare loops in bf16 take as long as those of Precision, where a CPU has no instructions for it.
cpu_products.settle_products(torch.device("cpu"))


def pytest_configure(config):
    """Without `-m gpu` no test sees a GPU, and no process that it starts: they compare bits, which a GPU does
    not repeat.
    """
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        # else torch.manual_seed keeps each seed for a device that may come, with a traceback, which takes as
        # long as a step of a small net
        for place in (torch.cuda.random, torch.xpu.random, torch.mtia):
            place._lazy_call = lambda *args, **options: None


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # not item.keywords: they name the folders above too
                reason = "needs a CUDA device, and torch finds none here; where there is one, pytest -m gpu"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.freeze()  # what was imported is no garbage: no collection looks through it
    # libraries that tests import later are a million objects more
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def accelerate_begins_anew():
    """Accelerate keeps the mode of a process's first Accelerator and refuses another one."""
    yield
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
