"""STEVE and SlotContrast: their parts against naive ones in float64, their losses and learning rates, and
what each site changes.
"""

import math
from pathlib import Path

import cli
import common
import pytest
import torch

import strategies
from lowprec.precision import Precision, recipe
from tasks import clip_sets, slotcontrast, slots, steve
from tasks.task import Rng

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
FLAGS = strategies.flag_table()
TASKS = {"steve": steve.Steve, "slotcontrast": slotcontrast.Contrast}
SMALL = {"image_size": 16, "clips": 24, "frames": 2, "slots": 3, "vocab_size": 16, "batch_size": 4}
STEVE = ["--task", "steve", *(word for name, value in SMALL.items() for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def clips():
    return clip_sets.sprites(16, 2, 0, 24, 8)


def made(name, clips, sites=(), **flags):
    kind = TASKS[name]
    config = FLAGS.typed({"task": name, **kind.own_defaults(), **SMALL, **flags})
    return kind(clips, recipe(sites=sites, more=kind.sites), config)


def net_of(task):
    torch.manual_seed(0)
    return task.net()


# ---- Parts against naive ones ------------------------------------------------------------------------------


def linear(layer, x):
    bias = [0.0] * len(layer.weight) if layer.bias is None else layer.bias.tolist()
    products = [sum(w * v for w, v in zip(row, x, strict=True)) for row in layer.weight.tolist()]
    return [product + b for product, b in zip(products, bias, strict=True)]


def normed(norm, x):
    mean = sum(x) / len(x)
    spread = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + norm.eps)
    return [
        (v - mean) / spread * float(w) + float(b) for v, w, b in zip(x, norm.weight, norm.bias, strict=True)
    ]


def gru(cell, x, state):
    d = len(state)
    a, b = linear(cell.input, x), linear(cell.hidden, state)

    def gate(i):
        return 1 / (1 + math.exp(-a[i] - b[i]))

    new = [math.tanh(a[2 * d + i] + gate(i) * b[2 * d + i]) for i in range(d)]
    return [(1 - gate(d + i)) * new[i] + gate(d + i) * state[i] for i in range(d)]


def naive_slot_attention(module, inputs, found, iterations):
    """Algorithm 1 of arXiv 2006.15055 with Python's floats. inputs [N][D], found [K][D]."""
    d = module.width
    inputs = [normed(module.norm_inputs, x) for x in inputs]
    keys, values = ([linear(layer, x) for x in inputs] for layer in (module.k, module.v))
    for i in range(iterations):
        queries = [linear(module.q, normed(module.norm_slots, s)) for s in found]
        attention = []
        for k in keys:
            scores = [sum(a * b for a, b in zip(k, q, strict=True)) / math.sqrt(d) for q in queries]
            total = sum(math.exp(s) for s in scores)
            attention.append([math.exp(s) / total for s in scores])
        for j in range(len(found)):
            mass = sum(row[j] + 1e-8 for row in attention)
            pairs = list(zip(attention, values, strict=True))
            update = [sum((row[j] + 1e-8) / mass * v[c] for row, v in pairs) for c in range(d)]
            found[j] = gru(module.gru, update, found[j])
            if i < iterations - 1:
                hidden = [max(0.0, h) for h in linear(module.mlp[0], normed(module.norm_mlp, found[j]))]
                found[j] = [a + b for a, b in zip(found[j], linear(module.mlp[2], hidden), strict=True)]
    return found, attention


def test_slot_attention_is_the_published_algorithm():
    torch.manual_seed(0)
    module = slots.SlotAttention(4, slots.Numerics())
    inputs, start = common.draw(1, 7, 4), common.draw(1, 3, 4, seed=1)
    found, attention = module(inputs, start, 3)
    with torch.no_grad():
        naive, shares = naive_slot_attention(module, inputs[0].tolist(), start[0].tolist(), 3)
    assert torch.allclose(found[0], torch.tensor(naive), atol=1e-5)
    assert torch.allclose(attention[0], torch.tensor(shares), atol=1e-6)
    assert torch.allclose(attention.sum(-1), torch.ones(1, 7))


def test_the_encoder_carries_slots_from_frame_to_frame():
    torch.manual_seed(0)
    encoder = slots.Encoder(8, 2, slots.Numerics(), iterations=2, first=3)
    inputs, start = common.draw(2, 3, 5, 8), common.draw(2, 4, 8, seed=1)
    found, attention = encoder(inputs, start)
    state, expected = start, []
    for t in range(3):
        state, last = encoder.attend(inputs[:, t], encoder.predictor(state) if t else state, 2 if t else 3)
        expected.append(state)
    assert torch.equal(found, torch.stack(expected, 1)) and torch.equal(attention[:, 2], last)
    changed = inputs.clone()
    changed[:, 2] += 1  # the future changes nothing
    assert torch.equal(encoder(changed, start)[0][:, :2], found[:, :2])


def test_the_temperature_falls_by_half_a_cosine_and_stays():
    at = [steve.temperature(step, 100) for step in (0, 50, 100, 5000)]
    assert at == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert steve.temperature(25, 100) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    every = [steve.temperature(step, 100) for step in range(120)]
    assert every == sorted(every, reverse=True)


def test_gumbel_noise_has_its_law_and_is_finite_at_the_ends():
    ends = torch.tensor([0, 2**steve.GUMBEL_BITS - 1], dtype=torch.int32)
    top = 24 * math.log(2)
    assert steve.gumbel(ends).tolist() == pytest.approx([-math.log(top), top], rel=1e-5)
    bits = (torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 2**steve.GUMBEL_BITS).int()
    noise = steve.gumbel(bits).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    low = steve.gumbel(bits, "bf16")
    assert low.dtype == torch.bfloat16 and low.isfinite().all() and low.max() < 5.6 < noise.max()
    infinite = steve.gumbel(bits, "bf16-open").isinf().double().mean().item()
    assert infinite == pytest.approx(1 / 512, rel=0.2)


@pytest.mark.parametrize("noise, shares", [(1.0, [0.2, 0.3, 0.5]), (0.5, [4 / 38, 9 / 38, 25 / 38])])
def test_hard_tokens_follow_the_distribution_and_soft_ones_sharpen(noise, shares):
    dvae = steve.DVAE(3, 4, slots.Numerics(), noise)
    z = torch.tensor([0.2, 0.3, 0.5]).log()[None, :, None, None].expand(1, 3, 200, 200)
    bits = (torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) * 2**steve.GUMBEL_BITS).int()
    soft, tokens = dvae.sample(z, bits, 0.1)
    found = tokens.flatten().bincount(minlength=3) / tokens.numel()
    assert torch.allclose(found, torch.tensor(shares), atol=0.01)  # the Gumbel-max trick
    assert torch.equal(soft.argmax(1), tokens) and torch.allclose(soft.sum(1), torch.ones(1, 200, 200))
    assert soft.max(1).values.mean() > dvae.sample(z, bits, 1.0)[0].max(1).values.mean() + 0.2
    assert (dvae.sample(z, None, 1.0)[1] == 2).all()


