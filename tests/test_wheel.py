"""The wheel: what `pip install .` installs works in another project, under another name and
beside nothing but torch, and leaves the process as it found it.
"""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lowprec import __main__ as command
from lowprec.kernels import cpu_step

ROOT = Path(__file__).resolve().parents[1]

# Run by Python before the script: nothing can be imported but mylib, torch and what torch needs.
GUARD = """
import importlib.machinery
import sys

ALLOWED = set({allowed!r}) | set(sys.stdlib_module_names) | {{"mylib"}}


class OnlyTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top.startswith("_sysconfigdata"):
            return super().find_spec(name, path, target)
        return None


sys.meta_path[-1:] = [OnlyTorch]
"""

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

import mylib
from mylib import AdamW, Precision, Refused, Release, Watch, recipe
from mylib.__main__ import main
from mylib.kernels import compiled
assert mylib.__version__
for name in mylib.__all__:
    assert getattr(mylib, name) is not None
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
    compiled.unfused = Everything()  # one compiled recipe is enough: the others are eager, to be quick
    assert torch.equal(random_state, torch.get_rng_state())  # it draws nothing from the project's generator

# the optimiser alone, watched, and each gradient freed within backward
model = nn.Linear(8, 8).bfloat16()
optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic")
watch = Watch(model, optimizer, every=1)
for _ in range(2):
    model(torch.ones(4, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert "steps" in str(watch)
Release(optimizer)
model(torch.ones(4, 8).bfloat16()).float().square().mean().backward()
assert all(p.grad is None for p in model.parameters())
assert main(["compare", "no.pt", "such.pt"]) == 2
try:
    AdamW(model.parameters(), exp_avg="int8", exp_avg_sq="int8")
except Refused as error:
    assert "pip install bitsandbytes" in str(error)
else:
    raise AssertionError("int8 moments need bitsandbytes")
found.append(options())

ours = [name for name in sys.modules if name.partition(".")[0] == "lowprec"]
places = sorted({os.path.dirname(m.__file__) for name, m in sys.modules.items() if name.startswith("mylib.")})
print(json.dumps({"options": found, "losses": losses, "ours": ours, "places": places}))
"""

RECIPES = [
    dict(pure_bf16=True, stochastic=True),
    dict(pure_bf16=True, stochastic=True, sites=["exp_avg=e5m2", "exp_avg_sq=e4m3"]),
    dict(fp8=True, fp8_backend="emulate"),
    dict(pure_bf16=True, stochastic=True, sparse24="srste"),
]

USER = """
import torch
from torch import nn

from lowprec import EMA, AdamW, Precision, Recipe, Watch, recipe

model = nn.Linear(4, 4)
chosen: Recipe = recipe(pure_bf16=True, stochastic=True)
run: Precision = Precision(model, chosen, lr=1e-3, ema_decay=0.999)
run.backward(run(torch.zeros(1, 4)).sum())
run.step()
optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic")
watch: Watch = Watch(model, optimizer)
average: EMA = EMA(list(model.named_parameters()), 0.999)
text: str = str(watch)
"""


def needed_by_torch():
    """Top-level modules of torch and of all that it requires."""
    distributions, todo = set(), ["torch"]
    while todo:
        name = re.split(r"[^\w.-]", todo.pop())[0]
        if name in distributions:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        distributions.add(name)
        todo += distribution.requires or []
    provided = importlib.metadata.packages_distributions()
    canonical = {re.sub(r"[-_.]+", "-", name).lower() for name in distributions}
    found = []
    for module, owners in provided.items():
        if any(re.sub(r"[-_.]+", "-", owner).lower() in canonical for owner in owners):
            found.append(module)
    return sorted(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which the wheel is installed, and nothing else."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = ["git", "-C", ROOT, "ls-files", "-z", "lowprec", "pyproject.toml", "README.md", "LICENSE"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0")[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(wheel, check=True)
    (built,) = folder.glob("lowprec-*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_kernel_and_the_marker_of_types(site):
    for name in ("cpu_step.cpp", "cpu_codes.h", "cpu_vectors.h"):
        assert (site / "lowprec" / "kernels" / name).is_file()
    assert (site / "lowprec" / "py.typed").is_file()
    assert not (site / "tests").exists() and not (site / "harness").exists()


def test_the_command_tells_which_lowprec_it_is(site, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])  # where another one lies in the way
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert f"in {ROOT / 'lowprec'}" in out and "installed too" in out
    assert ("kernels: the hand-written step" in out) == (cpu_step.library() is not None)


def test_a_users_file_and_the_library_are_typed(site, tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    # reading torch takes longer than all the rest
    ini = "[mypy]\nignore_missing_imports = True\n[mypy-torch.*,numpy.*,sympy.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(ini)
    words = [sys.executable, "-m", "mypy", "--python-executable", sys.executable, "user.py"]
    environment = {**os.environ, "MYPYPATH": str(site)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_under_another_name_it_trains_beside_nothing_but_torch_and_changes_no_option(site, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (site / "lowprec").rename(project / "mylib")
    (project / "main.py").write_text(GUARD.format(allowed=needed_by_torch()) + SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSTARTUP")}
    words = [sys.executable, str(project / "main.py"), json.dumps(RECIPES)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1 and "no.pt: no such file" in done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ours"] == []  # nothing of it came from outside the package
    assert all(Path(place).is_relative_to(project / "mylib") for place in told["places"])
    assert len(told["losses"]) == len(RECIPES)
    for flags, losses in told["losses"].items():
        assert losses[-1] < 0.995 * losses[0], flags
    before, imported, after = told["options"]
    assert imported == before and after == before


# ---- Imports -----------------------------------------------------------------------------------------------


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


# by a function, where there is a GPU: what it may need
IMPORTED_LATE = {"lowprec/kernels/triton_step.py": {"triton"}}


def test_a_file_of_the_library_needs_torch_alone():
    """Packages that a recipe may ask for are imported when it does."""
    for path in (ROOT / "lowprec").rglob("*.py"):
        needed = imports(path) - set(sys.stdlib_module_names)
        assert needed <= {"torch", *IMPORTED_LATE.get(str(path.relative_to(ROOT)), ())}, path
