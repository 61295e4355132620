"""The library as a package in another project: it works there, and leaves the process as it found it."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imports(path):
    """Top-level names of the modules that a file imports at its start, relative ones left out."""
    found = set()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found


# What a stranger's project does with the copy: it trains by several recipes, and prints the options of the
# process before the import, after it and at the end.
SCRIPT = """
import json, os, sys, warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def options():
    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "accumulated_recompile_limit": torch._dynamo.config.accumulated_recompile_limit,
        "suppress_errors": torch._dynamo.config.suppress_errors,
        "march": torch._inductor.config.cpp.march if hasattr(torch._inductor.config.cpp, "march") else None,
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
    }

import torch._dynamo, torch._inductor.config
torch.set_float32_matmul_precision("medium")  # a choice of the project's own
torch.backends.cudnn.allow_tf32 = True
found = [options()]

from mylib.precision import Precision, recipe
from mylib.kernels import compiled
found.append(options())


class Everything:
    def __contains__(self, kernel):
        return True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


losses = {}
for flags in json.loads(sys.argv[1]):
    generator = torch.Generator().manual_seed(0)
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 8)
    own, random_state = net.state_dict().keys(), torch.get_rng_state()
    run = Precision(net, recipe(**flags), lr=1e-3, ema_decay=0.9)
    x = torch.randn(32, 64, generator=generator)
    for step in range(4):
        run.observe(step == 3)
        loss = (run(x) - 2 * x).square().mean()
        run.backward(loss)
        report = run.step(measure=step == 3)
        losses.setdefault(json.dumps(flags), []).append(loss.item())
    assert report["update_survival"] > 0.3, report
    run.generator()(x)
    assert run.weights("ema").keys() == own
    assert "bytes a parameter" in str(run.ledger())
    run.load_state_dict(run.state_dict())
    compiled.unfused = Everything()  # one compiled recipe is enough: the others are eager, to be quick
    assert torch.equal(random_state, torch.get_rng_state())  # it draws nothing from the project's generator
found.append(options())

ours = [name for name in sys.modules if name.partition(".")[0] == "lowprec"]
places = sorted({os.path.dirname(m.__file__) for name, m in sys.modules.items() if name.startswith("mylib.")})
print(json.dumps({"options": found, "losses": losses, "ours": ours, "places": places}))
"""

RECIPES = [
    dict(pure_bf16=True, stochastic=True, opt8bit=True),
    dict(fp8=True, fp8_backend="emulate"),
    dict(pure_bf16=True, stochastic=True, sparse24="srste"),
    dict(bf16=True, sites=["generation=int8"]),
]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What SCRIPT prints, run in a project that holds the library as mylib/ and knows nothing of this one."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "lowprec", project / "mylib")
    (project / "main.py").write_text(SCRIPT)
    (project / "work").mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSTARTUP")}
    command = [sys.executable, str(project / "main.py"), json.dumps(RECIPES)]
    done = subprocess.run(command, cwd=project / "work", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "project": project}


def test_it_trains_in_8_bits_and_sparse(elsewhere):
    assert elsewhere["ours"] == []  # nothing of it came from outside the package
    assert all(Path(place).is_relative_to(elsewhere["project"] / "mylib") for place in elsewhere["places"])
    assert len(elsewhere["losses"]) == len(RECIPES)
    for flags, losses in elsewhere["losses"].items():
        assert losses[-1] < 0.995 * losses[0], flags


def test_importing_it_changes_no_option_of_the_process(elsewhere):
    before, imported, _ = elsewhere["options"]
    assert imported == before


def test_running_it_changes_no_option_of_the_process(elsewhere):
    before, _, after = elsewhere["options"]
    # libraries that a recipe asks for may leave variables of their own; ours sets none
    names = ("OMP_", "MKL_", "TORCH", "CUDA", "PYTORCH")
    for options in (before, after):
        kept = options.pop("environment")
        options["environment"] = {k: v for k, v in kept.items() if k.startswith(names)}
    assert after == before


# ---- Imports -----------------------------------------------------------------------------------------------


# by a function, where there is a GPU: what it may need
IMPORTED_LATE = {"lowprec/kernels/triton_step.py": {"triton"}}
FILES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "lowprec").rglob("*.py"))]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_library_needs_torch_alone(file):
    """Packages that a recipe may ask for are imported when it does."""
    needed = imports(ROOT / file) - set(sys.stdlib_module_names)
    assert needed <= {"torch", *IMPORTED_LATE.get(file, ())}
