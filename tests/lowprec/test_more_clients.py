"""Many small nets of other libraries, built from configs: each trains in pure bf16, and resumes bit for bit.

Beside test_clients.py, which compares five with fp32. A client is a function that builds a net and says how
it is called; what Precision must be told of it stands beside it.
"""

import functools
import warnings

import common
import pytest
import torch
import torch.nn.functional as F
from common import BF16, draw, same, through_a_file
from test_clients import Client, need, start, train
from torch import nn

eager = common.eager
CLIENTS = {}


def client(function):
    CLIENTS[function.__name__] = function
    return function


def ids(step, count=2, length=12):
    return torch.randint(3, 60, (count, length), generator=torch.Generator().manual_seed(step))


def images(step, side=32, channels=3):
    return draw(2, channels, side, side, seed=step)


SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)

# ---- transformers ------------------------------------------------------------------------------------------


def language(config, model, options=None, **sizes):
    transformers = need("transformers")

    def build():
        return getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **sizes}))

    def loss(run, step):
        return run(input_ids=ids(step), labels=ids(step)).loss

    return Client(build, loss, options or {})


LANGUAGE = {
    "bert": ("BertConfig", "BertForMaskedLM", dict(fp32_outputs=("cls.predictions.decoder",))),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", dict(fp32_outputs=("lm_head",))),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
}
for name, (config, model, options) in LANGUAGE.items():
    more = dict(num_local_experts=2) if name == "mixtral" else {}
    more |= dict(num_key_value_heads=2) if name in ("qwen2", "qwen3", "gemma", "mistral", "mixtral") else {}
    more |= dict(head_dim=8) if name in ("qwen3", "gemma") else {}
    CLIENTS[name] = functools.partial(language, config, model, options, **more)


@client
def t5():
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    options = dict(fp32_outputs=("lm_head",))
    return language("T5Config", "T5ForConditionalGeneration", options, **sizes)


@client
def mamba():
    return language("MambaConfig", "MambaForCausalLM", state_size=4, num_hidden_layers=1)


@client
def clip():
    transformers = need("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    text = dict(sizes, vocab_size=64, max_position_embeddings=16, eos_token_id=2, bos_token_id=1)
    vision = dict(sizes, image_size=16, patch_size=8)

    def build():
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        return transformers.CLIPModel(config)

    def loss(run, step):
        return run(input_ids=ids(step), pixel_values=images(step, 16), return_loss=True).loss

    return Client(build, loss, dict(fp32_outputs=("*_projection",)))


@client
def vit():
    transformers = need("transformers")
    config = dict(SIZES, image_size=16, patch_size=8)

    def build():
        return transformers.ViTForImageClassification(transformers.ViTConfig(**config))

    def loss(run, step):
        return F.cross_entropy(run(images(step, 16)).logits, torch.tensor([0, 1]))

    return Client(build, loss)


@client
def vit_mae():
    transformers = need("transformers")
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    config = dict(SIZES, image_size=16, patch_size=4, decoder_intermediate_size=32, **decoder)

    def build():
        return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**config))

    options = dict(fp32_outputs=("decoder.decoder_pred",))
    return Client(build, lambda run, step: run(pixel_values=images(step, 16)).loss, options)


@client
def whisper():
    transformers = need("transformers")
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, num_mel_bins=8, max_source_positions=16)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, vocab_size=64)

    def build():
        return transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**sizes, **heads, **tokens, max_target_positions=16)
        )

    def loss(run, step):
        return run(input_features=draw(2, 8, 32, seed=step), labels=ids(step)).loss

    return Client(build, loss, dict(fp32_outputs=("proj_out",)))


# ---- diffusers ---------------------------------------------------------------------------------------------


@client
def flux():
    diffusers = need("diffusers")
    sizes = dict(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16)
    more = dict(num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8)
    more |= dict(axes_dims_rope=[4, 4, 8])
    places = torch.zeros(300, 3)
    places[:, 2] = torch.arange(300)

    def loss(run, step):
        x = draw(1, 300, 4, seed=step)
        text = dict(encoder_hidden_states=draw(1, 5, 8), pooled_projections=draw(1, 8))
        text |= dict(txt_ids=torch.zeros(5, 3))
        out = run(hidden_states=x, timestep=torch.rand(1), img_ids=places, guidance=None, **text)
        return F.mse_loss(out.sample, x)

    options = dict(keep=("timestep", "img_ids"))
    return Client(lambda: diffusers.FluxTransformer2DModel(**sizes, **more), loss, options)


@client
def sdxl_unet():
    diffusers = need("diffusers")
    blocks = dict(down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",))
    sizes = dict(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8,), layers_per_block=1)
    text = dict(cross_attention_dim=8, attention_head_dim=2, norm_num_groups=4, addition_time_embed_dim=4)
    text |= dict(addition_embed_type="text_time", projection_class_embeddings_input_dim=32)

    def loss(run, step):
        x = draw(1, 4, 8, 8, seed=step)
        cond = dict(text_embeds=draw(1, 8), time_ids=torch.tensor([[1023.0, 1535, 7, 515, 1021, 1279]]))
        out = run(x, torch.tensor([10]), draw(1, 3, 8), added_cond_kwargs=cond)
        return F.mse_loss(out.sample, x)

    options = dict(keep=("timestep", "time_ids"))
    return Client(lambda: diffusers.UNet2DConditionModel(**blocks, **sizes, **text), loss, options)


@client
def autoencoder_kl():
    diffusers = need("diffusers")

    def loss(run, step):
        return F.mse_loss(run(images(step, 16)).sample, images(step, 16))

    return Client(lambda: diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), loss)


