"""The faults that Watch should name: each with its client, and the site and a part of the tensor's name.

    python tests/faults.py      measure them and those of held_out.py, and write the tables of docs/faults.md

The twelve of an outsider's attack are among them. A fault that can't be found stays in the list, with the
reason.
"""

import copy
import functools
import sys
from pathlib import Path

import held_out
import planted
import torch
from planted import BF16, by_accelerate, by_lightning, by_task, by_trainer, fault, seeded

from lowprec.kernels import compiled
from lowprec.optimizers import rounded
from lowprec.optimizers.average import EMA

# ---- Weights, moments, counters ----------------------------------------------------------------------------

LOW, DECAY = dict(dtype=BF16), ("weight decay", "c_fc")


@fault("bf16 AdamW to nearest at lr 1e-6: norm gains stay 1.0", "Llama", ("gains", "norm"), lr=1e-6, **LOW)
def _(loop):
    pass


@fault("bf16 AdamW to nearest at lr 1e-5", "GPT-2", ("update", "wte"), lr=1e-5, **LOW)
def _(loop):
    pass


@fault("bf16 SGD with momentum, to nearest", "ResNet", ("update", "conv"), lr=1e-4, **LOW)
def _(loop):
    loop.opt(torch.optim.SGD, momentum=0.9)


@fault("bf16 exp_avg_sq to nearest, beside exact weights", "GPT-2", ("exp_avg_sq", "attn"), **LOW)
def _(loop):
    loop.opt(rounded.AdamW, master="split", exp_avg_sq="bf16", compiled=False)
    loop.before.append(functools.partial(fading, loop))


@fault("8-bit codes of both moments, to nearest", "DiT", ("exp_avg_sq", "ff.net"), **LOW)
def _(loop):
    loop.opt(rounded.AdamW, master="split", exp_avg="int8", exp_avg_sq="int8", compiled=False)
    loop.before.append(functools.partial(fading, loop))


def fading(loop, step):
    """Gradients that shrink, of all but a few entries, as they do when a part of the net is learnt."""
    if step == 0:
        for p in loop.net.parameters():
            spared = torch.arange(p.numel()).view(p.shape) % 97 == 0
            p.register_hook(functools.partial(faded, loop, spared))
    loop.now = step


