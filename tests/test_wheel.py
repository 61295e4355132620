"""The wheel: what `pip install .` installs works from another folder, beside nothing but torch."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Run by Python before the script: nothing can be imported but lowprec, torch and what torch needs.
GUARD = """
import importlib.machinery
import sys

ALLOWED = set({allowed!r}) | set(sys.stdlib_module_names) | {{"lowprec"}}


class OnlyTorch(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top.startswith("_sysconfigdata"):
            return super().find_spec(name, path, target)
        return None


sys.meta_path[-1:] = [OnlyTorch]
"""

SCRIPT = """
import importlib.util
import io

import torch
import torch.nn.functional as F
from torch import nn

import lowprec
from lowprec import AdamW, Precision, Refused, Release, Watch, recipe
from lowprec.__main__ import main

assert lowprec.__version__ and set(lowprec.__all__) <= set(dir(lowprec))
for name in lowprec.__all__:
    assert getattr(lowprec, name) is not None
for absent in ("monai", "bitsandbytes", "harness", "tasks"):
    assert importlib.util.find_spec(absent) is None


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        x = torch.randn(16, 64, generator=generator)
        yield x, x.roll(1, 1)


# the loop of the README
model = make()
run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.9)
for x, y in batches(1):
    loss = F.mse_loss(run(x), y)
    run.backward(loss)
    run.step()
assert run.generator()(x).dtype == torch.float32 and "bytes a parameter" in str(run.ledger())

# saved, resumed, and gone on with: the same bits as without the interruption
buffer = io.BytesIO()
torch.save(run.state_dict(), buffer)
buffer.seek(0)
again = Precision(make(), recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.9)
again.load_state_dict(torch.load(buffer, weights_only=True))
for one in (run, again):
    for x, y in batches(2):
        one.backward(F.mse_loss(one(x), y))
        one.step()
for p, q in zip(run.params, again.params, strict=True):
    assert torch.equal(p, q)

# the optimiser alone, with moments in 8-bit floats, and each gradient freed within backward; the steps above
# were compiled
model = make().to(torch.bfloat16)
codes = dict(exp_avg="e5m2", exp_avg_sq="e4m3", compiled=False)
optimizer = AdamW(model.parameters(), lr=1e-3, update="stochastic", **codes)
watch = Watch(model, optimizer, every=1)
for x, y in batches(3):
    F.mse_loss(model(x.bfloat16()).float(), y).backward()
    optimizer.step()
    optimizer.zero_grad()
assert "steps" in str(watch)
Release(optimizer)
F.mse_loss(model(x.bfloat16()).float(), y).backward()
assert all(p.grad is None for p in model.parameters())

# its command
assert main(["compare", "no.pt", "such.pt"]) == 2

# what needs another package says how to install it
try:
    AdamW(make().parameters(), exp_avg="int8", exp_avg_sq="int8")
except Refused as error:
    assert "pip install bitsandbytes" in str(error) and "\\n" not in str(error)
else:
    raise AssertionError("int8 moments need bitsandbytes")
print("done in", lowprec.__file__)
"""

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

# No signature of lowprec names anything of these; reading them takes three times as long as all the rest.
UNREAD = "torch.ao torch.cuda torch.distributed torch.export torch.fx torch.jit torch.onnx torch.testing "
UNREAD += "torch.utils torch._dynamo torch._inductor torch._export torch._functorch torch._refs "
UNREAD += "torch._decomp torch._prims torch._subclasses torch._higher_order_ops numpy sympy"


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
    """A folder in which the wheel is installed, and nothing else but the guard."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "lowprec", "pyproject.toml", "README.md", "LICENSE"],
                   check=True, stdout=(folder / "names").open("wb"))  # fmt: skip
    for name in (folder / "names").read_text().split("\0")[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(wheel, check=True)
    (built,) = folder.glob("lowprec-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", built], check=True)
    return folder / "site"


def python(site, *words, cwd):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_installed_library_trains_beside_nothing_but_torch(site, tmp_path):
    (tmp_path / "main.py").write_text(GUARD.format(allowed=needed_by_torch()) + SCRIPT)
    done = python(site, "main.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert done.stderr.count("\n") == 1 and "no.pt: no such file" in done.stderr


def test_the_wheel_holds_the_kernel_and_the_marker_of_types(site):
    for name in ("cpu_step.cpp", "cpu_codes.h", "cpu_vectors.h"):
        assert (site / "lowprec" / "kernels" / name).is_file()
    assert (site / "lowprec" / "py.typed").is_file()
    assert not (site / "tests").exists() and not (site / "harness").exists()


def test_the_command_tells_which_lowprec_it_is(site):
    done = python(site, "-m", "lowprec", cwd=ROOT)  # where another one lies in the way
    assert done.returncode == 0, done.stderr
    assert f"in {ROOT / 'lowprec'}" in done.stdout and "installed too" in done.stdout
    assert "kernels: " in done.stdout


def test_a_users_file_and_the_library_are_typed(site, tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    unread = ",".join(f"{name}.*" for name in UNREAD.split())
    ini = f"[mypy]\nignore_missing_imports = True\n[mypy-{unread}]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(ini)
    command = [sys.executable, "-m", "mypy", "--python-executable", sys.executable, "user.py"]
    environment = {**os.environ, "MYPYPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
