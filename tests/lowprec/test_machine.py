"""machine.py: tables of machines, packages that are missing, options of torch."""

import copy
import gc
import itertools
import json
import logging
import sys
import warnings
from pathlib import Path

import common
import pytest
import torch
import torch.nn.functional as F
from common import RECIPES, Net, batches, net, refused, start, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec import formats, machine, rules
from lowprec.advice.check import recommended_flags
from lowprec.errors import Refused
from lowprec.machine import exact_math, quiet_import, support, try_import
from lowprec.optimizers.rounded import AdamW
from lowprec.precision import Precision
from lowprec.recipes import check_machine, recipe

eager = common.eager

# ---- What machines can do ----------------------------------------------------------------------------------

FAST_CPU, OLD_CPU = ("cpu", None, {"avx512_bf16"}), ("cpu", None, {"avx2", "avx512f"})


# who, facts, tf32 bf16 fp16 fp8 opt8bit sparse24 as n(ative), e(mulated), - (no), flags to start with
MACHINES = [
    ("GTX 1080 Ti", ("cuda", (6, 1), set()), "--een-", ""),
    ("V100", ("cuda", (7, 0), set()), "-enen-", "--fp16"),
    ("RTX 2080 Ti", ("cuda", (7, 5), set()), "-enen-", "--fp16"),
    ("A100", ("cuda", (8, 0), set()), "nnnenn", "--bf16"),
    ("RTX 3090, A6000", ("cuda", (8, 6), set()), "nnnenn", "--bf16"),
    ("RTX 4090, 4080", ("cuda", (8, 9), set()), "nnnnnn", "--bf16"),
    ("H100", ("cuda", (9, 0), set()), "nnnnnn", "--bf16"),
    ("B100, B200", ("cuda", (10, 0), set()), "nnnnnn", "--bf16"),
    ("MI250X", ("rocm", None, set()), "-nn---", "--bf16"),
    ("Apple M1, M2", ("mps", None, set()), "-e----", ""),
    ("CPU with avx512_bf16", FAST_CPU, "-neen-", "--bf16"),
    ("CPU with amx_bf16 and amx_fp16", ("cpu", None, {"amx_bf16", "amx_fp16"}), "-neen-", "--bf16"),
    ("Arm CPU with bf16", ("cpu", None, {"bf16", "asimd"}), "-neen-", "--bf16"),
    ("CPU without", OLD_CPU, "-eeen-", ""),
]


@pytest.mark.parametrize("who, facts, levels, flags", MACHINES, ids=lambda x: x if isinstance(x, str) else "")
def test_what_machines_can_do(who, facts, levels, flags):
    table = support(*facts)
    short = {"native": "n", "emulated": "e", "no": "-"}
    columns = ("tf32", "bf16", "fp16", "fp8", "opt8bit", "sparse24")
    assert "".join(short[table[name][0]] for name in columns) == levels
    assert table["fp32"][0] == "native"
    assert all(reason and "\n" not in reason for _, reason in table.values())
    got, why = recommended_flags(table)
    assert got == flags and why


def test_old_gpus_are_not_sent_to_what_they_lack():
    assert "prefer --fp16" in support("cuda", (7, 5))["bf16"][1]
    for name in ("bf16", "fp16"):
        assert "--fp16" not in support("cuda", (6, 1))[name][1] and "fp32" in support("cuda", (6, 1))[name][1]


def on(monkeypatch, facts):
    monkeypatch.setattr(rules, "device_facts", lambda device: facts)


def test_check_machine(monkeypatch):
    on(monkeypatch, OLD_CPU)
    assert check_machine(recipe(), "cpu") == []
    refused(lambda: check_machine(recipe(sites=["compute=tf32"]), "cpu"), "tf32", "cpu", "use fp32 or bf16")
    (note,) = check_machine(recipe(fp16=True), "cpu")
    assert "fp16" in note and "emulated" in note and "--bf16" in note
    (note,) = check_machine(recipe(pure_bf16=True), "cpu")
    assert "bf16" in note and "avx512_bf16" in note
    on(monkeypatch, ("cpu", None, {"amx_bf16", "avx512_fp16"}))
    (note,) = check_machine(recipe(fp16=True), "cpu")
    assert "avx512_fp16" in note and "convolution" in note and "--bf16" in note
    on(monkeypatch, FAST_CPU)
    assert check_machine(recipe(pure_bf16=True), "cpu") == [] == check_machine(recipe(bf16=True), "cpu")
    on(monkeypatch, ("mps", None, set()))
    refused(lambda: check_machine(recipe(fp16=True), "mps"), "fp16", "mps", "--bf16")
    eight = recipe(opt8bit=True)
    refused(lambda: check_machine(eight, "mps"), "--opt8bit", "mps", "--pure_bf16 --stochastic")
    on(monkeypatch, ("cuda", (6, 1), set()))
    refused(lambda: check_machine(recipe(bf16=True), "cuda"), "bf16", "6.1", "use fp32")
    on(monkeypatch, ("cuda", (7, 0), set()))
    assert "prefer --fp16" in check_machine(recipe(bf16=True), "cuda")[0]
    assert check_machine(recipe(fp16=True), "cuda") == []
    refused(lambda: check_machine(recipe(sites=["compute=tf32"]), "cuda"), "tf32", "8.0")


