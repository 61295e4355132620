"""The library with other people's nets: transformers, diffusers, torchvision.

Each client trains 30 steps in fp32 and 30 in pure bf16 with stochastic rounding, from the same weights and on
the same data. Its weights load into the plain net.
"""

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import common
import golden
import pytest
import torch
import torch.nn.functional as F
from common import BF16, draw
from torch import nn

from lowprec.precision import Precision, recipe

STEPS, HALF = 30, 15
# Share of fp32's progress that bf16 may miss or exceed. Measured on these clients: at most 0.3 % with
# stochastic rounding; 4 to 5 % on the language models with rounding to nearest, which loses updates.
TOLERANCE = 0.01


def need(name):
    """The package, or a visible skip; on the continuous integration, where all are installed, an error."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"needs {name}: pip install -r requirements-bench.txt")


eager = common.eager


# ---- Clients -----------------------------------------------------------------------------------------------


@dataclass
class Client:
    build: Callable  # () -> net, drawn from torch's seed
    loss: Callable  # (net or run, step) -> scalar, on the data of that step
    options: dict = field(default_factory=dict)  # of Precision
    call: Callable = None  # (net or run) -> tensor, to compare two nets by
    lr: float = 2e-3


def tokens(step, count=4, length=24, vocabulary=61):
    """int64 [count, length]: sequences that count up by 1, 2, 3 or 4."""
    start = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(step % 5))
    return (start + torch.arange(length) * (1 + torch.arange(count)[:, None])) % vocabulary


def language_model(build):
    def loss(net, step):
        ids = tokens(step)
        labels = ids.masked_fill(ids == 7, -100)  # ignored by the loss inside
        return net(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss

    return Client(build, loss, call=lambda net: net(tokens(99)).logits)


def gpt2(layers=2):
    transformers = need("transformers")
    sizes = dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=layers, n_head=2)
    config = transformers.GPT2Config(**sizes)
    return language_model(lambda: transformers.GPT2LMHeadModel(config))


def llama(tied=True, layers=2):
    transformers = need("transformers")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    return language_model(lambda: transformers.LlamaForCausalLM(config))


def images(step, count=4):
    """fp32 [count, 1, 8, 8]: bars, upright or lying, one class each."""
    labels = torch.arange(count) % 2
    bars = (torch.arange(8) // 2 % 2 * 2.0 - 1).expand(count, 1, 8, 8)
    bars = torch.where(labels[:, None, None, None] == 0, bars, bars.mT)
    return bars + 0.1 * draw(count, 1, 8, 8, seed=step % 5), labels


def denoising(build, condition, lr):
    """Noise prediction by diffusers' own schedule. condition: labels -> the net's further keywords."""
    schedule = need("diffusers").DDPMScheduler(num_train_timesteps=1000)

    def loss(net, step):
        clean, labels = images(step)
        noise, t = draw(*clean.shape, seed=step % 5 + 100), torch.tensor([10, 300, 600, 999])
        noisy = schedule.add_noise(clean, noise, t)
        return F.mse_loss(net(noisy, timestep=t, **condition(labels)).sample, noise)

    def call(net):
        noisy, labels = images(99)
        return net(noisy, timestep=torch.full((4,), 500), **condition(labels)).sample

    return Client(build, loss, call=call, lr=lr)


def unet(levels=2):
    diffusers = need("diffusers")

    def build():
        return diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(16, 32)[:levels],
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D")[:levels],
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")[-levels:],
            cross_attention_dim=8,
            norm_num_groups=4,
            attention_head_dim=8,
            **({} if levels > 1 else {"mid_block_type": None}),
        )

    def condition(labels):  # fp32 [B, 3 tokens, 8]: text embeddings
        return {"encoder_hidden_states": F.one_hot(labels, 8).float()[:, None].expand(-1, 3, -1)}

    return denoising(build, condition, lr=2e-3)


def dit(layers=2):
    diffusers = need("diffusers")

    def build():
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=1,
            out_channels=1,
            num_layers=layers,
            norm_num_groups=4,
            sample_size=8,
            patch_size=2,
        )

    return denoising(build, lambda labels: {"class_labels": labels}, lr=2e-3)


def resnet(stages=2):
    torchvision = need("torchvision")

    def build():
        """ResNet-18 without its two deep stages, which hold nine tenths of the weights, to be quick."""
        net = torchvision.models.resnet18(num_classes=2)
        net.layer3, net.layer4, net.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 2)
        if stages < 2:
            net.layer2, net.fc = nn.Identity(), nn.Linear(64, 2)
        return net

    def loss(net, step):
        pictures, labels = images(step)
        return F.cross_entropy(net(pictures.expand(-1, 3, -1, -1).repeat(1, 1, 4, 4)), labels)

    def call(net):
        return net(images(99)[0].expand(-1, 3, -1, -1).repeat(1, 1, 4, 4))

    return Client(build, loss, call=call, lr=1e-4)


CLIENTS = {"gpt2": gpt2, "tied llama": llama, "unet": unet, "dit": dit, "resnet18": resnet}


# ---- Training ----------------------------------------------------------------------------------------------


def start(client, seed=0, **flags):
    torch.manual_seed(seed)
    options = dict(lr=client.lr, ema_decay=0.9, clip_grad=1.0, **client.options)
    return Precision(client.build(), recipe(**flags), **options)


def train(run, client, first=0, last=STEPS):
    """Losses of steps first .. last - 1."""
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)  # dropout
        loss = client.loss(run, step)
        run.backward(loss)
        run.step()
        assert loss.dtype == torch.float32 and loss.isfinite()
        losses.append(loss.item())
    return losses


def differences(run, other):
    """The parts of two runs' states that differ in any bit."""
    return golden.moved(golden.digests(run.state_dict()), golden.digests(other.state_dict()))


