"""Faults that were written after Watch and its limits: how much of what nobody thought of does it find?

faults.py measures them. `FIRST` names what was found when they ran first, before anything in Watch was
changed for them. Nothing is held out any more once it has been mended: new faults are the next such test.
"""

import functools

import torch
from planted import BF16, by_trainer, held_out, seeded
from torch import nn

from lowprec.optimizers.average import EMA

LOW = dict(dtype=BF16)

# ---- Other optimisers --------------------------------------------------------------------------------------


@held_out(
    "SGD's momentum of 0.999 in bf16, beside fp32 weights",
    "ResNet",
    ("", "conv"),
    lr=1e-4,
    missed="a note says that it is in bf16 and loses little, as its gradients are noisy",
)
def _(loop):
    loop.opt(torch.optim.SGD, momentum=0.999)

    loop.optimizer.register_step_post_hook(lambda *_: cast_momentum(loop.optimizer, BF16))
    loop.optimizer.register_step_pre_hook(lambda *_: cast_momentum(loop.optimizer, torch.float32))


def cast_momentum(optimizer, dtype):
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(dtype)


@held_out("bf16 Lion to nearest, written by hand", "Llama", ("update", "mlp"), lr=1e-5, **LOW)
def _(loop):
    loop.opt(Lion)


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675: the sign of an interpolated momentum."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr, wd = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * wd).add_(torch.lerp(p.grad, m, b1).sign(), alpha=-lr)
                m.lerp_(p.grad, 1 - b2)


@held_out("bf16 RMSprop to nearest at lr 1e-5", "U-Net", ("update", "conv"), lr=1e-5, **LOW)
def _(loop):
    loop.opt(torch.optim.RMSprop)


@held_out("bf16 Muon to nearest at lr 1e-4", "GPT-2", ("update", "c_fc"), lr=1e-4, **LOW)
def _(loop):
    for p in loop.net.parameters():
        p.requires_grad_(p.dim() == 2)
    loop.opt(torch.optim.Muon)


@held_out(
    "Adafactor's rows and columns of v in bf16, late in a run",
    "Llama",
    ("row_var", "mlp"),
)
def _(loop):
    loop.opt(torch.optim.Adafactor, lr=1e-3)

    def round_them(optimizer, args, kwargs):
        for state in optimizer.state.values():
            for name in {"row_var", "col_var", "variance"} & set(state):
                state[name] = state[name].to(BF16).float()
            if state["step"] < 1000:
                state["step"] += 100_000

    loop.optimizer.register_step_post_hook(round_them)


@held_out("exp_avg_sq in fp16, where small squares are 0", "GPT-2", ("exp_avg_sq", "attn"), **LOW)
def _(loop):
    loop.stochastic()
    loop.clip = 1e-2

    def cast(optimizer, args, kwargs):
        for state in optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].half()

    loop.optimizer.register_step_post_hook(cast)


# ---- Learning rates and decay ------------------------------------------------------------------------------


