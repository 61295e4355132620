"""The blocks of docs/recipes-elsewhere.md, run with the real libraries on small nets."""

import gc
import re
from pathlib import Path

import common
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowprec
from lowprec.optimizers.rounded import AdamW

eager, alone = common.eager, common.alone
PAGE = Path(lowprec.__file__).parents[1] / "docs" / "recipes-elsewhere.md"
BF16 = torch.bfloat16


def page(*titles):
    """What the blocks of the page define: those before the first title, and those of these titles."""
    before, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    chosen = [before, *(text for text in sections if text.startswith(titles))]
    assert len(chosen) == 1 + len(titles)
    found = {}
    for text in chosen:
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S):
            exec(compile(block, str(PAGE), "exec"), found)
    return found


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(16) + index) % 64
        return {"input_ids": ids, "labels": ids}


def assert_protected(net, optimizer):
    """The weights are bf16 and their writes are stochastic: some of equal steps move a weight, some don't."""
    assert all(p.dtype == BF16 for p in net.parameters() if p.requires_grad)
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate and Lightning wrap it
    assert isinstance(inner, AdamW) and inner.update == "stochastic"
    assert max(state["step"] for state in inner.state.values()) > 0


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_transformers_trainer_resumes_bit_for_bit(tmp_path):
    transformers = pytest.importorskip("transformers")
    own = page("transformers")
    options = dict(
        output_dir=str(tmp_path),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    args = transformers.TrainingArguments(**options)
    whole = own["trainer_of"](llama(), args, Tokens())
    whole.train()
    assert_protected(whole.model, whole.optimizer)
    again = own["trainer_of"](llama(), args, Tokens())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(whole.model, again.model) and not same(whole.model, own["in_bf16"](llama()))


def test_trl(tmp_path):
    trl = pytest.importorskip("trl")
    tokenizers = pytest.importorskip("tokenizers")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"
    )
    rows = datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4 w5 w6 w7"] * 16})
    args = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        max_length=16,
        gradient_checkpointing=False,
    )
    trainer = page("TRL")["sft_of"](llama(), args, rows, tokenizer)
    trainer.train()
    assert_protected(trainer.model, trainer.optimizer)


def test_peft():
    pytest.importorskip("peft")
    net, optimizer = page("PEFT")["adapted"](llama(), ["q_proj", "v_proj"], 1e-3)
    base = {name: p.clone() for name, p in net.named_parameters() if not p.requires_grad}
    ids = Tokens()[0]["input_ids"][None]
    for _ in range(3):
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_protected(net, optimizer)
    assert all(torch.equal(p, base[name]) for name, p in net.named_parameters() if name in base)
    moved = [p for name, p in net.named_parameters() if "lora_B" in name]
    assert moved and all(p.abs().max() > 0 for p in moved)


def regression():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def pairs():
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(32, 8, dtype=BF16), torch.randn(32, 8, dtype=BF16))


def error(net, batch):
    x, y = batch
    return F.mse_loss(net(x), y)


