"""Moments held in codes: the step, the frozen second moment, states of the old rule."""

import itertools

import common
import pytest
import torch
from common import (
    BF16,
    FLOATS,
    KINDS,
    coder,
    correlation,
    draw,
    refused,
    same_state,
    through_a_file,
)
from torch import nn

from lowprec.optimizers.rounded import AdamW
from lowprec.precision import Precision
from lowprec.recipes import recipe
from lowprec.rounding import noise_bits

eager = common.eager

FLAG = {"int8": dict(opt8bit=True), "int4": dict(opt4bit=True)}
FLAG |= {kind: dict(sites=[f"exp_avg={kind}", f"exp_avg_sq={kind}"]) for kind in ("log4", *FLOATS, "flash8")}


def optimizer(kind, params, **options):
    coder(kind)
    return AdamW(params, exp_avg=kind, exp_avg_sq=kind, **options)


# ---- The step ----------------------------------------------------------------------------------------------


def gradients(shapes, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=g) * 0.1 for s in shapes] for _ in range(steps)]


def feed(made, params, grads):
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.to(p.device, p.dtype)
        made.step()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_step_from_equal_states_equals_bitsandbytes_within_one_code(dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    options = dict(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    theirs = nn.Parameter(torch.randn(70, 100).to(dtype))  # 7000 values: the last block is not full
    library = bitsandbytes.optim.AdamW8bit([theirs], **options)
    *before, last = gradients([(70, 100)], 5)
    feed(library, [theirs], before)
    ours = nn.Parameter(theirs.detach().clone())
    made = optimizer("int8", [ours], **options)
    state, known = made.state[ours], library.state[theirs]
    places = (("exp_avg", "state1", "absmax1"), ("exp_avg_sq", "state2", "absmax2"))
    for name, codes, scale in places:
        state[name].copy_(known[codes])
        state[f"{name}_scale"].copy_(known[scale])
    state["step"] = known["step"]
    feed(library, [theirs], [last])
    feed(made, [ours], [last])
    for name, codes, scale in places:
        assert (state[name].int() - known[codes].int()).abs().max() <= 1
        assert (state[name] != known[codes]).float().mean() < 0.01
        torch.testing.assert_close(state[f"{name}_scale"], known[scale], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-7)


SHAPES = [(10,), (64, 65), (128, 64), (4097,), (64, 128), (3, 7)]  # small; 4160 and 4097 end within a block


@pytest.mark.parametrize("update", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_in_a_bucket_keep_their_own_blocks_and_small_ones_stay_fp32(kind, update):
    grads = gradients(SHAPES, 4)
    together = [nn.Parameter(torch.ones(s)) for s in SHAPES]
    made = optimizer(kind, together, update=update)
    feed(made, together, grads)
    for i, (p, shape) in enumerate(zip(together, SHAPES, strict=True)):
        state = made.state[p]
        coded = p.numel() >= 4096
        assert ("exp_avg_scale" in state) == made.coded(p, "exp_avg") == coded, shape
        assert state["exp_avg"].dtype == (torch.uint8 if coded else torch.float32)
        if update == "nearest":  # stochastic noise depends on the place in the list
            alone = nn.Parameter(torch.ones(shape))
            single = optimizer(kind, [alone])
            feed(single, [alone], [[step[i]] for step in grads])
            assert same_state(single.state[alone], state), shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_changes_nothing_for_the_others(kind):
    # (128, 64) and (64, 128) share a bucket; leaving one out sends the other through the slower path, with
    # the same noise
    shapes, finals = [(128, 64), (64, 128)], []
    for left_out in (False, True):
        params = [nn.Parameter(torch.ones(s, dtype=BF16)) for s in shapes]
        made = optimizer(kind, params, update="stochastic", lr=0.01)
        assert len(made._buckets) == 1
        feed(made, params, [[None if left_out else a, b] for a, b in gradients(shapes, 3)])
        finals.append({**made.state[params[1]], "p": params[1].detach()})
        if left_out:
            assert made.state[params[0]]["step"] == 0 and (params[0] == 1).all()
    assert same_state(*finals)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", [dict(), dict(kahan=True), dict(master="split")], ids=str)
def test_a_large_tensor_goes_in_pieces_and_nothing_changes(kind, write, monkeypatch):
    shape, finals = (9 * 1024 + 13,), []
    for piece in (1 << 22, 1 << 11):
        monkeypatch.setattr(AdamW, "PIECE", piece)
        p = nn.Parameter(torch.ones(shape, dtype=BF16))
        made = optimizer(kind, [p], update="stochastic", lr=0.01, **write)
        feed(made, [p], gradients([shape], 3))
        finals.append({**made.state[p], "p": p.detach()})
    assert same_state(*finals)


def test_the_codes_of_two_moments_do_not_share_noise(monkeypatch):
    keys = []

    def encode(self, x, codes, scales, signed, key=None, compiled=True):
        keys.append(key)

    monkeypatch.setattr(type(coder("e4m3")), "encode", encode)
    p = nn.Parameter(draw(100, 100))
    p.grad = torch.ones_like(p)
    optimizer("e4m3", [p], update="stochastic", compiled=False).step()
    first, second = (noise_bits(1000, key)[0] for key in keys)
    assert abs(correlation(first.double(), second.double())) < 0.15


def test_states_of_another_kind_are_refused():
    coder("int8"), coder("int4")
    kinds = ("int8", "int4", "e4m3", "e5m2", "fp32")
    made = {kind: Precision(nn.Linear(64, 64), recipe(**FLAG.get(kind, {}))) for kind in kinds}
    for a, b in itertools.permutations(made, 2):
        saved = through_a_file(made[b].state_dict())
        refused(lambda a=a, saved=saved: made[a].load_state_dict(saved), "another model or recipe")
        # checkpoints of format 1 do not say which codes they hold; they had those of the libraries alone
        saved["optimizer"].pop("codes", None)
        if not (a == "int8" and b in FLOATS):
            refused(lambda a=a, saved=saved: made[a].load_state_dict(saved), "another model or recipe")
    saved = made["int8"].state_dict()
    del saved["optimizer"]["codes"]
    made["int8"].load_state_dict(saved)


# ---- The frozen second moment ------------------------------------------------------------------------------
# gradients of every other entry drop to a hundredth, and what protects from it


def after_a_drop(made, p):
    """(exp_avg_sq of the entries whose gradients dropped, of the others), each over the exact mean."""
    generator, dropped = torch.Generator().manual_seed(0), torch.arange(p.numel()) % 2 == 0
    exact, beta2 = torch.zeros(p.numel()), made.param_groups[0]["betas"][1]
    before, after = (200, 1200) if beta2 == 0.999 else (60, 450)
    for step in range(before + after):
        grad = torch.randn(p.numel(), generator=generator)
        if step >= before:
            grad = torch.where(dropped, 0.01 * grad, grad)
        exact = beta2 * exact + (1 - beta2) * grad.square()
        p.grad = grad.to(p.device)
        made.step()
    held = made.moment(p, "exp_avg_sq").cpu()
    return [(held[part].mean() / exact[part].mean()).item() for part in (dropped, ~dropped)]


def holder(kind, update, beta2):
    coder(kind)
    p = nn.Parameter(torch.zeros(4096))
    return AdamW([p], lr=0.0, betas=(0.9, beta2), exp_avg_sq=kind, update=update), p


# beta2, and how far too high v of the dropped may and must be; no code of torchao's is under 1/16 of the
# block's largest, which is above v here
FROZEN = [
    ("int8", "stochastic", 0.995, 0.95, 1.05),
    ("int4", "stochastic", 0.999, 0.95, 2),
    ("log4", "stochastic", 0.995, 0.9, 1.1),
    ("e4m3", "nearest", 0.999, 4, 1e5),
    ("flash8", "stochastic", 0.995, 0.95, 1.05),
]


@pytest.mark.parametrize("kind, update, beta2, least, most", FROZEN)
def test_stochastic_codes_let_the_second_moment_of_dropped_gradients_fall(kind, update, beta2, least, most):
    dropped, others = after_a_drop(*holder(kind, update, beta2))
    assert least < dropped < most and others == pytest.approx(1, abs=0.1)


# ---- Saved by the old rule ---------------------------------------------------------------------------------


def test_a_state_that_was_kept_in_fp32_by_the_old_rule_is_encoded():
    """4-bit moments of tensors that end within a block of 128 were fp32 in checkpoints of format 1."""
    coder("int4")
    shapes = [(4097,), (64, 128), (100,)]
    params, exact = ([nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    made, reference = optimizer("int4", params), AdamW(exact)
    feed(made, params, gradients(shapes, 2))
    feed(reference, exact, gradients(shapes, 2))
    saved, fp32 = through_a_file(made.state_dict()), reference.state_dict()["state"]
    for name in ("exp_avg", "exp_avg_sq"):
        del saved["state"][0][f"{name}_scale"]
        saved["state"][0][name] = fp32[0][name]
    again = [nn.Parameter(torch.ones(s)) for s in shapes]
    loaded = optimizer("int4", again)
    loaded.load_state_dict(saved)
    assert loaded.state[again[0]]["exp_avg"].dtype == torch.uint8
    for name in ("exp_avg", "exp_avg_sq"):
        wanted = reference.moment(exact[0], name)
        assert (loaded.moment(again[0], name) - wanted).norm() < 0.2 * wanted.norm()
    assert same_state(loaded.state[again[1]], made.state[params[1]])
    feed(loaded, again, gradients(shapes, 1))
    # a moment that was coded then is none now
    saved["state"][1] = fp32[1]
    refused(lambda: optimizer("int4", again).load_state_dict(saved), "another model or recipe")
