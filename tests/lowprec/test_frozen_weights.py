"""Weights that are not trained: dtype, row, absence from a checkpoint; averages in the net."""

import copy
import functools

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, draw, refused, same, start, through_a_file
from torch import nn

from lowprec.parts.frozen import averages_inside

eager = common.eager
LOW = dict(pure_bf16=True, stochastic=True)


class Adapted(nn.Module):
    """A frozen base layer with a low-rank factor beside it, as PEFT builds it."""

    def __init__(self, width=16):
        super().__init__()
        self.base_layer = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Net(nn.Module):
    """A frozen embedding and norm, adapted layers, and a layer whose bias alone is trained."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16).requires_grad_(False)
        self.norm = nn.LayerNorm(16).requires_grad_(False)
        self.layers = nn.ModuleList([Adapted(), Adapted()])
        self.out = nn.Linear(16, 16)
        self.out.weight.requires_grad_(False)

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def run_of(flags, base=torch.float32, seed=0, sites=(), **options):
    torch.manual_seed(seed)
    net = Net()
    for p in net.parameters():
        if not p.requires_grad:
            p.data = p.data.to(base)
    return start(dict(flags, sites=list(sites)), net, lr=1e-2, **options)


def train(run, first=0, last=4):
    losses = []
    for step in range(first, last):
        loss = (run(torch.arange(8)) - draw(8, 16, seed=step)).square().mean()
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


def frozen_row(run):
    return next(row for row in run.ledger().rows if row["site"] == "frozen")


FLAGS = {"fp32": {}, "bf16": dict(bf16=True), "pure_bf16": LOW}


def test_frozen_weights_are_cast_on_request():
    for sites, dtype in ((["frozen=cast"], BF16), (["frozen=bf16"], BF16), (["frozen=fp32"], torch.float32)):
        run = run_of(LOW, sites=sites)
        assert run.model.layers[0].base_layer.weight.dtype == dtype
        train(run)
    run = run_of(dict(bf16=True), BF16, sites=["frozen=cast"])
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    run = run_of(LOW, sites=["frozen=cast"], dtypes={"layers.0": "fp32"})
    layers = run.model.layers
    assert [layer.base_layer.weight.dtype for layer in layers] == [torch.float32, BF16]
    assert frozen_row(run)["value"] == "bf16 and fp32"
    train(run)


@pytest.mark.parametrize("flags", FLAGS)
def test_trained_weights_are_saved_alone_and_resume(flags):
    run = run_of(FLAGS[flags], BF16)
    train(run)
    saved = through_a_file(run.state_dict(trainable_only=True))
    assert set(saved["model"]) == {name for name, _ in run.named_params}
    rest = train(run, 4, 6)
    again = run_of(FLAGS[flags], BF16)  # the base is built as before
    again.load_state_dict(saved)
    assert train(again, 4, 6) == rest
    del saved["model"]["out.bias"]
    refused(lambda: again.load_state_dict(saved), "out.bias")


@pytest.mark.parametrize("freeze_again", [False, True])
def test_a_part_that_is_frozen_later_is_saved_with_what_is_trained(freeze_again):
    def begun(freeze):
        run = run_of(LOW, BF16)
        run.model.layers[0].lora_A.requires_grad_(not freeze)
        return run

    run = begun(False)
    train(run)
    run.model.layers[0].lora_A.requires_grad_(False)
    saved = through_a_file(run.state_dict(trainable_only=True))
    rest = train(run, 4, 6)
    again = begun(freeze_again)
    again.load_state_dict(saved)
    again.model.layers[0].lora_A.requires_grad_(False)
    assert train(again, 4, 6) == rest


class Codes(nn.Linear):
    """As bitsandbytes' Linear4bit: its state_dict has keys that it does not read back."""

    def __init__(self, width, seed):
        super().__init__(width, width, bias=False)
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(255, (width, width), dtype=torch.uint8, generator=generator)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight.quant_state = self.scale = torch.full((1,), 1 / 1024)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def quantised(seed=0):
    torch.manual_seed(0)
    layer = Adapted()
    layer.base_layer = Codes(16, seed)
    return start(LOW, layer, lr=1e-2)