def test_facts_of_this_machine():
    kind, capability, features = machine.device_facts("cpu")
    assert kind == "cpu" and capability is None
    if Path("/proc/cpuinfo").exists():
        words = set(Path("/proc/cpuinfo").read_text().split())
        assert features <= words and (("avx512_bf16" in features) == ("avx512_bf16" in words))
        assert features, "a CPU without any feature"
    assert machine.cpu_threads() >= 1


# ---- Packages ----------------------------------------------------------------------------------------------


def test_a_missing_package_is_said_with_its_name(monkeypatch):
    missing = ("--opt8bit", "its-name", "can't be imported", "pip install its-name")
    refused(lambda: quiet_import("no_such_module", "--opt8bit", "its-name"), *missing)
    refused(lambda: quiet_import("no_such.part", "--fp8"), "pip install no_such")
    on(monkeypatch, FAST_CPU)
    # tables of codes that another test has loaded are not asked for again
    monkeypatch.setitem(formats.FORMATS, "int8", formats.Int8())
    monkeypatch.setitem(formats.FORMATS, "int4", formats.Int4())
    for name in ("bitsandbytes", "bitsandbytes.functional", "torchao", "torchao.optim.subclass_4bit"):
        monkeypatch.setitem(sys.modules, name, None)
    for flags, name in ((dict(opt8bit=True), "bitsandbytes"), (dict(opt4bit=True), "torchao")):
        r = recipe(**flags)
        refused(lambda r=r: check_machine(r, "cpu"), f"--{next(iter(flags))}", f"pip install {name}")
        refused(lambda flags=flags: start(flags, net()), f"pip install {name}")
    assert check_machine(recipe(sites=["exp_avg=e4m3", "exp_avg_sq=e5m2"]), "cpu") == []


def test_an_import_that_fails_in_any_way_is_told_and_quiet(monkeypatch, tmp_path, capsys):
    (tmp_path / "loud.py").write_text(
        "import logging, warnings\n"
        "warnings.warn('no kernels')\nlogging.warning('no kernels')\nraise OSError('first line\\nsecond')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert try_import("loud") == (None, "first line")
    assert logging.root.manager.disable == disabled and capsys.readouterr() == ("", "")
    assert try_import("json") == (json, None)


def test_a_refusal_is_one_line_also_from_a_worker():
    two = str(Refused("one\ntwo"))
    assert len(two.splitlines()) == 1 and two.startswith("one") and two.endswith("two")
    assert isinstance(Refused("x"), ValueError) and str(Refused("ü: 3 % of it")) == "ü: 3 % of it"
    told = "Caught Refused in DataLoader worker 0.\nTraceback\nlowprec.machine.Refused: the last line\n"
    assert str(Refused(told)) == "the last line"


# ---- Options of the process --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_fp32_convolves_in_fp32_on_cuda():
    conv, x = nn.Conv2d(64, 64, 3).cuda(), torch.randn(4, 64, 32, 32, device="cuda")
    exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double())
    error = {}
    for compute in ("fp32", "tf32"):
        run = start(dict(sites=[f"compute={compute}"]), copy.deepcopy(conv))
        error[compute] = ((run(x).double() - exact).norm() / exact.norm()).item()
    assert error["fp32"] < 1e-6 < 1e-5 < error["tf32"]


def options():
    """What a library could change for the whole process."""
    config, cudnn = torch._dynamo.config, torch.backends.cudnn
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "cuBLAS": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.matmul.fp32_precision),
        "cuDNN": (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, cudnn.enabled),
        "cuDNN's precisions": (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        "reductions": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "mkldnn": (torch.backends.mkldnn.fp32_precision, torch.backends.mkldnn.enabled),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "dynamo": (config.recompile_limit, config.accumulated_recompile_limit, config.suppress_errors),
        "inductor": {key: str(value) for key, value in torch._inductor.config.get_config_copy().items()},
        "logging": logging.root.manager.disable,
        "warnings": list(warnings.filters),
        "generator": torch.random.get_rng_state().tolist(),
        "garbage": gc.isenabled(),
    }


