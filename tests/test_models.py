"""Nets: shapes, the paper's parameter counts, zero initialisation, conditioning, and every way to run them
in bf16.
"""

import math

import pytest
import torch
from torch import nn

import models
from lowprec import attention
from lowprec.errors import Refused
from lowprec.precision import Precision, recipe
from tasks import language

GENERATIVE = [("unet", "tiny"), ("dit", "tiny")]
EVERY_SIZE = (
    [("unet", "rflow", size) for size in models.DIFFUSION_UNETS]
    + [("unet", "segment", size) for size in models.SEGMENTATION_UNETS]
    + [("dit", "ddpm", size) for size in [*models.DITS, "S/4", "XL/8", "tiny/1"]]
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(model, task, channels, num_classes, image_size, size=None):
    """The net of a --model and a --task."""
    nets = models.SEGMENTING if task == "segment" else models.GENERATIVE
    return nets[model](channels, num_classes, image_size, size)


def perturbed(model, task="rflow", channels=1, num_classes=10, image_size=8, size=None):
    """A net whose zero-initialised layers are no longer zero, as after some training."""
    net = build(model, task, channels, num_classes, image_size, size)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net


def batch(n=16, channels=1, image_size=8, num_classes=10):
    return (
        torch.randn(n, channels, image_size, image_size),
        torch.rand(n) * 1000,
        torch.arange(n) % (num_classes + 1),
    )


def relative_error(a, b):
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


@pytest.mark.parametrize("model,task,size", EVERY_SIZE)
def test_output_shape_of_every_size(model, task, size):
    with torch.device("meta"):
        net = build(model, task, channels=3, num_classes=5, image_size=32, size=size)
        x, t, y = torch.randn(2, 3, 32, 32), torch.rand(2), torch.zeros(2, dtype=torch.long)
        out = net(x) if task == "segment" else net(x, t, y)
    assert out.shape == ((2, 5, 32, 32) if task == "segment" else x.shape)


@pytest.mark.parametrize("size,millions", [("S/2", 33), ("B/2", 130), ("L/2", 458), ("XL/2", 675)])
def test_dit_has_the_papers_parameter_count(size, millions):
    with torch.device("meta"):
        net = build("dit", "ddpm", channels=4, num_classes=1000, image_size=32, size=size)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize("model,task", [("unet", "rflow"), ("dit", "rflow"), ("unet", "segment")])
def test_same_seed_same_weights_and_tiny_is_the_default(model, task):
    nets = []
    for size in (None, "tiny"):
        torch.manual_seed(3)
        nets.append(build(model, task, 1, 4, 16, size).state_dict())
    assert nets[0].keys() == nets[1].keys()
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


@pytest.mark.parametrize("model,size", GENERATIVE)
def test_new_generative_net_returns_zeros(model, size):
    assert not build(model, "rflow", 1, 10, 8, size)(*batch()).any()


def test_new_dit_block_is_the_identity():
    block = build("dit", "rflow", 1, 10, 8).blocks[0]
    x, c = torch.randn(2, 16, 64), torch.randn(2, 64)
    assert torch.equal(block(x, c), x)
    nn.init.normal_(block.modulation.weight)
    assert not torch.allclose(block(x, c), x)


def test_dit_puts_each_patch_back_where_it_came_from():
    net = build("dit", "rflow", channels=2, num_classes=1, image_size=8, size="tiny/4")
    nn.init.normal_(net.final.linear.weight)  # the blocks are still the identity, so no patch sees another
    x, t, y = batch(1, channels=2, num_classes=1)
    changed = x.clone()
    changed[:, 1, 5, 2] += 1
    moved = net(changed, t, y) != net(x, t, y)
    assert moved[:, :, 4:, :4].all() and moved.sum() == 2 * 16


def test_dit_patch_values_keep_their_place_inside_the_patch():
    net = build("dit", "rflow", channels=2, num_classes=1, image_size=8)
    net.x_embed, net.pos_embed, net.blocks = nn.Identity(), torch.zeros(1), nn.ModuleList()
    net.final.forward = lambda h, c: h
    x, t, y = batch(2, channels=2, num_classes=1)
    assert torch.equal(net(x, t, y), x)


def test_position_embedding_tells_all_places_apart():
    table = models.position_embedding(16, 64)
    assert table.dtype == torch.float32 and table.shape == (256, 64)
    assert (torch.cdist(table, table) + torch.eye(256)).min() > 0.1
    row, column, i = 3, 11, 2
    angle = 10000 ** (-i / 16)
    assert float(table[row * 16 + column, i]) == pytest.approx(math.sin(row * angle), abs=1e-7)
    assert float(table[row * 16 + column, 32 + i]) == pytest.approx(math.sin(column * angle), abs=1e-7)


def test_dit_knows_where_a_patch_lies():
    net = perturbed("dit")
    x, t, y = batch(4)
    rolled = net(x.roll(2, dims=2), t, y).roll(
        -2, dims=2
    )  # by one patch: the same set of tokens in other places
    assert relative_error(rolled, net(x, t, y)) > 1e-2


@pytest.mark.parametrize("model,size", GENERATIVE)
def test_label_null_label_and_timestep_each_change_the_output(model, size):
    net = perturbed(model, size=size)
    x, t, _ = (v[:1] for v in batch(1))
    out = [net(x, t, torch.tensor([label])) for label in (0, 1, 10)] + [net(x, t / 2, torch.tensor([0]))]
    assert all(relative_error(out[i], out[j]) > 1e-2 for i in range(4) for j in range(i))


@pytest.mark.parametrize("model,size", GENERATIVE)
def test_unlabelled_data_has_only_the_null_label(model, size):
    net = perturbed(model, num_classes=0, size=size)
    x, t, _ = batch(2)
    assert net(x, t, torch.zeros(2, dtype=torch.long)).isfinite().all()
    with pytest.raises(IndexError):
        net(x, t, torch.ones(2, dtype=torch.long))


@pytest.mark.parametrize("model,size", GENERATIVE)
def test_training_forward_draws_nothing_and_reaches_every_parameter(model, size):
    net = perturbed(model, size=size).bfloat16().train()
    x, t, y = batch(32)
    state = torch.get_rng_state()
    net(x.bfloat16(), t, y).float().square().mean().backward()
    assert torch.equal(torch.get_rng_state(), state)
    grads = {name: p.grad for name, p in net.named_parameters()}
    assert [
        name for name, grad in grads.items() if grad is None or not grad.any() or not grad.isfinite().all()
    ] == []


def forward_all_ways(net, *inputs):
    """Outputs in fp32, under autocast, and with weights and images in bf16 (t stays fp32)."""
    with torch.no_grad():
        reference = net(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = net(*inputs)
        pure = net.bfloat16()(inputs[0].bfloat16(), *inputs[1:])
    return reference, autocast, pure


@pytest.mark.parametrize(
    "model, task, size, image_size, most",
    [
        *((model, "rflow", size, 8, 0.03) for model, size in GENERATIVE),
        ("dit", "rflow", "tiny/1", 16, 0.03),
        ("unet", "segment", "tiny", 32, 0.05),
    ],
)
def test_bf16_and_autocast_stay_close_to_fp32(model, task, size, image_size, most):
    net = perturbed(model, task, image_size=image_size, size=size)
    inputs = batch(image_size=image_size)[: 1 if task == "segment" else 3]
    reference, autocast, pure = forward_all_ways(net, *inputs)
    assert pure.dtype == torch.bfloat16 and pure.shape == reference.shape
    assert 0 < relative_error(autocast, reference) < most
    assert 0 < relative_error(pure, reference) < most


@pytest.mark.parametrize(
    "dtype,tokens,flash",
    [
        (torch.bfloat16, 16, False),
        (torch.bfloat16, attention.PLAIN_UP_TO_TOKENS + 1, True),
        (torch.float32, 16, True),
    ],
)
@pytest.mark.parametrize("build", [models.DiTAttention, language.Layer])
def test_cpu_attention_avoids_the_slow_bf16_flash_kernel_on_few_tokens(build, dtype, tokens, flash):
    layer = build(64, 2).to(dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(torch.randn(2, tokens, 64, dtype=dtype))
    assert any("flash_attention" in event.key for event in profile.key_averages()) == flash


UNET = "time_embed.0 class_embedding out.0 out.2.conv middle_block.resnet_1.norm1"
DIT = "x_embed t_embed.0 t_embed.2 y_embed final.linear final.modulation"
ISLANDS = [
    ("unet", "rflow", "norm+embed+final", UNET),
    ("dit", "rflow", "embed+final", DIT),
    ("unet", "segment", "norm+final", "model.2.final.conv.unit0.conv model.0.conv.unit0.adn.N"),
]


@pytest.mark.parametrize("buffers", ["fp32", "bf16"])
@pytest.mark.parametrize("model,task,islands,some", ISLANDS)
def test_fp32_islands_inside_a_bf16_net(model, task, islands, some, buffers):
    net = perturbed(model, task, num_classes=3, image_size=16)
    inputs = batch(4, image_size=16, num_classes=3)[: 1 if task == "segment" else 3]
    reference = net(*inputs)
    run = Precision(net, recipe(pure_bf16=True, sites=[f"islands={islands}", f"buffers={buffers}"]))
    wide = {name.rpartition(".")[0] for name, p in net.named_parameters() if p.dtype == torch.float32}
    assert set(some.split()) <= wide and "blocks.0.modulation" not in wide
    assert any(p.dtype == torch.bfloat16 for p in net.parameters())
    out = run(*inputs)
    assert relative_error(out, reference) < 0.05
    run.backward(out.square().mean())
    assert all(p.grad.dtype == p.dtype for p in net.parameters())


def test_fp32_timestep_embedding_in_a_bf16_dit_gets_the_sinusoid_unrounded():
    net = build("dit", "rflow", 1, 10, 8).bfloat16()
    net.t_embed.float().register_forward_hook(lambda _, args, out: out.bfloat16())
    seen = []
    net.t_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x, t, y = batch()
    net(x.bfloat16(), t, y)
    assert torch.equal(seen[0], models.sinusoid(t, models.FREQUENCIES))


def test_sinusoid_is_computed_in_the_dtype_of_t():
    t = torch.rand(2000) * 1000
    exact = models.sinusoid(t.double(), 256)
    assert (models.sinusoid(t, 256) - exact).abs().max() < 1e-3
    fast = [*range(5), *range(128, 133)]  # columns whose angles turn most with t
    assert (models.sinusoid(t.bfloat16(), 256) - exact)[:, fast].square().mean() > 0.25
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(models.sinusoid(t, 256), models.sinusoid(t, 256).float())
        assert models.sinusoid(t.bfloat16(), 256).dtype == torch.bfloat16
    assert torch.equal(models.sinusoid(torch.tensor([999]), 256), models.sinusoid(torch.tensor([999.0]), 256))


def test_bf16_timesteps_harm_dit_but_cost_monais_unet_only_their_own_rounding():
    x, _, y = batch(16)
    t = 512.0 + 4 * torch.arange(16)  # exact in bf16, so any difference comes from the embedding
    unet, dit = perturbed("unet"), perturbed("dit")
    assert torch.equal(unet(x, t.bfloat16(), y), unet(x, t, y))
    assert relative_error(dit(x, t.bfloat16(), y), dit(x, t, y)) > 1e-3
    rounded = t + 1
    assert not torch.equal(unet(x, rounded.bfloat16(), y), unet(x, rounded, y))


@pytest.mark.parametrize(
    "arguments,said",
    [
        (("unet", "rflow", 1, 10, 8, "XL/2"), ["'XL/2'", "tiny, mini, small, base, large"]),
        (("unet", "segment", 1, 2, 64, "large"), ["'large'", "tiny, small, base"]),
        (("dit", "ddpm", 1, 10, 8, "huge"), ["'huge'", "tiny, mini, S, B, L, XL"]),
        (("dit", "ddpm", 1, 10, 8, "S/0"), ["'S/0'", "S/4"]),
        (("dit", "ddpm", 1, 10, 8, "S/"), ["'S/'", "S/4"]),
        (("dit", "ddpm", 1, 10, 9), ["image size 9", "8 or 10"]),
        (("dit", "ddpm", 1, 10, 4, "S/8"), ["image size 4", "use 8"]),
        (("unet", "rflow", 1, 10, 30, "base"), ["image size 30", "28 or 32"]),
        (("unet", "segment", 1, 2, 36), ["image size 36", "32 or 40"]),
        (("unet", "segment", 1, 2, 8), ["image size 8", "use 16"]),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(arguments, said):
    with pytest.raises(Refused) as error:
        build(*arguments)
    message = str(error.value)
    assert "\n" not in message and all(words in message for words in said), message


@pytest.mark.parametrize(
    "model,task,image_size", [("unet", "rflow", 2), ("dit", "rflow", 2), ("unet", "segment", 16)]
)
def test_the_smallest_accepted_image_trains(model, task, image_size):
    net = perturbed(model, task, num_classes=2, image_size=image_size).train()
    x, t, y = batch(1, image_size=image_size, num_classes=2)
    out = net(x) if task == "segment" else net(x, t, y)
    out.square().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    assert sum(bool(p.grad.any()) for p in net.parameters() if p.grad is not None) > 10