def test_a_quantised_base_resumes_and_another_one_is_refused():
    def train(run, first, last):
        for step in range(first, last):
            run.backward((run(draw(4, 16, seed=step)) - 1).square().mean())
            run.step()
        return run.weights("raw")["lora_A.weight"]

    run = quantised()
    train(run, 0, 3)
    saved = through_a_file(run.state_dict())
    assert "base_layer.weight.absmax" in saved["model"]
    again = quantised()
    again.load_state_dict(saved)
    assert same(train(again, 3, 5), train(run, 3, 5))
    refused(lambda: quantised(seed=1).load_state_dict(saved), "base_layer.weight", "quantised base")


# ---- Weights of several dtypes in one module ---------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


class Mixed(nn.Module):
    """A frozen layer of a stranger: a weight times a small scale, each in a dtype of its own, and a bias."""

    def __init__(self, weight=E4M3, scale=torch.float32, bias=torch.float32, buffers=(), child=False):
        super().__init__()
        values = draw(16, 16).mul(8).round()  # numbers of any dtype
        tensors = {"scale": torch.full((1,), 2.0**-12 * 1.001), "weight": values, "bias": draw(16, seed=1)}
        for (name, t), dtype in zip(tensors.items(), (scale, weight, bias), strict=True):
            if name in buffers:
                self.register_buffer(name, t.to(dtype))
            else:
                self.register_parameter(name, nn.Parameter(t.to(dtype), requires_grad=False))
        self.child = nn.Linear(16, 16) if child else None

    def forward(self, x):
        self.seen = x.dtype
        y = F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias.to(x.dtype))
        return y if self.child is None else y + self.child(x)


MIXED = {
    "fp32": dict(weight=torch.float32),
    "bf16": dict(weight=BF16, scale=BF16, bias=BF16),
    "e4m3 and fp32": dict(),
    "e5m2 and bf16": dict(weight=torch.float8_e5m2, scale=BF16, bias=BF16),
    "e4m3 and e8m0": dict(scale=torch.float8_e8m0fnu),
    "int8 and fp32": dict(weight=torch.int8),
    "e4m3, a scale in a buffer": dict(buffers=("scale",)),
    "codes in a buffer": dict(buffers=("weight",)),
    "all in e4m3": dict(scale=torch.float8_e8m0fnu, bias=E4M3),
    "beside a trained child": dict(child=True),
    "bf16 and fp32": dict(weight=BF16),
    "fp16 and fp32": dict(weight=torch.float16),
    "fp32 and bf16": dict(weight=torch.float32, scale=BF16),
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", MIXED)
def test_each_frozen_weight_keeps_its_dtype_and_bits(kind, flags):
    torch.manual_seed(0)
    mixed = Mixed(**MIXED[kind])
    x = draw(8, 16, seed=2)
    came, wanted = copy.deepcopy(mixed), mixed(x)
    run = start(FLAGS[flags], nn.Sequential(mixed, nn.Linear(16, 4)), lr=1e-3)
    run.backward(run(x).square().mean())
    run.step()
    assert mixed.seen in (torch.float32, BF16)
    copies = [run.frozen("raw", generation=to).net[0] for to in ("compute", "fp32", "bf16")]
    for number, net in enumerate([mixed, *copies]):
        y = net(x.to(net.seen)).float()
        assert (y - wanted).norm() < 0.02 * wanted.norm(), number
        for name in ("weight", "scale", "bias"):
            t, first = getattr(net, name), getattr(came, name)
            # a copy in another dtype casts plain numbers, and no codes
            if number < 2 or first.dtype.itemsize == 1:
                assert same(t.detach(), first.detach()), (number, name)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in came.parameters() if not p.requires_grad}
    row = frozen_row(run)
    for dtype in dtypes:
        assert {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype) in row["value"]
    assert len(dtypes) == 1 or row["why"].count(" in ") == len(dtypes)
    assert run.ledger().parameters == sum(p.numel() for p in run.params)


def test_codes_are_cast_on_no_request_but_by_name():
    net = nn.Sequential(Mixed(), nn.Linear(16, 4))
    assert start(dict(LOW, sites=["frozen=cast"]), copy.deepcopy(net)).model[0].weight.dtype == E4M3
    named = start(LOW, net, dtypes={"0.bias": "bf16"}).model[0]
    assert (named.weight.dtype, named.bias.dtype) == (E4M3, BF16)