@held_out("a warm-up by integer division: the learning rate never leaves 0", "GPT-2", ("update", ""))
def _(loop):
    loop.opt(weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: min(1, step // 1000))
    loop.after.append(lambda step: schedule.step())


@held_out("a schedule stepped twice: no learning rate in the second half", "DiT", ("update", ""))
def _(loop):
    loop.opt()
    loop.steps *= 2

    def shape(step):
        return max(0.0, 1 - step / loop.steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, shape)
    loop.after += [lambda step: schedule.step()] * 2


@held_out("weight decay that only the first group gets", "Llama", ("weight decay", "mlp"), lr=1e-3)
def _(loop):
    mlp = list(loop.named("mlp").values())
    rest = [p for p in loop.net.parameters() if all(p is not q for q in mlp)]
    loop.params = [{"params": rest}, {"params": mlp}]
    loop.opt(FirstDecays, weight_decay=0.5)


class FirstDecays(torch.optim.AdamW):
    def step(self, closure=None):
        kept, self.param_groups[1]["weight_decay"] = self.param_groups[1]["weight_decay"], 0.0
        super().step()
        self.param_groups[1]["weight_decay"] = kept


# ---- Gradients ---------------------------------------------------------------------------------------------


@held_out("a tied embedding that stands twice in the group", "GPT-2", ("", "wte"))
def _(loop):
    loop.params = [*loop.net.parameters(), loop.net.lm_head.weight]


@held_out("a GradScaler that skips each step", "ResNet", ("", ""))
def _(loop):
    loop.clip, loss = 0.0, loop.client.loss
    scaler = torch.amp.GradScaler("cpu")
    loop.client.loss = lambda net, step: scaler.scale(loss(net, step))
    next(loop.net.parameters()).register_hook(lambda g: g / 0)
    loop.optimizer = Scaled(loop.opt(), scaler)


class Scaled:
    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler, self.zero_grad = optimizer, scaler, optimizer.zero_grad

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


@held_out(
    "gradients that are unscaled twice",
    "ResNet",
    ("grads", ""),
    missed="AdamW's steps stay the same, so nothing is lost here",
)
def _(loop):
    loop.clip = 0.0
    loop.opt()

    def unscale(optimizer, args, kwargs):
        for p in loop.net.parameters():
            p.grad.div_(2.0**16)

    loop.optimizer.register_step_pre_hook(unscale)


@held_out("the keys' third of a fused qkv has no gradient", "GPT-2", ("", "c_attn.weight"))
def _(loop):
    for name, p in loop.net.named_parameters():
        if "c_attn" in name:
            kept = (torch.arange(96) // 32 != 1).float()
            p.register_hook(functools.partial(torch.mul, kept))


@held_out(
    "the time embedding is detached",
    "U-Net",
    ("grads", "time_embedding"),
    missed="a note says that it never has a gradient",
)
def _(loop):
    loop.net.time_embedding.register_forward_hook(lambda module, args, out: out.detach())


@held_out("LoRA with both factors zero", "GPT-2", ("grads", "lora"))
def _(loop):
    for p in loop.net.parameters():
        p.requires_grad_(False)
    for block in loop.net.transformer.h:
        block.mlp.c_fc.lora = nn.ModuleList([nn.Linear(32, 4, bias=False), nn.Linear(4, 128, bias=False)])
        for layer in block.mlp.c_fc.lora:
            nn.init.zeros_(layer.weight)
        block.mlp.c_fc.register_forward_hook(with_lora)


def with_lora(module, args, out):
    down, up = module.lora
    return out + up(down(args[0]))


@held_out("only the last of 8 micro-batches counts", "GPT-2", ("", ""))
def _(loop):
    loop.micro, loop.steps, loss = 8, max(6, loop.steps // 4), loop.client.loss

    def clearing(net, step):
        loop.optimizer.zero_grad()
        return loss(net, step)

    loop.client.loss = clearing


# ---- Averages, noise, storage ------------------------------------------------------------------------------


@held_out("torch's AveragedModel, a plain mean, of a bf16 net", "DiT", ("ema", "transformer_blocks"), **LOW)
def _(loop):
    from torch.optim.swa_utils import AveragedModel

    loop.stochastic()
    loop.ema = AveragedModel(loop.net)
    loop.ema.n_averaged += 500  # as late in a run
    loop.averaging.append(lambda step: loop.ema.update_parameters(loop.net))


@held_out("an average whose decay and rate are swapped", "U-Net", ("ema", "conv_in"))
def _(loop):
    loop.ema = EMA(list(loop.net.named_parameters()), 0.99, compiled=False)

    def swapped(step):
        loop.ema.decay = 0.01
        loop.ema.update()
        loop.ema.decay = 0.99

    loop.averaging.append(swapped)


@held_out("fp32 weights that pass through bf16 after each step", "Llama", ("", "mlp"), lr=1e-5)
def _(loop):
    loop.after.append(lambda step: [p.data.copy_(p.data.to(BF16)) for p in loop.net.parameters()])


@held_out("one noise value for each row", "Llama", ("noise", "mlp"), lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(one_a_row)


def one_a_row(optimizer, number, shape, step):
    noise = torch.randint(1 << 16, (*shape[:-1], 1), dtype=torch.int32)
    return noise.expand(shape)


@held_out("noise that two draws take turns in", "GPT-2", ("noise", "mlp"), lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(two_draws)


def two_draws(optimizer, number, shape, step):
    generator = seeded(number, step % 2)
    return torch.randint(1 << 16, shape, dtype=torch.int32, generator=generator)


@held_out("BatchNorm's running variance is not finite", "ResNet", ("buffers", "running_var"))
def _(loop):
    loop.after.append(lambda step: step == 3 and loop.net.bn1.running_var.fill_(float("inf")))


@held_out("a model in bf16 under transformers' Trainer at lr 1e-6", "Trainer", ("gains", "ln_"))
def _(steps):
    import transformers

    class Cast(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.to(BF16)

    return by_trainer(steps, Cast(), learning_rate=1e-6)


# ---- What was found at once --------------------------------------------------------------------------------

FIRST = """bf16 Lion to nearest, written by hand
bf16 RMSprop to nearest at lr 1e-5
bf16 Muon to nearest at lr 1e-4
exp_avg_sq in fp16, where small squares are 0
weight decay that only the first group gets
a tied embedding that stands twice in the group
torch's AveragedModel, a plain mean, of a bf16 net
fp32 weights that pass through bf16 after each step
a model in bf16 under transformers' Trainer at lr 1e-6""".splitlines()