@pytest.mark.parametrize("published, kept", [(True, 1.0), (False, 1 / 3)])
def test_published_first_weights_keep_the_variance_of_what_they_read(published, kept):
    torch.manual_seed(0)
    net = steve.build(published_start=published)
    x = torch.randn(500, 64)
    assert net.encoder.attend.q(x).var().item() == pytest.approx(kept, rel=0.1)


def test_a_token_is_predicted_from_those_before_it_alone():
    torch.manual_seed(0)
    decoder = steve.Decoder(7, 6, 8, 2, 2, slots.Numerics()).eval()
    tokens = torch.randint(0, 7, (2, 6))
    found = common.draw(2, 3, 8)
    nll = decoder(tokens, found)
    for at in range(6):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % 7
        same = torch.isclose(decoder(changed, found), nll, atol=1e-6).all(0)
        assert same[:at].all() and not same[at:].all(), at
    assert not torch.allclose(decoder(tokens, found + 1), nll)
    sums = sum(torch.exp(-decoder(torch.full((2, 1), token), found)) for token in range(7))
    assert torch.allclose(sums, torch.ones(2, 1), atol=1e-5)  # probabilities of the first token


def test_contrast_is_the_cross_entropy_with_the_identity(clips):
    net = net_of(made("slotcontrast", clips))
    found = common.draw(2, 3, 3, 64)  # [B, T, K, width]
    own = net.contrast(found)
    for t in range(2):
        now, after = (found[:, t + i].flatten(0, 1) for i in (0, 1))
        for i in range(6):
            cosines = [float(torch.cosine_similarity(now[i], after[j], dim=0)) / 0.1 for j in range(6)]
            expected = math.log(sum(math.exp(c) for c in cosines)) - cosines[i]
            assert float(own[t, i]) == pytest.approx(expected, abs=1e-4)


