"""Advice: bytes are those that are allocated, the order is that of the evidence, bad input is one line."""

import json
import logging
import runpy
import warnings
from pathlib import Path

import common
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowprec.__main__ as command
import models
import train
from lowprec import Precision, advise, recipe
from lowprec.advice import answer, footprint, machines, plot, subjects
from lowprec.errors import Refused
from lowprec.machine import support
from lowprec.parts.ranks import held_by_rank

ROOT = Path(__file__).resolve().parents[2]

eager = common.eager
ARITHMETIC_AND_STATES = ("fp32", "bf16", "fp16", "fp8", "opt8bit", "opt4bit")
NATIVE = {name: ("native", "here") for name in ARITHMETIC_AND_STATES}
SLOW = {**NATIVE, "bf16": ("emulated", "here"), "fp16": ("emulated", "here"), "fp8": ("no", "here")}


class Net(nn.Module):
    """Convolution, norm with statistics, attention-like products and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.mix = nn.Linear(16, 512)
        self.back = nn.Linear(512, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.silu(self.norm(self.stem(x))).flatten(2).transpose(1, 2)
        x = x + self.back(F.gelu(self.mix(x)))
        return self.head(x.mean(1))


def loss(model, n):
    return F.cross_entropy(model(torch.randn(n, 3, 8, 8)), torch.zeros(n, dtype=torch.long))


def on(monkeypatch, support, memory=2**40):
    machine = machines.Machine("a machine", memory, support, is_cpu=False, margin=0.0)
    monkeypatch.setattr(machines, "this_machine", lambda: machine)


def typed(rows):
    return [row.candidate.typed for row in rows]


def by_flags(rows):
    return {row.candidate.typed: row for row in rows}


# ---- Bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidate", answer.CANDIDATES, ids=lambda candidate: candidate.typed)
def test_bytes_are_those_allocated(candidate):
    if candidate.arithmetic == "fp8":
        pytest.skip("its layers need 16 features and more, and its bytes are bf16's")
    r = recipe(**candidate.flags)
    told = footprint.held_by_gpu(Net(), r, **candidate.options)
    run = Precision(Net(), r, **candidate.options)
    sizes = []

    def look(*_):
        sizes.append(sum(p.grad.nbytes for p in run.params if p.grad is not None))

    run.optimizer.register_step_pre_hook(look)
    run.backward(loss(run, 4))
    run.step()
    assert told.weights == sum(t.nbytes for t in [*run.model.parameters(), *run.model.buffers()])
    states = 0
    for state in run.optimizer.state.values():
        states += sum(t.nbytes for name, t in state.items() if torch.is_tensor(t) and name != "step")
    assert told.states == states > 0
    assert told.average == sum(t.nbytes for t in run.ema.shadow.values())
    if candidate.options:  # freed one by one
        assert told.gradients == max(p.nbytes for p in run.params)
    else:
        assert [told.gradients] == sizes


def test_gpus_share_rows():
    alone = footprint.held_by_gpu(Net(), recipe(bf16=True))
    half = footprint.held_by_gpu(Net(), recipe(bf16=True), world=2)
    assert half.states == pytest.approx(alone.states / 2, rel=0.01)
    assert half.gathered > alone.gathered == 0


@pytest.mark.parametrize("flags", [{}, {"bf16": True}, {"pure_bf16": True}], ids=str)
def test_a_pass_over_shapes_takes_the_bytes_of_a_real_one(flags):
    r = recipe(**flags)
    told = footprint.demand(Net(), loss, r, 8)
    run = Precision(Net(), r)
    loss(run, 8).backward()  # what the first call leaves behind, casts of weights apart
    run.zero_grad()
    with footprint.StepMeter([*run.model.parameters(), *run.model.buffers()]) as real:
        for p in run.params:
            p.register_post_accumulate_grad_hook(real.gradient)
        loss(run, 8).backward()
    assert told.casts == real.casts
    assert told.most == pytest.approx(real.most, rel=1e-3)  # the smallest tensors may come in another order
    assert told.activations == pytest.approx(real.activations, rel=1e-3)
    assert (told.casts > 0) == ("bf16" in flags)
    assert told.activations > 8 * 64 * 512 * r.dtype("compute").itemsize  # of the widest layer


# net, side and number of the images, whether an average is kept, the record of an H100 and its column, and
# how near the answer is: autocast keeps GroupNorm in fp32 there, and in bf16 on a CPU
ON_AN_H100 = [
    ("dit", "B/2", 32, 64, True, "", "peak_bytes", 0.03),
    ("unet", "base", 64, None, False, "-batch-unet", "used_bytes", 0.1),
]


@pytest.mark.parametrize("name, size, side, batch, average, record, column, near", ON_AN_H100)
def test_a_pass_over_shapes_takes_the_bytes_of_a_gpu(
    name, size, side, batch, average, record, column, near, monkeypatch
):
    """Of the peak that CUDA's allocator told, in bf16."""
    monkeypatch.setattr(answer, "CANDIDATES", answer.CANDIDATES[:1])
    record = json.loads((ROOT / f"experiments/bench/gpu-nvidia-h100-80gb-hbm3{record}.json").read_text())
    real = next(row for row in record["results"] if row["recipe"] == "bf16")
    with torch.device("meta"):
        net = models.GENERATIVE[name](3, 10, side, size)
    batch = batch or real["batch"]
    (told,) = advise(net, image_loss(side), gpu="H100", batch=batch, average=average).rows
    assert told.candidate.typed == "--bf16" and told.total == pytest.approx(real[column], rel=near)