EAGER = ["fp32", "bf16", "fp16", "opt8bit", "stochastic opt4bit", "islands"]
RUNS = [*itertools.product(EAGER, ["compute", "fp32", "autocast"])]
RUNS += [pytest.param("stochastic", "compute", marks=pytest.mark.compiled)]


@pytest.mark.parametrize("name, generation", RUNS)
def test_no_option_is_changed_by_any_recipe(name, generation):
    flags = dict(RECIPES[name])
    flags["sites"] = [*flags.get("sites", ()), f"generation={generation}"]
    model = net(width=32)
    before = options()
    run = start(flags, model, clip_grad=1.0)
    train(run, 1, measure=True)
    run.generator()(batches(1)[0][0])
    print(run.ledger())
    assert options() == before


def tf32():
    """The two common settings; reading them raises while those of the backends disagree."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def of_backends():
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    knobs = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)
    return [knob.fp32_precision for knob in knobs]


@pytest.fixture
def restored():
    before = tf32(), of_backends()
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = before[1][:2]
    torch.set_float32_matmul_precision(before[0][0])
    torch.backends.cudnn.allow_tf32 = before[0][1]
    assert tf32() == before[0]


@pytest.mark.parametrize("build", ["optimizer", "precision"])
def test_vector_functions_are_first_called_on_few_values(build):
    """Where threads share a first call, one may compute its part in low accuracy (pytorch issue 188792)."""
    sizes = {}

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.__name__.split(".")[0].removesuffix("_")
            if torch.is_tensor(args[0] if args else None):
                sizes.setdefault((name, args[0].dtype), args[0].numel())
            return function(*args, **kwargs or {})

    model = nn.Linear(300, 300)
    machine.settle_vector_math.cache_clear()
    with Calls():
        if build == "optimizer":
            optimizer = AdamW(model.parameters(), compiled=False)
            optimizer.step(grads={p: torch.ones_like(p) for p in model.parameters()})
        else:
            run = Precision(model, recipe())
            run.backward(run(torch.ones(300, 300)).tanh().sum())
    for function in machine.VECTOR_MATH:
        for dtype in (torch.float32, torch.float64):
            assert sizes[function.__name__, dtype] == 16, function


@pytest.mark.parametrize("outside", [("highest", True), ("high", False), ("medium", True)])
def test_exact_math_holds_inside_and_leaves_what_was_set(restored, outside):
    torch.set_float32_matmul_precision(outside[0])
    torch.backends.cudnn.allow_tf32 = outside[1]
    before = of_backends()
    with exact_math():
        assert tf32() == ("highest", False) and set(of_backends()) == {"ieee"}
        with exact_math(tf32=True):
            assert tf32() == ("high", True) and of_backends()[:3] == ["tf32"] * 3
        assert tf32() == ("highest", False) and set(of_backends()) == {"ieee"}
    assert tf32() == outside and of_backends() == before
    with pytest.raises(KeyError), exact_math(tf32=True):
        raise KeyError
    assert tf32() == outside and of_backends() == before


def test_exact_math_stands_settings_of_single_backends(restored):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    before = of_backends()
    with pytest.raises(RuntimeError):
        tf32()
    with exact_math():
        assert tf32() == ("highest", False) and set(of_backends()) == {"ieee"}
    assert of_backends() == before


class Seen(torch.autograd.Function):
    """Its input; remembers how torch would multiply in forward and in backward."""

    settings = []

    @staticmethod
    def forward(ctx, x):
        Seen.settings.append(tf32())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Seen.settings.append(tf32())
        return grad


class Watched(Net):
    def forward(self, x, t=None):
        return Seen.apply(super().forward(x, t))


@pytest.mark.parametrize("compute, inside", [("fp32", ("highest", False)), ("tf32", ("high", True))])
def test_fp32_is_not_left_to_the_backends_default(monkeypatch, compute, inside):
    # cuDNN convolves fp32 tensors in TF32 unless told otherwise; the settings are the same without a GPU
    before = tf32()
    run = start(dict(sites=[f"compute={compute}"]), Watched())
    generator = run.generator()
    for view in (run.view_of_model, generator):
        monkeypatch.setattr(view, "device", torch.device("cuda"))
    Seen.settings.clear()
    x, y = batches(1)[0]
    run.backward(F.mse_loss(run(x), y))
    generator(x)
    assert Seen.settings == [inside] * 3 and tf32() == before