def test_the_frozen_net_is_the_same_in_every_run_and_is_not_trained(clips):
    task = made("slotcontrast", clips)
    first = net_of(task)
    torch.manual_seed(5)
    other = task.net()
    for (name, a), b in zip(first.features.named_parameters(), other.features.parameters(), strict=True):
        assert torch.equal(a, b) and not a.requires_grad, name
    features = first.features(clips.train[[0]][0].flatten(0, 1))
    assert torch.allclose(features.mean(-1), torch.zeros(()), atol=1e-5)
    assert torch.allclose(features.var(-1, correction=0), torch.ones(()), atol=1e-2)


# ---- Losses and learning rates -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_falls_and_comes_of_the_given_generator(name, clips):
    task = made(name, clips)
    run = Precision(net_of(task), task.recipe, lr=2e-3, clip_grad=1.0)
    batch = clips.train[list(range(4))]
    losses = []
    for step in range(40):
        loss = task.loss(run, batch, Rng(step), 0)
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    net = run.generator("raw")
    assert torch.equal(task.loss(net, batch, Rng(1), 0), task.loss(net, batch, Rng(1), 0))
    if name == "steve":
        assert task.loss(net, batch, Rng(1), 0) != task.loss(net, batch, Rng(2), 0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_three_learning_rates_reach_the_groups(decay, clips):
    task = made("steve", clips, lr=3e-4, lr_encoder=1 / 3, weight_decay=decay)
    net = net_of(task)
    groups = task.groups(net)
    rate_of = {p: group["lr"] for group in groups for p in group["params"]}
    names = dict(net.named_parameters())
    assert len(rate_of) == len(names) == sum(len(group["params"]) for group in groups)
    for name, p in names.items():
        wanted = 3e-4 if name.startswith(("dvae.", "decoder.")) else 1e-4
        assert rate_of[p] == pytest.approx(wanted), name
    if decay:
        decay_of = {p: group["weight_decay"] for group in groups for p in group["params"]}
        assert decay_of[net.dvae.encoder[0].weight] == decay and decay_of[net.mean] == decay
        assert decay_of[net.dvae.encoder[0].bias] == 0 == decay_of[net.decoder.token_embed.weight]


@pytest.mark.parametrize("name", TASKS)
def test_every_trained_parameter_gets_a_gradient(name, clips):
    task = made(name, clips)
    net = net_of(task)
    task.loss(net, clips.train[[0, 1]], Rng(0), 0).backward()
    trained = {key: p for key, p in net.named_parameters() if p.requires_grad}
    assert not [key for key, p in trained.items() if p.grad is None or not p.grad.any()]


# ---- Sites -------------------------------------------------------------------------------------------------


SITES = [("steve", "softmax"), ("steve", "logits"), ("steve", "recurrent")]
SITES += [("slotcontrast", name) for name in ("softmax", "logits", "recurrent")]


class Types(torch.overrides.TorchFunctionMode):
    """The dtypes that softmax and log-softmax are taken in, and those of sigmoids."""

    def __init__(self):
        super().__init__()
        self.found = {"softmax": set(), "log_softmax": set(), "sigmoid": set()}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.found:
            self.found[name].add(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name, site", SITES)
def test_a_site_changes_what_it_says_and_nothing_else(name, site, low, clips):
    kind = TASKS[name]
    where = {"softmax": "softmax", "logits": "log_softmax", "recurrent": "sigmoid"}
    found = {}
    for value in ("fp32", "bf16"):
        task = made(name, clips)
        task.recipe = recipe(pure_bf16=low, sites=[f"{site}={value}"], more=kind.sites)
        run = Precision(net_of(task), task.recipe)
        with Types() as types, torch.no_grad():
            task.see(run, clips.heldout[[0, 1]][0], Rng(0))
        found[value] = types.found
    for function in found["fp32"]:
        low_now = {torch.bfloat16} if where[site] == function else {torch.float32}
        if name == "steve" and function == "softmax":  # of slots, and of the soft tokens
            low_now = {"softmax": {torch.float32, torch.bfloat16}, "logits": {torch.float32, torch.bfloat16}}
            low_now = low_now.get(site, {torch.float32})
        assert found["fp32"][function] == {torch.float32}, function
        assert found["bf16"][function] == low_now, function


def test_an_empty_slot_is_finite_in_fp32_and_not_in_fp16(clips):
    scores = torch.tensor([[[40.0, -40.0]] * 5])
    for value, finite in (("fp32", True), ("bf16", True), ("fp16", False)):
        task = made("slotcontrast", clips, sites=[f"softmax={value}"])
        _, share = net_of(task).encoder.attend.compete(scores)
        assert bool(share.isfinite().all()) == finite, value


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("flags", [{}, {"pure_bf16": True, "stochastic": True}])
def test_the_net_runs_at_its_published_size_on_shapes_alone(name, flags):
    kind, build = TASKS[name], (steve if name == "steve" else slotcontrast).build
    size = (steve.STEVE_SIZES if name == "steve" else slotcontrast.SLOTCONTRAST_SIZES)["base"]
    with torch.device("meta"):
        net = build(size, image_size=56, recipe=recipe(**flags, more=kind.sites))
    if flags.get("pure_bf16"):
        net = net.bfloat16()
    clip = torch.empty(1, 2, 3, 56, 56, device="meta", dtype=next(net.parameters()).dtype)
    extra = (torch.empty(1, 15, 192, device="meta", dtype=clip.dtype),) if name == "steve" else ()
    seen = net(clip, *extra)
    assert seen["masks"].shape[:3] == (1, 2, 15)
    assert seen["slots"].dtype == seen["masks"].dtype == torch.float32


# ---- The command -------------------------------------------------------------------------------------------


def test_infinite_gumbel_noise_ends_the_run(capsys):
    assert cli.command(*STEVE, "--steps", 2, "--set", "gumbel=bf16-open") == 2
    assert "the loss is nan at step 2" in capsys.readouterr().err


def test_clips_without_masks_train_and_show_and_have_no_mask_scores():
    from test_video import plant

    plant(Path("clips"), masks=False)
    words = ["--task", "steve", "--image_size", 16, "--frames", 2, "--batch_size", 2, "--threads", 1]
    flags = ["--data", "folder:clips", "--vocab_size", 8, "--steps", 1, "--name", "run"]
    assert cli.command(*words, *flags) == 0
    scores = cli.summary()["scores"]["ema"]
    assert scores.keys() == {"loss", "mse", "nll"} and cli.summary()["reference"] == {}