def widened(x):
    yield from (F.group_norm(x, 2), F.layer_norm(x, (8,)), F.softplus(x))
    yield from (x.softmax(-1), F.log_softmax(x, -1), F.softmin(x, -1), x.cumsum(-1))
    yield from (x.exp(), x.log(), x.pow(2), x.rsqrt(), x.reciprocal(), x.norm(), x.sum(), x.prod())


def test_autocast_as_on_a_gpu_computes_these_in_fp32():
    x = torch.rand(2, 4, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), footprint.AutocastOfGPU():
        assert all(y.dtype == torch.float32 for y in widened(x))
        assert F.silu(x).dtype == (x @ x.transpose(1, 2)).dtype == torch.bfloat16
    with footprint.AutocastOfGPU():
        assert F.layer_norm(x, (8,)).dtype == torch.bfloat16


@pytest.mark.gpu
def test_autocast_on_a_gpu_computes_these_in_fp32():
    x = torch.rand(2, 4, 8, dtype=torch.bfloat16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert all(y.dtype == torch.float32 for y in widened(x))


def image_loss(side):
    def loss(model, n):
        x = torch.randn(n, 3, side, side)
        return F.mse_loss(model(x, torch.ones(n), torch.zeros(n, dtype=torch.long)), x)

    return loss


COPIES = 4 * (8 * 16 + 16 * 4 + 8 * 4)


@pytest.mark.parametrize(
    ("dtype", "in_fp32", "copies"),
    [(torch.bfloat16, True, COPIES), (torch.bfloat16, False, 0), (torch.float32, True, 0)],
)
def test_products_that_are_taken_in_fp32_hold_copies_for_a_moment(dtype, in_fp32, copies):
    a, b = torch.zeros(8, 16, dtype=dtype), torch.zeros(16, 4, dtype=dtype)
    with footprint.StepMeter([a, b], in_fp32) as meter:
        out = a @ b
        _ = out + out
    assert meter.most == max(out.nbytes + copies, 2 * out.nbytes)


def test_a_larger_batch_takes_what_each_example_takes():
    one = footprint.demand(Net(), loss, recipe(bf16=True), 32)
    double = footprint.demand(Net(), loss, recipe(bf16=True), 64)
    assert double.activations == pytest.approx(one.activations + 32 * one.each, rel=0.02)


def test_the_net_is_left_as_it_is():
    net = Net()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    advise(net, loss, memory="1GiB")
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in net.parameters())


# ---- The order ---------------------------------------------------------------------------------------------


def test_fast_arithmetic_decides_the_start(monkeypatch):
    on(monkeypatch, NATIVE)
    rows = typed(advise(Net(), loss, kind="DiT").rows)
    assert rows[0] == "--bf16" and "--fp16" not in rows
    assert rows[-1] == "--pure_bf16"  # rounding to nearest is shown to lose
    on(monkeypatch, SLOW)
    rows = typed(advise(Net(), loss, kind="DiT").rows)
    assert rows[0] == "(none)" and rows[-1] == "--fp8"


