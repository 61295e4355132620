"""One training of a trial: a whole one in little, from initial weights to a loss on held-out data."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import Refused, in_one_line
from ..precision import Precision
from ..recipes import recipe
from ..rounding import Stream, stream
from ..view import copied
from ..watch.checkpoints import weight_names_of


def usual_schedule(step: int, steps: int) -> float:
    """What the rate is multiplied by at one of so many steps: a tenth of them linear warm-up, then a cosine
    down to 0.
    """
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


class Problem(NamedTuple):
    """What is trained, as `trial` takes it. options: of Precision, as lr; without ema_decay the last weights
    are scored. weights: {name: tensor} to start from, or None.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    batches: Callable[[int], Iterable]
    held_out: Callable[[], Iterable]
    groups: Callable[[nn.Module], list] | None = None
    schedule: Callable[[int, int], float] = usual_schedule
    options: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] | None = None

    def call(self, name: str, *args: Any) -> Any:
        """What one of its functions returns. An error of it becomes a Refused that names the function."""
        with in_one_line(f"{name}() raised"):
            return getattr(self, name)(*args)

    def net(self) -> nn.Module:
        """A new net, also where build() returns one and the same."""
        net = self.call("build")
        if not isinstance(net, nn.Module):
            raise Refused(f"build() returned a {type(net).__name__}, and a torch.nn.Module is asked for")
        return copied(net)


class Training:
    """A Problem in the recipe of these flags, with one seed. `run` is its Precision; `step` trains a step,
    `held_out` scores.

    All draws from torch's, Python's and numpy's global generators are a function of the seed and the step:
    they are the same in every recipe.
    """

    END = object()  # of the batches

    def __init__(self, problem: Problem, flags: Mapping[str, Any], seed: int, steps: int):
        self.problem, self.seed, self.steps, self.done = problem, seed, steps, 0
        seed_everything(stream(seed, Stream.INIT))
        net = problem.net()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        net = net.to(self.device).train()
        if problem.weights is not None:
            load_weights(net, problem.weights)
        options = {"ema_decay": None, **problem.options, "seed": seed}
        if problem.groups is not None:
            options["groups"] = problem.call("groups", net)
        with in_one_line("Precision() raised"):
            self.run = Precision(net, recipe(**flags), **options)
        self.source = "raw" if self.run.ema is None else "ema"
        self.rates = [float(group["lr"]) for group in self.run.optimizer.param_groups]
        seed_everything(stream(seed, Stream.ORDER))
        self.batches = iter(problem.call("batches", seed))

    def rate_at(self, step: int) -> float:
        """The first group's learning rate at one of the steps."""
        return self.rates[0] * self.problem.schedule(step, self.steps)

    def step(self) -> torch.Tensor:
        """The loss of one optimiser step, 0-dim."""
        factor = self.problem.call("schedule", self.done, self.steps)
        for group, rate in zip(self.run.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        torch.manual_seed(stream(self.seed, Stream.GLOBAL, self.done))
        total = torch.zeros(())
        for _ in range(self.run.options.accumulate):
            loss = self._loss(self.run, self._next_batch(), f"batches({self.seed})")
            with in_one_line("backward() raised"):
                self.run.backward(loss)
            total = total + loss.detach().float() / self.run.options.accumulate
        self.run.step()
        self.done += 1
        return total

    def _next_batch(self):
        with in_one_line("batches() raised"):
            batch = next(self.batches, self.END)
        if batch is not self.END:
            return batch
        raise Refused(
            f"batches({self.seed}) ended after {self.done} of {self.steps} steps: let it begin anew when the "
            f"data end, or give so many steps"
        )

    def _loss(self, model, batch, source):
        batch = tree_map(lambda x: x.to(self.device) if torch.is_tensor(x) else x, batch)
        with in_one_line(f"loss() of a batch of {source} raised"):
            loss = self.problem.loss(model, batch)
        if not torch.is_tensor(loss) or loss.numel() != 1:
            raise Refused("loss(model, batch) is to return the mean loss, a tensor of one number")
        return loss.squeeze()

    @torch.no_grad()
    def held_out(self) -> float:
        """The mean loss over the batches of held_out(), of the averaged weights where there is an average."""
        view = self.run.generator(self.source)
        losses = []
        for i, batch in enumerate(self.problem.call("held_out")):
            torch.manual_seed(stream(0, Stream.FIXED, i))  # noise that the loss draws
            losses.append(float(self._loss(view, batch, "held_out()")))
        if not losses:
            raise Refused("held_out() yields nothing: it is to give the same batches at each call")
        return math.fsum(losses) / len(losses)


def seed_everything(seed: int) -> None:
    """Seed torch's, Python's and, where it is loaded, numpy's global generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@torch.no_grad()
def move_a_last_bit(net: nn.Module) -> None:
    """Move the largest weight of the last matrix by its last bit, in place: what differs from then on is
    chaos alone.
    """
    matrices = [p for p in net.parameters() if p.requires_grad and p.dim() > 1 and p.any()]
    if matrices:
        flat = matrices[-1].view(-1)
        place = flat.abs().argmax()
        flat[place] = torch.nextafter(flat[place], flat.new_zeros(()))


@torch.no_grad()
def load_weights(net: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give `net` the weights of a checkpoint, {name: tensor}, in place. Raises Refused for another net's."""
    own = net.state_dict()
    names = weight_names_of(own, weights)
    given = {own[name].data_ptr() for name in names}  # tied weights may stand there once
    for name, t in own.items():
        if name not in names and (not t.dim() or t.data_ptr() in given):
            continue
        found = weights.get(names.get(name, ""))
        if found is None or found.shape != t.shape:
            shape = list(t.shape)
            raise Refused(f"the checkpoint has no weight {name} of the shape {shape}: it is another net's")
        t.copy_(found)