def faded(loop, spared, g):
    return torch.where(spared, g, g * (0.01 if loop.now > loop.steps // 6 else 1.0))


@fault("exp_avg_sq never changes (fp32)", "ResNet", ("exp_avg_sq", "conv1"))
def _(loop):
    loop.opt(Frozen)


class Frozen(torch.optim.AdamW):
    def step(self, closure=None):
        before = {p: state["exp_avg_sq"].clone() for p, state in self.state.items()}
        super().step()
        for p, v in before.items():
            if self.state[p]["step"] > 3:
                self.state[p]["exp_avg_sq"].copy_(v)


@fault("exp_avg_sq is zero after a resume", "Llama", ("exp_avg_sq", "q_proj"))
def _(loop):
    loop.opt()

    loop.before.append(lambda step: step % 3 == 2 and zeroed(loop.optimizer))


@fault("exp_avg_sq is zero after a resume, before the watch", "GPT-2", ("exp_avg_sq", "c_fc", "it was reset"))
def _(loop):
    loop.opt()
    loop.steps //= 2
    loop.train()
    zeroed(loop.optimizer)
    return loop.train()


@fault("exp_avg_sq zeroed once, between two looks", "Llama", ("exp_avg_sq", "q_proj", "it was reset"))
def _(loop):
    loop.opt()
    every = max(3, loop.steps // 12)
    loop.before.append(lambda step: step == loop.steps - every and zeroed(loop.optimizer))


def zeroed(optimizer):
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()


@fault("optimiser state cast to bf16 at a resume", "GPT-2", ("exp_avg_sq", "mlp"), **LOW)
def _(loop):
    loop.stochastic()

    def resume(step):
        if step == loop.steps // 2:
            for state in loop.optimizer.state.values():
                state.update(exp_avg=state["exp_avg"].to(BF16), exp_avg_sq=state["exp_avg_sq"].to(BF16))

    loop.before.append(resume)


@fault("optimiser state lost on the way", "DiT", ("step", "pos_embed"))
def _(loop):
    loop.opt()
    loop.before.append(lambda step: step == loop.steps // 2 and loop.optimizer.state.clear())


@fault("step counter in bf16, stuck at 256", "Llama", ("step", "embed_tokens"))
def _(loop):
    loop.opt()

    def cast(step):
        if step == 1:
            for state in loop.optimizer.state.values():
                state["step"] = torch.tensor(250.0, dtype=BF16)

    loop.before.append(cast)


@fault("step counters at half speed", "DiT", ("step", "", "behind the"))
def _(loop):
    loop.opt()

    def back(step):
        if step % 2:
            for state in loop.optimizer.state.values():
                state["step"] -= 1

    loop.before.append(back)


@fault("bf16 Adafactor, late in a run: rows and columns of v stand", "Llama", ("row_var", "mlp"), **LOW)
def _(loop):
    loop.opt(torch.optim.Adafactor)

    def late(step):
        if step == 1:
            for state in loop.optimizer.state.values():
                state["step"].add_(3000)

    loop.before.append(late)


@fault("weight decay written to nearest, beside a stochastic update", "GPT-2", DECAY, lr=3e-4, **LOW)
def _(loop):
    loop.stochastic(weight_decay=1.0, decay_apart=True)


@fault(
    "the same with a decay of 0.1",
    "GPT-2",
    DECAY,
    missed="a decay of 0.1 is less than what chance rounds away, in 300 steps too",
    lr=3e-4,
    **LOW,
)
def _(loop):
    loop.stochastic(weight_decay=0.1, decay_apart=True)


# -- noise


def same_each_step(optimizer, number, shape, step):
    return torch.randint(1 << 16, shape, dtype=torch.int32, generator=seeded(number))


def same_for_all(optimizer, number, shape, step):
    return torch.randint(1 << 16, shape, dtype=torch.int32, generator=seeded(step))


def lower_half(optimizer, number, shape, step):
    return torch.randint(1 << 15, shape, dtype=torch.int32)


def one_value(optimizer, number, shape, step):
    return torch.randint(1 << 16, (1,), dtype=torch.int32).expand(shape)


@fault("the same noise at every step", "Llama", ("noise", "mlp"), lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(same_each_step)


@fault("noise shared by all tensors", "Llama", ("noise", "self_attn"), lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(same_for_all)


@fault("noise only in [0, 1/2)", "GPT-2", ("noise", "mlp", "errs toward zero"), lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(lower_half)


@fault("one noise value for a whole tensor", "DiT", ("", "ff.net"), lr=1e-4, **LOW)
def _(loop):
    loop.stochastic(one_value)


# -- averages


@fault("bf16 average in diffusers' EMAModel", "U-Net", ("ema", "conv_in"), **LOW)
def _(loop):
    loop.stochastic()
    loop.diffusers_average(0.999)


@fault("the average of a third of the tensors stands still", "U-Net", ("ema", "down_blocks"))
def _(loop):
    still = set(list(dict(loop.net.named_parameters()))[::3])
    loop.average(update=lambda name: name not in still)


@fault("an average 50 times slower than its decay", "GPT-2", ("ema", "wpe"))
def _(loop):
    loop.ema = EMA(list(loop.net.named_parameters()), 0.9, compiled=False)
    loop.averaging.append(functools.partial(slow_update, loop, 0.998))


def slow_update(loop, real, step):
    loop.ema.decay = real
    loop.ema.update()
    loop.ema.decay = 0.9


@fault("the average is never updated", "DiT", ("ema", "transformer_blocks"))
def _(loop):
    loop.ema = copy.deepcopy(loop.net)


@fault("torch's AveragedModel of a bf16 net", "Llama", ("ema", "down_proj"), **LOW)
def _(loop):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    loop.stochastic()
    loop.ema = AveragedModel(loop.net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    loop.averaging.append(lambda step: loop.ema.update_parameters(loop.net))


# -- left out


@fault("norms left out of the optimiser's groups", "GPT-2", ("optimizer", "ln_"))
def _(loop):
    loop.params = [p for name, p in loop.net.named_parameters() if "ln_" not in name]


@fault("the optimiser has a copy of the net", "ResNet", ("optimizer", "conv1"))
def _(loop):
    loop.params = list(copy.deepcopy(loop.net).parameters())
    loop.opt()
    pairs = list(zip(loop.params, loop.net.parameters(), strict=True))
    loop.before.append(lambda step: [setattr(copied, "grad", None) for copied, _ in pairs])
    loop.optimizer.register_step_pre_hook(lambda *_: hand_over(pairs))


def hand_over(pairs):
    for copied, p in pairs:
        copied.grad = p.grad


@fault("a third of the weights with requires_grad=False", "deeper U-Net", ("frozen", "blocks"))
def _(loop):
    for p in loop.third():
        p.requires_grad_(False)


@fault("a third of the weights put back after each step", "DiT", ("update", "transformer_blocks"))
def _(loop):
    third, kept = loop.third(), {}
    loop.before.append(lambda step: kept.update({p: p.detach().clone() for p in third}))
    loop.after.append(lambda step: [p.data.copy_(kept[p]) for p in third])


@fault("a third of the weights restored within the step", "Llama", ("update", "layers"))
def _(loop):
    loop.opt(Restoring)


class Restoring(torch.optim.AdamW):
    def step(self, closure=None):
        kept = {p: p.detach().clone() for p in self.param_groups[0]["params"][::3]}
        super().step()
        with torch.no_grad():
            for p, value in kept.items():
                p.copy_(value)


@fault("an update that is written twice", "ResNet", ("update", "conv1"))
def _(loop):
    loop.opt(Doubled)


class Doubled(torch.optim.AdamW):
    def step(self, closure=None):
        kept = [p.detach().clone() for p in self.param_groups[0]["params"]]
        super().step()
        with torch.no_grad():
            for p, value in zip(self.param_groups[0]["params"], kept, strict=True):
                p.add_(p - value)


@fault(
    "a group whose learning rate is 0",
    "GPT-2",
    ("update", "mlp"),
    missed="a note says so, as some groups are frozen by plan",
)
def _(loop):
    mlp = loop.named("mlp").values()
    rest = [p for p in loop.net.parameters() if all(p is not q for q in mlp)]
    loop.params = [{"params": rest}, {"params": list(mlp), "lr": 0.0}]


# -- buffers


@fault("RoPE's frequencies cast with the model", "Llama", ("buffers", "inv_freq"), **LOW)
def _(loop):
    loop.stochastic()


@fault("BatchNorm's statistics cast with the model", "ResNet", ("buffers", "running_"), **LOW)
def _(loop):
    loop.stochastic()


@fault("buffers rounded to bf16 and cast back", "DiT", ("buffers", "pos_embed"))
def _(loop):
    for b in loop.net.buffers():
        if b.is_floating_point():
            b.copy_(b.to(BF16))


# -- gradients


@fault("gradients clipped at 1e-9", "U-Net", ("grads", ""))
def _(loop):
    loop.clip = 1e-9


@fault("SGD's gradients clipped at 1e-9", "ResNet", ("grads", "", "the net stands still"), lr=1e-2)
def _(loop):
    loop.opt(torch.optim.SGD, momentum=0.9)
    loop.clip = 1e-9


@fault("fp16 without a loss scale", "ResNet", ("grads", "conv"), autocast=torch.float16)
def _(loop):
    loop.clip, loss = 0.0, loop.client.loss
    loop.client.loss = lambda net, step: loss(net, step) * 1e-4


@fault("32 micro-batches summed in bf16", "GPT-2", ("accumulate", "mlp"), **LOW)
def _(loop):
    loop.stochastic()
    loop.micro, loop.steps = 32, max(6, loop.steps // 8)


@fault("gradients are never cleared", "Llama", ("grads", ""))
def _(loop):
    loop.clears = False


@fault("one tensor's gradient is not finite", "DiT", ("grads", "proj_out"))
def _(loop):
    name, p = next((n, p) for n, p in loop.net.named_parameters() if "proj_out" in n)
    p.register_hook(lambda g: g / 0)


# -- not seen


@fault("a sampler that steps the wrong way", "U-Net", ("sampler", ""), missed="no step of training writes it")
def _(loop):
    pass


@fault("Kahan's compensation emptied between two steps", "GPT-2", ("update", ""), lr=1e-5, **LOW)
def _(loop):
    loop.opt(rounded.AdamW, kahan=True, compiled=False)
    loop.after.append(lambda step: [s["compensation"].zero_() for s in loop.optimizer.state.values()])


# ---- Under frameworks --------------------------------------------------------------------------------------


@fault("step counters of an Accelerate loop in bf16", "Accelerate", ("step", "0.weight"))
def _(steps):
    def spoil(step, optimizer, net):
        if step == 1:
            for state in optimizer.optimizer.state.values():
                state["step"] = state["step"].to(BF16)

    return by_accelerate(steps, spoil)


@fault("a weight restored by a hook on the step, under Lightning", "Lightning", ("update", "net.3"))
def _(steps):
    def spoil(step, optimizer, net):
        if step == 0:
            kept = net[3].weight.detach().clone()
            optimizer.register_step_post_hook(lambda *_: net[3].weight.data.copy_(kept))

    return by_lightning(steps, spoil)


@fault("state lost at half of a Lightning run", "Lightning", ("step", "net.0"))
def _(steps):
    return by_lightning(steps, lambda step, optimizer, _: step == steps // 2 and optimizer.state.clear())


@fault("a frozen layer among trained ones, under transformers' Trainer", "Trainer", ("frozen", "h.1.mlp"))
def _(steps):
    import transformers

    class Freeze(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            for name, p in model.named_parameters():
                if "h.1.mlp" in name:
                    p.requires_grad_(False)

    return by_trainer(steps, Freeze())


@fault("a task's average held in bf16", "our rflow", ("ema", ""))
def _(steps):
    return by_task(steps, "--set", "ema=bf16", "--ema_decay", "0.999")


@fault("a task's weights in bf16 to nearest at lr 1e-6", "our ddpm", ("", "norm"))
def _(steps):
    return by_task(steps, "--task", "ddpm", "--pure_bf16", "--lr", "1e-6")


# ---- The tables --------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parent.parent / "docs" / "faults.md"


def row(case, finding):
    """Markdown of a fault and of the finding that names it, or None."""
    if finding is None:
        return f"| {case.name} | {case.client} | missed | {case.missed} |"
    return f"| {case.name} | {case.client} | {place(finding)} | {finding.text} |"


def held_out_row(case, finding):
    sight = "found" if case.name in held_out.FIRST else "missed"
    now = f"missed: {case.missed}" if finding is None else place(finding)
    return f"| {case.name} | {case.client} | {sight} | {now} |"


def place(finding):
    return finding.site + (f" of `{finding.tensor}`" if finding.tensor else "")


# mark on the page -> (its cases, the head of their table, a row of it)
TABLES = {
    "<!-- faults -->\n": (planted.FAULTS, "planted fault | client | named | what it says", row),
    "<!-- held-out -->\n": (planted.HELD_OUT, "held-out fault | client | at first sight | now", held_out_row),
}


def named(case, steps):
    """The finding that names the fault first; None where one that it needs is missing."""
    ok, losing = planted.says(case, case.run(steps).diagnosis())
    print("found " if ok else "missed", case.client, case.name, flush=True)
    return next((f for f in losing if ok and planted.fits(f, *case.expect[0])), None)


def main(steps=30):
    compiled.unfused = planted.Everything()
    page = PAGE.read_text()
    for mark, (cases, head, row_of) in TABLES.items():
        lines = [f"| {head} |", "|---|---|---|---|", *(row_of(case, named(case, steps)) for case in cases)]
        before, _, rest = page.partition(mark)
        _, _, after = rest.partition("\n\n")
        page = "\n".join([before + mark + lines[0], *lines[1:]]) + f"\n\n{after}"
    PAGE.write_text(page)


if __name__ == "__main__":
    sys.exit(main())