@dataclass
class Trained:
    client: Client
    fp32: list
    bf16: list
    run: Precision


@functools.cache
def trained(name):
    client = CLIENTS[name]()
    fp32 = train(start(client), client)
    run = start(client, pure_bf16=True, stochastic=True)
    return Trained(client, fp32, train(run, client), run)


every_client = pytest.mark.parametrize("name", CLIENTS)


@every_client
def test_pure_bf16_follows_fp32(name):
    t = trained(name)
    wide, low = sum(t.fp32[-5:]) / 5, sum(t.bf16[-5:]) / 5
    progress = t.fp32[0] - wide
    assert progress > 0.2 * t.fp32[0]  # or the comparison says nothing
    assert abs(low - wide) < TOLERANCE * progress
    wide = {p for m in t.run.model.modules() for p in m.parameters() if isinstance(m, nn.BatchNorm2d)}
    assert all(p.dtype == (torch.float32 if p in wide else BF16) for p in t.run.model.parameters())


def test_the_tolerance_tells_lost_updates():
    t = trained("gpt2")
    nearest = train(start(t.client, pure_bf16=True), t.client)
    missed = sum(nearest[-5:]) / 5 - sum(t.fp32[-5:]) / 5
    assert missed > 2 * TOLERANCE * (t.fp32[0] - sum(t.fp32[-5:]) / 5)


@every_client
def test_weights_load_into_the_plain_net(name):
    t = trained(name)
    for source in ("ema", "raw"):
        torch.manual_seed(99)
        plain = t.client.build()
        values = t.run.weights(source)
        plain.load_state_dict(values, strict=True)
        held = dict(plain.named_parameters())
        for parameter, p in t.run.named_params:  # a tied tensor has two names, and the last one loaded stays
            want = t.run.averages["ema"].shadow[parameter] if source == "ema" else p.float()
            assert torch.equal(held[parameter], want), parameter
        frozen = t.run.frozen(source, generation="fp32")
        with torch.no_grad():
            torch.testing.assert_close(t.client.call(frozen), t.client.call(plain.eval()))


# ---- transformers ------------------------------------------------------------------------------------------


def test_a_generator_writes_text():
    """A frozen net has the methods of the net: transformers' own generate() counts on."""
    transformers = need("transformers")
    net = trained("tied llama").run.generator().net
    options = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    out = net.generate(tokens(0)[:, :8], generation_config=options)
    assert out.shape == (4, 13)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_transformers_gradient_checkpointing_changes_nothing():
    client = gpt2()
    plain, checkpointed = (start(client, pure_bf16=True, stochastic=True) for _ in range(2))
    checkpointed.model.gradient_checkpointing_enable()
    checkpointed.model.train()
    assert checkpointed.model.is_gradient_checkpointing
    assert train(plain, client, last=3) == train(checkpointed, client, last=3)
    assert differences(plain, checkpointed) == []


# ---- Frameworks --------------------------------------------------------------------------------------------


def small():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))


def small_run(seed=0):
    torch.manual_seed(seed)
    return Precision(small(), recipe(pure_bf16=True, stochastic=True), lr=1e-3, ema_decay=0.9)


def small_loss(run, batch):
    pictures, labels = batch
    return F.cross_entropy(run(pictures.flatten(1)), labels)


def batches():
    """15 batches, the same in every epoch."""
    return [images(step) for step in range(HALF)]


@functools.cache
def plain_loop():
    """What every framework below must arrive at: two epochs of the six lines of precision.py."""
    run = small_run()
    for batch in batches() * 2:
        run.backward(small_loss(run, batch))
        run.step()
    return run


def lightning_module(run):
    import lightning

    class Module(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self, run):
            super().__init__()
            self.run, self.net = run, run.model  # Lightning moves, saves and counts the net

        def training_step(self, batch, index):
            loss = small_loss(self.run, batch)
            self.run.backward(loss)
            self.run.step()
            self.log("loss", loss)

        def configure_optimizers(self):
            return None  # the run owns it

        def on_save_checkpoint(self, checkpoint):
            checkpoint["precision"] = self.run.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.run.load_state_dict(checkpoint["precision"])

    return Module(run)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = need("lightning")

    def fit(run, epochs, **options):
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
        where = dict(accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False)
        trainer = lightning.Trainer(max_epochs=epochs, **where, **quiet)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        trainer.fit(lightning_module(run), loader, **options)
        return trainer

    whole = small_run()
    fit(whole, 2)
    assert differences(whole, plain_loop()) == []

    fit(small_run(), 1).save_checkpoint(tmp_path / "halfway.ckpt")
    again = small_run(seed=99)
    fit(again, 2, ckpt_path=tmp_path / "halfway.ckpt")
    assert differences(again, whole) == []


def test_accelerate(tmp_path):
    accelerate = need("accelerate")

    def prepared(run):
        accelerator = accelerate.Accelerator(cpu=True)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        run.forward, loader = accelerator.prepare(run.model, loader)  # wraps the net, moves the batches
        accelerator.register_for_checkpointing(run)
        return accelerator, loader

    def epoch(run, loader):
        for batch in loader:
            run.backward(small_loss(run, batch))
            run.step()

    whole = small_run()
    accelerator, loader = prepared(whole)
    epoch(whole, loader)
    accelerator.save_state(tmp_path / "halfway")
    epoch(whole, loader)
    assert differences(whole, plain_loop()) == []

    again = small_run(seed=99)
    accelerator, loader = prepared(again)
    accelerator.load_state(tmp_path / "halfway")
    epoch(again, loader)
    assert differences(again, whole) == []
