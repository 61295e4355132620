"""Averages that a net keeps of parts of itself, as DINO's, BYOL's and MoCo's teachers: frozen parts that are
built as a part that trains, and that something writes.
"""

from .average_watch import AverageWatch
from .averages import Average
from .measured import Tensor
from .net_state import has_parameters


class Teachers:
    """The frozen parts of a net that follow trained ones. answers, named, pick: see Watch."""

    def __init__(self, model, answers, named, pick):
        self.frozen = followers(model, {name for name, _ in named})
        average = Average(lambda: {name: p.detach() for name, (_, p) in self.frozen.items()})
        self.averages = AverageWatch(average, answers, named, pick)
        self.then = []

    def before(self):
        """Remember them before a step."""
        if self.frozen:
            self.then = self._state()
            self.averages.before()

    def compare(self, step):
        """Compare them, once the net has seen a batch after the step."""
        if self.averages.remembered is None:
            return
        stood = self.averages.stood()
        if not all(stood):
            self.averages.follow(step)
        elif self._state() != self.then:  # written, and left as they were
            self.averages.add_stood(stood, may_stand=False)
        self.averages.forget()

    def _state(self):
        """What changes when they are written, although their values may not."""
        return [(p._version, p.data_ptr()) for _, p in self.frozen.values()]

    def tensors(self, seen):
        """[Follower] of all that were measured. seen: measured.Measured."""
        return [Follower(seen, i, self) for i, name in enumerate(seen.names) if name in self.frozen]


class Follower(Tensor):
    """What was measured of a frozen tensor that follows a trained one, asked as averages are."""

    may_be_copied = True  # a target of Q-learning is no average

    def __init__(self, seen, i, teachers):
        super().__init__(seen, i, teachers.averages)
        self.name = teachers.frozen[self.name][0]

    @property
    def average_dtype(self):
        return next(iter(self.ema.shadow.values())).dtype


def followers(model, trained):
    """{name of a trained parameter: (name of a frozen one, that)} of frozen parts whose parameters have the
    names and shapes of those of a part that trains. trained: names of what the optimiser steps.
    """
    frozen, built = [], {}
    inside_frozen = ()  # what the names of their own parts begin with
    for name, module in model.named_modules():
        if not name or not has_parameters(module):
            continue
        own = dict(module.named_parameters())
        if any(p.requires_grad for p in own.values()):
            if all(f"{name}.{rest}" in trained for rest in own):
                built.setdefault(_names_and_shapes(own), name)
        elif not name.startswith(inside_frozen):
            frozen.append((name, own))
            inside_frozen += (f"{name}.",)
    found = {}
    for name, own in frozen:
        part = built.get(_names_and_shapes(own))
        if part is not None:
            for rest, p in own.items():
                found[f"{part}.{rest}"] = f"{name}.{rest}", p
    return found


def _names_and_shapes(params):
    return tuple((name, tuple(p.shape)) for name, p in params.items())