def test_a_plain_layer_in_float8_is_told_what_it_lacks():
    def build():
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        net[0].requires_grad_(False).weight.data = net[0].weight.data.to(E4M3)
        return net

    for flags in ({}, LOW):
        run = start(flags, build())
        refused(functools.partial(run, draw(2, 16)), "0 (Linear)", "in float8", "recipe(bf16=True)")
    assert start(dict(bf16=True), build())(draw(2, 16)).isfinite().all()


def test_frozen_weights_that_one_kernel_takes_are_widened_and_named():
    def build():
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        net[0].requires_grad_(False).weight.data = net[0].weight.data.to(BF16)
        return net

    with pytest.warns(UserWarning, match="'0.weight': frozen, and wider than it came"):
        run = start(LOW, build())
    assert {p.dtype for p in run.model[0].parameters()} == {torch.float32}
    run = start(dict(bf16=True), build())  # autocast casts what a linear layer is given
    assert [p.dtype for p in run.model[0].parameters()] == [BF16, torch.float32]
    for each in (run, start(LOW, build())):
        each.backward(each(draw(8, 16)).square().mean())
        each.step()


def test_transformers_own_layers_in_float8_keep_their_scales():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    for flags in FLAGS.values():
        net = nn.ModuleDict(dict(base=fp8.FP8Linear(256, 256, block_size=(128, 128)), own=nn.Linear(256, 8)))
        net["base"].requires_grad_(False).weight_scale_inv.data.fill_(2e-4)
        scale = start(flags, net).model["base"].weight_scale_inv
        assert scale.dtype == torch.float32 and (scale == 2e-4).all()


# ---- Averages in the net -----------------------------------------------------------------------------------


class Byol(nn.Module):
    """A student, and a teacher that forward moves by an average of its own."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.student = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
            if self.update == "lerp_":
                for t, p in pairs:
                    t.lerp_(p, 1e-3)
            elif self.update == "foreach":
                torch._foreach_lerp_([t for t, _ in pairs], [p for _, p in pairs], 1e-3)
            else:
                for t, p in pairs:
                    t.mul_(1 - 1e-3).add_(p, alpha=1e-3)
            target = self.teacher(x)
        return F.mse_loss(self.student(x).float(), target.float() + 1)


def way_of_teacher(flags, update, **options):
    """How far the teacher went, as a share of the student's way."""
    torch.manual_seed(0)
    net = Byol(update)
    first = copy.deepcopy(net.teacher.state_dict())
    run = start(flags, net, lr=1e-3, **options)
    for step in range(60):
        run.backward(run(draw(16, 8, seed=step)))
        run.step()
    own, went = 0, 0
    for name, value in first.items():
        went += (net.teacher.state_dict()[name].float() - value).norm().item()
        own += (net.student.state_dict()[name].float() - value).norm().item()
    return went / own


@pytest.mark.parametrize("update", ["lerp_", "foreach", "mul_ and add_"])
def test_a_teacher_in_the_net_follows_its_student(update):
    exact = way_of_teacher({}, update)
    with pytest.warns(UserWarning, match="'teacher' is frozen, and an average of 'student'.* fp32"):
        low = way_of_teacher(LOW, update)
    assert low == pytest.approx(exact, rel=0.1)


def test_a_teacher_that_is_cast_on_request_is_told():
    with pytest.warns(UserWarning, match="frozen=cast.*dtypes={'teacher': 'fp32'}"):
        stuck = way_of_teacher(dict(LOW, sites=["frozen=cast"]), "lerp_")
    with pytest.warns(UserWarning):
        moving = way_of_teacher(dict(LOW, sites=["frozen=cast"]), "mul_ and add_", dtypes={"teacher": "fp32"})
    assert stuck < 0.5 * moving


def test_what_is_taken_for_an_average():
    def pair(one, two, *names):
        net = nn.ModuleDict(dict(zip(names, (one, two), strict=True)))
        net[names[1]].requires_grad_(False)
        return averages_inside(net)

    layer, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    assert pair(layer, copy.deepcopy(layer), "encoder_q", "encoder_b") == {"encoder_b": "encoder_q"}
    assert pair(layer, copy.deepcopy(other), "net", "ema_net") == {"ema_net": "net"}
    assert pair(layer, copy.deepcopy(other), "query", "key") == {}, "a frozen layer of the same shape"
    assert pair(layer, copy.deepcopy(layer), "0", "1") == {}, "layers of a stack"
    assert pair(layer, nn.Sequential(nn.Linear(4, 5)), "student", "teacher") == {}