def test_what_does_not_fit_comes_later(monkeypatch):
    on(monkeypatch, NATIVE)
    rows = by_flags(advise(Net(), loss).rows)
    few = (rows["--pure_bf16 --stochastic"].total + rows["--bf16"].total) / 2
    on(monkeypatch, NATIVE, few)
    found = advise(Net(), loss)
    assert found.best.total <= few and found.best.candidate.flags != {"bf16": True}
    rows = by_flags(found.rows)
    assert not rows["--bf16"].fits and rows["--bf16"].most < 8
    assert rows["--pure_bf16 --stochastic"].most >= 8
    on(monkeypatch, NATIVE, 2**20 // 64)
    found = advise(Net(), loss)
    assert found.best is None and "Nothing fits" in str(found)


def test_it_says_how_far_the_evidence_is(monkeypatch):
    on(monkeypatch, NATIVE)
    found = advise(subjects.of_count(7e9), kind="GPT", lr=1e-3)
    row = {row.candidate.typed: row for row in found.rows}["--pure_bf16 --stochastic"]
    assert "times as large" in row.said_of_quality(7_000_000_000)
    plain = json.loads(json.dumps(found.json()))
    assert plain["rows"][0]["quality"]["pairs"] >= 3 and plain["parameters"] == 7_000_000_000
    assert plain["rows"][0]["activation_bytes"] is None and "activations are left out" in str(found)


def test_speeds_are_those_of_a_record_of_the_same_hardware(monkeypatch):
    def speeds(**asked):
        found = advise(subjects.of_count(1e9), **asked)
        return found, {row.candidate.typed: row.speed for row in found.rows}

    found, known = speeds(gpu="H100")
    assert "dit:XL/2:64:8" in found.speeds_from and "), compiled, on: H100" in found.speeds_from
    # what has speed 1 is fp32 with TF32, and no row of the answer
    assert found.speeds_against == "fp32 with TF32" and "as fast as fp32 with TF32: a DiT" in str(found)
    assert known["(none)"] is None and 1.0 < known["--bf16"] < known["--pure_bf16 --stochastic"]
    assert known["--pure_bf16 --stochastic --opt8bit"] > 1.0  # of a second record
    assert known["--pure_bf16 --master split"] is None  # the records have none of it
    found, known = speeds(gpu="RTX 4090")
    assert found.speeds_from == "" and set(known.values()) == {None}
    cpu = machines.Machine("a CPU", 2**40, NATIVE, True, 0.1, "CPU with avx512_bf16")
    monkeypatch.setattr(machines, "this_machine", lambda: cpu)
    found, known = speeds()
    assert found.speeds_against == "fp32" and known["(none)"] == 1.0
    assert machines.kind_of_gpu("NVIDIA H100 80GB HBM3") == "H100"
    assert machines.kind_of_gpu("NVIDIA L40S") == "L40S"


def test_steps_are_timed_here(monkeypatch):
    on(monkeypatch, {**SLOW, "bf16": ("no", "here")})
    rows = {row.candidate.typed: row for row in advise(Net(), loss, time=True, batch=2).rows}
    assert rows["(none)"].speed == 1.0
    assert rows["--bf16"].speed is None


# ---- The command -------------------------------------------------------------------------------------------

MINE = """
import torch
from torch import nn

def build():
    return nn.Conv2d(3, 8, 3)

def with_loss():
    net = nn.Linear(4, 4)
    return net, lambda model, n: model(torch.ones(n, 4)).mean()

def broken():
    return Netz()


def wants(size):
    return nn.Linear(size, size)

def leaves():
    raise SystemExit(3)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)

    def forward(self, x, condition):
        return self.first(x) + condition

def two():
    return Two()

def lazy():
    return nn.Sequential(nn.LazyLinear(5))

def imaginary():
    net = nn.Module()
    net.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
    return net
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "unet").mkdir()
    for unet in ("unet.json", "unet/config.json"):
        (tmp_path / unet).write_text(json.dumps(UNET))
    others = {"vit": VIT, "whisper": WHISPER}
    for name, config in (others | FORGED).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "weights.json").write_bytes(b"\x80")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "folder.png").mkdir()


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "block_out_channels": [32, 32],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
}
OF_TRANSFORMERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VIT = {
    **OF_TRANSFORMERS,
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "image_size": 16,
}
WHISPER = {"model_type": "whisper", "d_model": 36, "vocab_size": 64, "pad_token_id": 0}
WHISPER |= {f"{part}_layers": 1 for part in ("encoder", "decoder")}
FORGED = {
    "layers": {**LLAMA, "num_hidden_layers": 10**9},
    "blocks": {**UNET, "layers_per_block": 10**8},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**8},
    "depths": {"model_type": "resnet", "depths": [1, 10**8]},
    "infinite": {"model_type": "vlm", "text_config": {"n_layer": float("inf")}},
}


def ask(capsys, words):
    status = command.main(["advise", *words.split()])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--net mine.py:build --image_size 8 --plot bytes.png", "224 trained parameters"),
        ("--net mine.py:with_loss", "20 trained parameters"),
        ("--config llama.json --seq 16", "LlamaForCausalLM, 16 tokens"),
        ("--config unet", "UNet2DModel"),
        ("--config vit.json", "ViTForImageClassification, images of 16 x 16"),
        ("--config whisper.json", "WhisperForConditionalGeneration: "),
        ("--params 1e6 --gpus 4 --from finetune", "on 4 x a GPU"),
    ],
)
def test_nets_of_all_sources(capsys, mine, tmp_path, words, said):
    if "--config" in words:
        pytest.importorskip("diffusers" if "unet" in words else "transformers")
    status, printed = ask(capsys, f"{words} --memory 1GiB")
    assert status == 0 and said in printed.out, printed
    assert "start with --bf16" in printed.out
    left_out = any(source in words for source in ("--params", "whisper"))
    assert ("activations are left out" in printed.out) == left_out
    if "--plot" in words:
        assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_name_leaves_room_for_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    advice = advise(nn.Linear(4, 4), memory="1GiB")
    advice.subject = advice.subject._replace(name="a" * 300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.draw_plot(advice, str(tmp_path / "recipes.png"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "say which net"),
        ("--params 7e9 --net mine.py:build", "say which net"),
        ("--params 0", "how many parameters"),
        ("--params 1e6 --gpu RTX9999", "not known here"),
        ("--params 1e6 --memory 0", "24GiB"),
        ("--params 1e6 --memory lots", "24GiB"),
        ("--params 1e6 --gpus 0", "1 or more"),
        ("--params 1e6 --gpus two", "1 or more"),
        ("--params 7G", "as in 7e9 or 7B"),
        ("--net mine.py:build --image_size -4", "1 or more"),
        ("--net mine.py:with_loss --image_size 64", "--image_size says what a net is called with"),
        ("--net mine.py:with_loss --seq 64", "--seq says what a net is called with"),
        ("--params 1e6 --kind cat", "choose from"),
        ("--params 1e6 --lr -1", "above 0"),
        ("--params 1e6 --time", "can't be called"),
        ("--params 1e6 --seq 64", "--seq changes nothing beside --params"),
        ("--params 1e6 --image_size 64", "--image_size changes nothing"),
        ("--config unet.json --image_size 64", "--image_size changes nothing"),
        ("--params 1e6 --plot nowhere/x.png", "a folder that there is"),
        ("--params 1e6 --plot folder.png", "a folder that there is"),
        ("--params 1e6 --bf17", "no such flag"),
        ("--net mine.py:wants", "required positional argument: 'size'"),
        ("--net mine.py:missing", "no function"),
        ("--net mine.py:broken", "broken() raised NameError: name 'Netz' is not defined"),
        ("--net none.py:build", "FILE.py:FUNCTION"),
        ("--config other.json", "neither model_type"),
        ("--config none.json", "none.json"),
        ("--config deep.json", "recursion"),
        ("--config weights.json", "can't decode byte"),
        ("--config layers.json", "num_hidden_layers is 1,000,000,000: at most 10,000"),
        ("--config blocks.json", "layers_per_block is 100,000,000"),
        ("--config experts.json", "num_local_experts is 100,000,000"),
        ("--config depths.json", "depths is 100,000,000"),
        ("--config infinite.json", "n_layer is inf"),
        ("--task language", "python train.py --advise"),
        ("--config llama.json --seq 64", "32 tokens"),
        ("--config vit.json --seq 64", "--seq 64 changes nothing"),
        ("--net mine.py:leaves", "leaves() raised SystemExit"),
        ("--net mine.py:two --image_size 8 --time", "fails in a step"),
        ("--net mine.py:lazy", "lazy layer"),
        ("--net mine.py:imaginary", "complex"),
    ],
)
def test_bad_words_are_one_line(capsys, mine, words, said):
    if "llama" in words:
        pytest.importorskip("transformers")
    try:
        status, printed = ask(capsys, words)
    except SystemExit as ended:
        status, printed = ended.code, capsys.readouterr()
    assert status == 2 and said in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--task language --size 3M --memory 1GiB", 0, "2,730,432 trained parameters, a GPT"),
        ("--params 1M --memory 1GiB", 0, "1,000,000 trained parameters"),
        ("--task language --seq 64", 2, "--seq changes nothing beside a net of train.py"),
        ("--model dit --params 1e6", 2, "--model: no such flag"),
        ("--task language --bf17", 2, "bf17"),
        ("--model dit --size S/3", 2, "patch size 3"),
        ("--task nothing", 2, "rflow"),
        ("--check", 2, "--check"),
        ("--task classify --batch_size 256", 2, "write --batch"),
        ("--task language --optimizer sgd", 2, "--optimizer changes nothing beside --advise"),
        ("--task language --checkpoint_activations", 2, "--checkpoint_activations changes nothing"),
        ("--task language --pure_bf16", 2, "--pure_bf16 changes nothing"),
        ("--data fashion_mnist --white 4095", 2, "drop it"),
    ],
)
def test_train_asks_of_its_own_nets(capsys, words, status, said):
    try:
        ended = train.main(["--advise", *words.split()])
    except SystemExit as error:
        ended = error.code
    printed = capsys.readouterr()
    assert ended == status and said in (printed.err if status else printed.out)
    assert "Traceback" not in printed.err


def test_a_gpu_is_known_however_it_is_written():
    assert machines.gpu_by_name("NVIDIA GeForce RTX 4090").memory == 24 * 2**30
    assert machines.gpu_by_name("rtx4090").memory == 24 * 2**30
    assert machines.gpu_by_name("v100").support["bf16"][0] == "emulated"


def test_a_net_that_needs_values_is_answered_without_activations(monkeypatch):
    on(monkeypatch, NATIVE)

    def reads_a_number(model, n):
        return model(torch.ones(n, 4)).mean() * float(model(torch.ones(1, 4)).detach().mean())

    found = advise(nn.Linear(4, 4), reads_a_number)
    assert found.best.activations is None and "without values" in str(found)


def test_a_net_that_takes_something_else_is_answered_without_a_traceback(monkeypatch):
    on(monkeypatch, NATIVE)
    log, printed = logging.getLogger("torch._subclasses.fake_tensor"), []
    monkeypatch.setattr(log, "handle", printed.append)
    found = advise(nn.Linear(10, 16), image_size=8)
    assert found.best.activations is None and "can't be called without values" in str(found)
    assert not printed and not log.disabled


@pytest.mark.parametrize("average", ["yes", "no"])
def test_the_line_that_it_prints_holds_what_it_counts(capsys, mine, average):
    _, printed = ask(capsys, f"--net mine.py:build --image_size 8 --memory 1GiB --json --average {average}")
    rows = json.loads(printed.out)["rows"]
    assert len(rows) > 8
    for row in rows:
        if row["machine"][0] == "no":
            continue
        model = runpy.run_path("mine.py")["build"]()
        run = eval(row["line"], {"Precision": Precision, "recipe": recipe, "model": model})
        held = held_by_rank(run, 1)
        assert [held["states"], held["average"]] == [row["states_bytes"], row["average_bytes"]], row["line"]
        assert (row["average_bytes"] > 0) == (average == "yes")


class Blocks(nn.Module):
    """Blocks whose activations are larger than their weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def of_blocks(model, n):
    return model(torch.randn(n, 64, 128)).square().mean()


def test_blocks_are_computed_again_before_the_batch_shrinks(monkeypatch):
    on(monkeypatch, NATIVE)
    rows = by_flags(advise(Blocks(), of_blocks).rows)
    row = rows["--pure_bf16 --stochastic --opt8bit"]
    assert rows["--pure_bf16 --stochastic --opt8bit --grad_release"].total <= row.total
    on(monkeypatch, NATIVE, row.total - 3 * row.activations / 8)
    found = advise(Blocks(), of_blocks)
    assert found.best.candidate.recomputes and found.batch == 8
    assert "-- what follows does not fit" in str(found) and "import recompute" in str(found)
    assert not any("lora" in name for name in typed(found.rows))


def test_a_smaller_batch_is_chosen_where_the_usual_one_does_not_fit(monkeypatch):
    on(monkeypatch, NATIVE)
    least = min(row.total for row in advise(Net(), loss).rows)  # it has no blocks
    on(monkeypatch, NATIVE, least - 1)
    found = advise(Net(), loss)
    assert found.batch == 7 and found.best.fits and "as many as fit" in str(found)
    assert advise(Net(), loss, batch=8).best is None
    large = advise(subjects.of_count(7e9), memory="24GiB", regime="finetune")  # adapters fit with 8
    assert large.best.candidate.options == {"lora": 8} and "as many as fit" not in str(large)


def test_a_finetuning_that_does_not_fit_is_told_what_adapters_take(monkeypatch):
    on(monkeypatch, NATIVE, 2**20)
    rows = by_flags(advise(Blocks(), of_blocks, regime="finetune", batch=8).rows)
    for base in ("bf16", "nf4"):
        flags = f"--pure_bf16 --stochastic --set frozen={base} --lora 8"
        row = rows[flags]
        run = eval(row.line, {"Precision": Precision, "recipe": recipe, "model": Blocks()})
        held = {t.data_ptr(): t.nbytes for t in [*run.model.parameters(), *run.model.buffers()]}
        assert row.held.weights == sum(held.values())
        assert row.held.gradients == sum(p.nbytes for p in run.params) and row.quality is None
        assert rows[f"{flags} --checkpoint_activations"].activations < 0.6 * row.activations


def test_a_pass_over_shapes_that_takes_too_long_is_left_out(monkeypatch):
    on(monkeypatch, NATIVE)
    found = advise(Net(), loss, patience=0.0)
    assert found.best.activations is None and "takes too long" in str(found)


def test_nothing_to_train_is_refused():
    with pytest.raises(Refused, match="nothing to train"):
        advise(nn.Linear(4, 4).requires_grad_(False), image_size=8)


class Recomputed(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.way = way

    def forward(self, x):
        for layer in self.layers:
            x = self.way(layer, x).relu()
        return x


def test_a_net_that_recomputes_its_activations_fits_no_fewer_examples(monkeypatch):
    """The copies of weights that autocast makes are made again in the backward pass, and freed there."""
    on(monkeypatch, NATIVE)

    def most(way):
        return by_flags(advise(Recomputed(way), mean_of, memory="1GiB").rows)["--bf16"].most

    def recomputing(layer, x):
        return checkpoint(layer, x, use_reentrant=False)

    assert most(recomputing) >= most(lambda layer, x: layer(x)) > 0


def mean_of(model, n):
    return model(torch.randn(n, 256)).square().mean()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ConditionalVAE", None),
        ("GravityNet", None),
        ("FluxTransformer2DModel", "DiT"),
        ("SimpleViT", "ViT"),
        ("DiffusionModelUNet", "U-Net"),
        ("LlamaForCausalLM", "GPT"),
        ("Gemma3ForConditionalGeneration", "GPT"),
        ("WanTransformer3DModel", "DiT"),
        ("ResNet", "ResNet"),
    ],
)
def test_the_kind_of_a_net_is_read_from_its_name(name, kind):
    assert subjects.kind_of(type(name, (nn.Module,), {})()) == kind


def test_states_that_a_machine_does_not_run_are_said_so(monkeypatch):
    on(monkeypatch, support("rocm"))
    rows = by_flags(advise(Net(), loss).rows)
    assert rows["--bf16 --opt8bit"].how[0] == "no" and rows["--bf16"].how[0] == "native"


def test_an_unknown_regime_is_refused():
    with pytest.raises(Refused, match="from scratch, finetune"):
        advise(Net(), loss, regime="scratch")
