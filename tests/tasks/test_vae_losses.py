"""--task vae: the net and its losses."""


import cli
import common
import numpy as np
import pytest
import test_latent
import torch

from lowprec.recipes import recipe
from lowprec.roles import roles
from tasks import perceptual
from tasks import vae as latent
from tasks.autoencoder import Autoencoder
from tasks.task import Rng
from tasks.vae_halves import snr

in_a_folder_of_its_own = cli.in_a_folder_of_its_own
batch = test_latent.batch
config = test_latent.config


def test_the_net_is_monais_autoencoder_with_noise_from_outside(size="tiny", side=8, shape=(2, 4, 4)):
    torch.manual_seed(0)
    net = Autoencoder(3, side, size)
    images, noise = torch.rand(2, 3, side, side), torch.randn(2, *shape)
    found = net(images, noise)
    mean, std = net.vae.encode(images)
    assert mean.shape == (2, *shape) and found.keys() == {"images", "mean", "std"}
    torch.testing.assert_close(found["images"], net.vae.decode(mean + std * noise))
    torch.testing.assert_close(
        net(net(images, part="encode")[0], part="decode"), net.vae.reconstruct(images)
    )
    head = [name for name, roles in roles(net).items() if "head" in roles]
    assert any(name.endswith("conv") for name in head) and all("decoder" in name for name in head)


def test_the_kl_is_that_of_two_gaussians():
    mean, std = common.draw(5, 2, 4, 4), common.draw(5, 2, 4, 4, seed=1).exp()
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(mean.double(), std.double()), normal(0.0, 1.0))
    torch.testing.assert_close(latent.kl(mean, std).double(), wanted.sum((1, 2, 3)), rtol=1e-5, atol=1e-5)


def test_decibels():
    a = common.draw(1000)
    assert snr(a, a) == 150.0
    assert snr(a * 1.01, a) == pytest.approx(40, abs=1e-3)
    assert snr(a + float("nan"), a) == -np.inf
    off = torch.zeros(1, 1, 8, 8)
    assert latent.psnr(off + 0.2, off) == pytest.approx(20)  # the range is 2


def adversarial_losses(digits):
    torch.manual_seed(0)
    net = Autoencoder(1, 8, adversarial=True)
    images = batch(digits)[0]
    return net, images, net(images, common.draw(8, 2, 4, 4))


def gradients(net):
    """{part: {name: gradient}} of what received one."""
    found = {"vae": {}, "critic": {}}
    for name, p in net.named_parameters():
        if p.grad is not None and bool(p.grad.abs().sum() > 0):
            found[name.partition(".")[0]][name] = p.grad.clone()
    net.zero_grad(set_to_none=True)
    return found


def test_each_opponent_follows_its_own_loss_alone(digits):
    net, images, found = adversarial_losses(digits)
    latent.critics_loss(found).backward(retain_graph=True)
    critics = gradients(net)
    assert not critics["vae"] and len(critics["critic"]) == len(list(net.critic.parameters()))
    latent.generators_loss(found).backward(retain_graph=True)
    generators = gradients(net)
    assert not generators["critic"] and any("encoder" in name for name in generators["vae"])
    # one backward pass of the sum gives each part what its own pass gave
    (latent.critics_loss(found) + latent.generators_loss(found)).backward()
    both = gradients(net)
    for part, alone in (("vae", generators), ("critic", critics)):
        assert both[part].keys() == alone[part].keys()
        for name, value in both[part].items():
            torch.testing.assert_close(value, alone[part][name])


def test_the_opponents_losses_are_monais_least_squares(digits):
    from monai.losses import PatchAdversarialLoss

    net, images, found = adversarial_losses(digits)
    oracle = PatchAdversarialLoss(criterion="least_squares", no_activation_leastsq=True)
    torch.testing.assert_close(found["fooled"], net.critic(found["images"])[-1])
    fooled = oracle(found["fooled"], target_is_real=True, for_discriminator=False)
    torch.testing.assert_close(2 * latent.generators_loss(found), fooled)
    real = oracle(found["real"], target_is_real=True, for_discriminator=True)
    fake = oracle(found["fake"], target_is_real=False, for_discriminator=True)
    torch.testing.assert_close(2 * latent.critics_loss(found), real + fake)


def test_the_loss_is_the_sum_of_its_terms(digits):
    c = config(task="vae", model="kl", kl_weight=0.01, adversarial=0.5, perceptual=0.1)
    task = latent.VAE(digits, recipe(more=latent.VAE.sites), c)
    torch.manual_seed(0)
    net, images = task.net(), batch(digits)[0]
    loss = task.loss(net, batch(digits), Rng(3), 0)
    found = net(images, Rng(3).normal(8, *task.latent_shape()))
    wanted = (found["images"] - images).abs().mean() + 0.01 * latent.kl(found["mean"], found["std"]).mean()
    wanted = wanted + 0.5 * (latent.critics_loss(found) + latent.generators_loss(found))
    distance = perceptual.Perceptual(task.scorer())(found["images"], images).mean()
    torch.testing.assert_close(loss, wanted + 0.1 * distance)