def test_lightning_resumes_bit_for_bit(tmp_path):
    lightning = pytest.importorskip("lightning")
    own = page("Lightning")

    def fit(folder, **more):
        keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
        trainer = lightning.Trainer(
            max_steps=8,
            precision="32-true",
            accelerator="cpu",
            callbacks=[keep],
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = own["Module"](regression(), error)
        # four steps an epoch: Lightning itself begins an epoch anew that a checkpoint stands within
        trainer.fit(module, torch.utils.data.DataLoader(pairs(), batch_size=8), **more)
        return module, trainer.optimizers[0]

    whole, optimizer = fit(tmp_path / "whole")
    assert_protected(whole, optimizer)
    (half,) = (tmp_path / "whole").glob("*step=4*")
    again, _ = fit(tmp_path / "again", ckpt_path=half, weights_only=False)
    assert same(whole, again)
    assert not same(whole.net, own["in_bf16"](regression()))


def test_a_diffusers_net_in_a_script():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    net = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    _, net, optimizer, loader = page("Accelerate")["prepared"](net, torch.randn(8, 3, 8, 8).to(BF16), 1e-3)
    for x in loader:
        F.mse_loss(net(x, torch.tensor([3])).sample, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_protected(net, optimizer)
    scheduler = diffusers.DDPMScheduler(10)
    pipeline = diffusers.DDPMPipeline(unet=page("Accelerate")["to_draw"](net), scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=2, num_inference_steps=2, output_type="np").images.shape == (2, 8, 8, 3)
    assert_protected(net, optimizer)


def test_a_trainer_that_feeds_fp32_and_steps_by_itself():
    own = page("Trainers that step")
    net = regression()

    def optimizers():
        gc.collect()
        return sum(isinstance(one, AdamW) for one in gc.get_objects())

    before = optimizers()
    kept = own["stand_in"](regression())
    assert optimizers() == before and kept.training
    module, optimizer = own["stand_in"](net), own["protected"](net.parameters(), 1e-3)
    for x, y in zip(torch.randn(3, 4, 8), torch.randn(3, 4, 8), strict=True):
        loss = F.mse_loss(module(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.dtype == torch.float32 and module.state_dict().keys() == net.state_dict().keys()
    assert_protected(net, optimizer)


def test_fsdp2(alone):
    own = page("A loop with FSDP2")
    net = regression()
    optimizer = own["spread"](net, [net[0], net[2]], 1e-3)
    plain = own["in_bf16"](regression())
    beside = own["protected"](plain.parameters(), 1e-3)
    x, y = pairs()[:]
    for _ in range(3):
        for one, steps in ((net, optimizer), (plain, beside)):
            error(one, (x, y)).backward()
            steps.step()
            steps.zero_grad()
    assert all(
        torch.equal(a.full_tensor(), b) for a, b in zip(net.parameters(), plain.parameters(), strict=True)
    )


# ---- Trials ------------------------------------------------------------------------------------------------


def of_transformers(own, draw):
    pytest.importorskip("transformers")
    tokens = (torch.arange(16) + torch.arange(32)[:, None]) % 64
    return own["trial_of_transformers"], llama, tokens, tokens[:4]


def of_diffusers(own, draw):
    diffusers = pytest.importorskip("diffusers")
    channels = dict(in_channels=1, out_channels=1, block_out_channels=(8,), norm_num_groups=4)
    blocks = dict(down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",))
    images = draw(32, 1, 8, 8)

    def build():
        return diffusers.UNet2DModel(sample_size=8, layers_per_block=1, **channels, **blocks)

    return own["trial_of_diffusers"], build, diffusers.DDPMScheduler(), images, images[:4]


def of_timm(own, draw):
    timm = pytest.importorskip("timm")
    labels = torch.arange(32) % 4
    images = draw(32, 3, 16, 16) + labels[:, None, None, None]

    def build():
        size = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=4)
        return timm.models.VisionTransformer(**size)

    return own["trial_of_timm"], build, images, labels, (images, labels)


class Denoiser(nn.Module):
    """A wrapper that forms the loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)), x)


def of_wrapped(own, draw):
    return own["trial_of_wrapped"], regression, Denoiser, draw(32, 8), draw(4, 8)


# and steps by which each learns something
PROBLEMS = [(of_transformers, 4), (of_diffusers, 4), (of_timm, 12), (of_wrapped, 12)]


@pytest.mark.parametrize("problem, steps", PROBLEMS)
def test_a_trial_of_a_net_of_another_library(problem, steps):
    ask, *rest = problem(page("Before you choose"), common.draw)
    found = ask(*rest, recipes=["pure_bf16+stochastic"], steps=steps, within=500.0, lr=1e-2, quiet=True)
    assert [row.recipe for row in found.rows] == ["a last bit moved", "bf16", "pure_bf16+stochastic"]
    assert all(row.low <= row.change <= row.high for row in found.rows)
    assert not found.left_out