@client
def vq_model():
    diffusers = need("diffusers")
    sizes = dict(block_out_channels=(8,), norm_num_groups=4, num_vq_embeddings=16)

    def loss(run, step):
        out = run(images(step, 8))
        return F.mse_loss(out.sample, images(step, 8)) + out.commit_loss.mean()

    return Client(lambda: diffusers.VQModel(**sizes), loss, dict(fp32_modules=("quantize",)))


# ---- timm, torchvision -------------------------------------------------------------------------------------


def classifier(build, side=32, **options):
    def loss(run, step):
        return F.cross_entropy(run(images(step, side)), torch.tensor([0, 1]))

    return Client(build, loss, options)


def timm_net(name, options=None, **sizes):
    timm = need("timm")
    return classifier(lambda: timm.create_model(name, num_classes=2, **sizes), **(options or {}))


SMALL = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2)
BIASES = {"blocks.*.attn.k_bias": "bf16"}
TIMM = {
    "timm_vit": ("vit_tiny_patch16_224", {}, SMALL),
    "timm_eva02": ("eva02_tiny_patch14_224", dict(dtypes=BIASES), SMALL),
    "timm_beit": ("beit_base_patch16_224", dict(dtypes=BIASES), SMALL),
    "timm_convnext": ("convnext_atto", {}, dict(depths=(1, 1, 1, 1), dims=(4, 4, 8, 8))),
    "timm_deit3": ("deit3_small_patch16_224", {}, SMALL),
}
SWIN = dict(img_size=32, patch_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4)
TIMM["timm_swin"] = ("swin_tiny_patch4_window7_224", {}, SWIN)
for name, (model, options, sizes) in TIMM.items():
    CLIENTS[name] = functools.partial(timm_net, model, options, **sizes)


@client
def frozen_batch_norm():
    ops = need("torchvision").ops

    def build():
        first = (nn.Conv2d(3, 8, 3), ops.FrozenBatchNorm2d(8), nn.ReLU())
        return nn.Sequential(*first, nn.Conv2d(8, 2, 3), nn.Flatten(), nn.Linear(32, 2))

    return classifier(build, 8)


# ---- MONAI -------------------------------------------------------------------------------------------------


def segmentation(build, shape=(1, 1, 16, 16)):
    def loss(run, step):
        x = draw(*shape, seed=step)
        out = run(x)
        return F.mse_loss(out if torch.is_tensor(out) else out[0], x)

    return Client(build, loss)


@client
def monai_unet():
    nets = need("monai").networks.nets
    return segmentation(lambda: nets.UNet(2, 1, 1, channels=(4, 8), strides=(2,)))


@client
def monai_vqvae():
    nets = need("monai").networks.nets
    sizes = dict(channels=(4,), num_res_layers=1, num_res_channels=(4,), num_embeddings=8, embedding_dim=4)
    down, up = ((2, 4, 1, 1),), ((2, 4, 1, 1, 0),)
    sizes |= dict(downsample_parameters=down, upsample_parameters=up)

    def loss(run, step):
        out, commitment = run(draw(1, 1, 8, 8, seed=step))
        return F.mse_loss(out, draw(1, 1, 8, 8, seed=step)) + commitment

    return Client(lambda: nets.VQVAE(2, 1, 1, **sizes), loss, dict(fp32_modules=("quantizer",)))


@client
def monai_dynunet():
    nets = need("monai").networks.nets
    sizes = dict(kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8])
    deep = dict(deep_supervision=True, deep_supr_num=1)

    def loss(run, step):
        x = draw(1, 1, 16, 16, seed=step)
        return sum(F.mse_loss(out, x) for out in run(x).unbind(1))

    return Client(lambda: nets.DynUNet(2, 1, 1, **sizes, **deep), loss)


# ---- PEFT --------------------------------------------------------------------------------------------------


def adapted(kind, base=BF16, precision=None, **sizes):
    peft, transformers = need("peft"), need("transformers")

    def build():
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(base)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **sizes)
        return peft.get_peft_model(net, config)

    return Client(build, lambda run, step: run(input_ids=ids(step), labels=ids(step)).loss, precision or {})


ADAPTERS = {
    "peft_lora": ("LoraConfig", dict(r=2, target_modules=["q_proj"])),
    "peft_dora": ("LoraConfig", dict(r=2, target_modules=["q_proj"], use_dora=True)),
    "peft_ia3": ("IA3Config", dict(target_modules=["q_proj"], feedforward_modules=[])),
    "peft_prompt": ("PromptTuningConfig", dict(num_virtual_tokens=2)),
}
for name, (kind, sizes) in ADAPTERS.items():
    CLIENTS[name] = functools.partial(adapted, kind, **sizes)
CLIENTS["peft_lora_on_fp32"] = functools.partial(
    adapted, "LoraConfig", torch.float32, r=2, target_modules=["q_proj"]
)
VERA = {"*.vera_A.default": "bf16", "*.vera_B.default": "bf16"}
CLIENTS["peft_vera"] = functools.partial(
    adapted, "VeraConfig", precision=dict(dtypes=VERA), r=2, target_modules=["q_proj"]
)


# ---- What holds for each -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_client_trains_says_nothing_and_resumes(name):
    client, low = CLIENTS[name](), dict(pure_bf16=True, stochastic=True)
    run = start(client, **low)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(bf16|fp32)")  # options above answer what was said
        train(run, client, 0, 2)
    state = run.state_dict(trainable_only=name.startswith("peft"))
    saved = through_a_file(state)
    train(run, client, 2, 3)
    again = start(client, **low)
    again.load_state_dict(saved)
    train(again, client, 2, 3)
    weights, others = run.weights("raw"), again.weights("raw")
    moved = [key for key, value in weights.items() if not same(value, others[key])]
    assert moved == []
    with torch.no_grad():
        assert client.loss(run.generator(), 0).isfinite()
