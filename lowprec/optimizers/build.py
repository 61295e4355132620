"""The choice of an optimiser: ours and other people's by name, and several of them as one."""

import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..errors import Refused, check_choice
from ..formats import FORMATS
from ..rounding import hash64
from .adafactor import Adafactor
from .answers import Answers, params_of
from .lion import Lion
from .muon import Muon, hidden_matrices, stacks_of
from .peers import PEER_OPTIMIZERS, Peer, check_closure
from .rounded import AdamW, Rounded, WithoutCompiler
from .sgd import SGD
from .state import own_attributes

OPTIMIZERS = {"adamw": AdamW, "sgd": SGD, "lion": Lion, "adafactor": Adafactor, "muon": Muon}
OPTIMIZER_NAMES = (*OPTIMIZERS, *PEER_OPTIMIZERS)


def classes_of(name):
    """The classes that serve --optimizer `name`, itself first; () for what is none of ours. name: of
    OPTIMIZERS, or a class.
    """
    kind = OPTIMIZERS.get(name) if isinstance(name, str) else name
    if not (isinstance(kind, type) and issubclass(kind, Rounded)):
        return ()
    if kind.others is None:
        return (kind,)
    return (kind, *classes_of(kind.others))


def divided_groups(groups, name, net):
    """Parameter groups of which each optimiser has what it takes: those of an optimiser with `others` in two.

    name: the optimiser of groups without an `optimizer`. net: tells hidden layers.
    """
    found = []
    for group in groups:
        kind = group.get("optimizer", name)
        classes = classes_of(kind)
        others = classes[0].others if classes else None
        if others is None:
            found.append(group)
            continue
        params = [group["params"]] if torch.is_tensor(group["params"]) else list(group["params"])
        hidden, stacks = hidden_matrices(net), stacks_of(net)
        own = [p for p in params if p in hidden and p not in stacks]
        apart = [p for p in params if p in hidden and p in stacks]
        rest = [p for p in params if p not in hidden]
        if own:
            found.append({**group, "params": own, "optimizer": kind})
            if any(p.dim() == 3 for p in own):
                found[-1]["kernels"] = True
        if apart:
            found.append({**group, "params": apart, "optimizer": kind})
        if rest:
            found.append({**group, "params": rest, "optimizer": others})
    return found


def listed_group(group):
    """A parameter group with a list of parameters, of which torch takes one, an iterable, or an iterable of
    (name, parameter). Raises Refused for a set, which has no order that a resume could rely on.
    """
    params = group.get("params") if isinstance(group, Mapping) else None
    if params is None or isinstance(params, set | frozenset):
        raise Refused('groups: a list of dicts, each with its "params" in a list; a set has no order')
    params = [params] if torch.is_tensor(params) else params
    return {**group, "params": [p[1] if isinstance(p, tuple) else p for p in params]}


def trained_groups(groups, named_params):
    """The groups with the parameters that are trained alone. named_params: [(name, parameter)] of these.
    Raises Refused where one of them is in no group or in several, and for one that is not among them.
    """
    times = Counter()
    for group in groups:
        times.update(group["params"])
    for name, p in named_params:
        if times[p] != 1:
            which = f"groups: parameter {name} is in {times[p]} of them"
            raise Refused(f"{which}: put it into one, or set requires_grad=False")
    trained = {p for _, p in named_params}
    if any(p.requires_grad and p not in trained for p in times):
        raise Refused(
            "groups: a parameter of them is none of the model's, and would never be trained; put it into a "
            "module with the net, and make Precision of that"
        )
    return [{**group, "params": [p for p in group["params"] if p in trained]} for group in groups]


# ---- Several as one ----------------------------------------------------------------------------------------


def _of_owner(question):
    """A method that asks the optimiser to which the parameter belongs."""

    def ask(self, p, *args):
        return getattr(self.owner[p], question)(p, *args)

    return ask


class Joined(Answers, WithoutCompiler):
    """Several optimisers that answer and step as one: for parameter groups with an `optimizer` of their own.

    param_groups are those of the parts, so torch's schedulers work on them.
    """

    def __init__(self, parts):
        self.parts = parts
        super().__init__(params_of(self._groups()), {})
        self.param_groups = self._groups()
        self.by_recipe = all(part.by_recipe for part in parts)
        self.owner = {}
        for part in parts:
            self.owner.update(dict.fromkeys(params_of(part.param_groups), part))

    @contextmanager
    def reading(self):
        with ExitStack() as stack:
            yield any([stack.enter_context(part.reading()) for part in self.parts])  # enters each of them

    def _groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def __getstate__(self):
        return own_attributes(self)

    def add_param_group(self, param_group):
        if hasattr(self, "owner"):
            whose = "several optimisers step as one here, and a later group belongs to none of them"
            raise Refused(f"{whose}: give all groups at the start")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step(grads=grads, grad_scale=grad_scale)
        return loss

    @property
    def state(self):
        found = {}
        for part in self.parts:
            found.update(part.state)
        return found

    @state.setter
    def state(self, value):
        """torch's constructor sets an empty one."""

    @property
    def compiled(self):
        return all(part.compiled for part in self.parts)

    @compiled.setter
    def compiled(self, value):
        for part in self.parts:
            part.compiled = value

    def low_part(self, p):
        return self.owner[p].low_part(p) if p in self.owner else None

    held = _of_owner("held")
    moment = _of_owner("moment")
    wanted = _of_owner("wanted")
    decayed = _of_owner("decayed")
    decay = _of_owner("decay")
    coded = _of_owner("coded")
    clear = _of_owner("clear")
    still = _of_owner("still")
    set_exact = _of_owner("set_exact")

    def announce(self, grads, grad_scale):
        for part in self.parts:
            part.announce(grads, grad_scale)

    @property
    def collecting(self):
        found = []
        for part in self.parts:
            found += part.collecting
        return found

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def nbytes(self):
        total = {}
        for part in self.parts:
            for site, n in part.nbytes().items():
                total[site] = total.get(site, 0) + n
        return total

    def notes(self):
        found = {}
        for part in self.parts:
            found.update(part.notes())
        first, whole = self.parts[0], sum(p.numel() for p in self.owner)
        if getattr(first, "others", None):
            left = whole - sum(p.numel() for p in params_of(first.param_groups))
            for name in first.moments:
                note = f"; {left:,} of {whole:,} weights are left to {first.others}"
                found[name] = found.get(name, "") + note
        return found

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts], "state": {}, "param_groups": []}

    def load_state_dict(self, state):
        self.take_state(self.checked_state(state))

    def checked_state(self, state):
        if len(state.get("parts", ())) != len(self.parts):
            wrong = f"optimiser state is not one of {len(self.parts)} joined optimisers"
            raise Refused(f"{wrong}: it was written by another recipe")
        return [part.checked_state(saved) for part, saved in zip(self.parts, state["parts"], strict=True)]

    def take_state(self, checked):
        for part, state in zip(self.parts, checked, strict=True):
            part.take_state(state)
        self.param_groups = self._groups()  # a peer's own loader makes its groups anew


# ---- The choice --------------------------------------------------------------------------------------------

PEER_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}  # as AdamW has them, for peers
MOMENTUM_OPTIONS = ("momentum", "nesterov")  # options of some of ours


def build(name, params, r, *, weight_decay=0.0, seed=0, net=None, away=None, **options):
    """The optimiser of recipe `r`: ours by name, a peer by name as its authors publish it, or a stranger's.

    name: an entry of OPTIMIZER_NAMES, a subclass of Rounded, or a function params -> torch.optim.Optimizer.
    params: parameters, or groups with options of their own, `optimizer` among them. options: lr, betas, eps,
    momentum and nesterov, where they are not to be the optimiser's own; a stranger's gets none. net: the
    module that the parameters belong to; without it no hidden layer is known. away: a lowprec.Offload for the
    moments of ours. Raises Refused when the name is unknown, the package absent, the peer can't serve the
    recipe, or none here has an eps or a momentum that was given.
    """
    net = nn.Module() if net is None else net
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    groups = divided_groups([dict(group) for group in groups], name, net)
    of_groups = [group.pop("optimizer", name) for group in groups]
    if not any(isinstance(kind, str) or classes_of(kind) for kind in of_groups):
        for option, value in {**options, "weight_decay": weight_decay}.items():
            if value or option != "weight_decay":
                given = f"{option}={value}"
                what = f"{given} reaches optimisers by name alone, and this one is made by a function"
                raise Refused(f"{what}: give it there, as functools.partial(torch.optim.SGD, {given})")
    parts, r = [], r.keeping(*of_groups)
    for kind in dict.fromkeys(of_groups):
        own = [group for group, its in zip(groups, of_groups, strict=True) if its == kind]
        # each counts the places of its parameters from 0: another seed, so that no two share noise
        seed_of_part = hash64(seed, len(parts)) if parts else seed
        own_options = {**options, "weight_decay": weight_decay}
        classes = classes_of(kind)
        if classes:
            parts.append(_build_ours(classes[0], own, r, own_options, seed_of_part, away, net))
        elif isinstance(kind, str):
            parts.append(_build_peer(kind, own, r, own_options, net))
        else:
            parts.append(_build_strangers(kind, own, r, seed_of_part))
    refusable = MOMENTUM_OPTIONS
    if all(classes_of(kind) for kind in of_groups):  # a stranger's may be made with an eps of its own
        refusable = ("eps", *MOMENTUM_OPTIONS)
    for option in refusable:
        if option not in options or any(option in part.defaults for part in parts):
            continue
        of_ours = OPTIMIZERS.items()
        takers = [key for key, kind in of_ours if option in inspect.signature(kind).parameters]
        theirs = " and ".join(takers)
        raise Refused(f"--{option} belongs to --optimizer {theirs}: drop it, or choose one of these")
    if len(parts) == 1:
        return parts[0]
    return Joined(parts)


def all_ours(optimizer, what):
    """[the optimisers that step as one]. Raises Refused, in the name of `what`, where one is none of ours."""
    parts = getattr(optimizer, "parts", [optimizer])
    for part in parts:
        if not isinstance(part, Rounded):
            kind = type(getattr(part, "inner", part))
            owner = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
            ours = "use adamw, sgd, lion, adafactor or muon of ours, or drop it"
            raise Refused(f"{what} knows our optimisers alone, and {owner} is none: {ours}")
    return parts


def title_of_optimizer(optimizer, name):
    """What the ledger calls the optimiser that was asked for as `name`."""
    if isinstance(optimizer, Joined):
        return " and ".join(title_of_optimizer(part, None) for part in optimizer.parts)
    if isinstance(name, str):
        return name
    return type(getattr(optimizer, "inner", optimizer)).__name__


def _build_ours(kind, params, r, options, seed, away, net):
    """One of ours, of parameter groups that belong to it alone."""
    names = {p: name for name, p in net.named_parameters()}
    own = {"update": r.update, "kahan": r.kahan == "on", "master": r.master, "seed": seed}
    own.update(away=away, param_names=names, kinds={})
    for moment in kind.moments:
        if moment in r.values:
            own["kinds"][moment] = r.values[moment]
    for site in kind.sites:
        if site not in kind.moments:
            own[site] = r.values[site]
    for option in {"betas", "eps", *MOMENTUM_OPTIONS}.difference(inspect.signature(kind).parameters):
        options.pop(option, None)  # Lion has no eps, SGD neither
    return kind(params, **{**kind.of_run, **options}, **own)


TO_NEAREST = "nearest", "off", "none"
# {(update, kahan, master) of a recipe: how protect.py writes for an optimiser of others, None: not at all}
WRITES_OF_STRANGERS = {
    TO_NEAREST: None,
    ("stochastic", "off", "none"): "stochastic",
    ("nearest", "on", "none"): "kahan",
}


def _build_strangers(make, params, r, seed):
    if isinstance(make, torch.optim.Optimizer):
        kind = type(make).__name__
        raise Refused(f"optimizer= takes what makes one of parameters: the class {kind}, not an object of it")
    how = r.update, r.kahan, r.master
    if how not in WRITES_OF_STRANGERS or r.coded:
        ours = "eco, masters, kahan beside stochastic, and moments in codes belong to ours"
        raise Refused(f"this optimiser's weights can be written stochastically, or with kahan: {ours}")
    made = make(params)
    check_closure(made)
    if hasattr(made, "held"):
        return made
    update = WRITES_OF_STRANGERS[how]
    if update is None:
        return Peer(made)
    from .protect import Protected  # which nobody else loads

    return Protected(made, update, seed)


def _build_peer(name, params, r, options, net):
    check_choice("--optimizer", name, OPTIMIZER_NAMES)
    peer = PEER_OPTIMIZERS[name]
    how = r.update, r.kahan, r.master
    if how != TO_NEAREST or peer.codes is None and r.coded:
        flags = "drop --stochastic, --kahan, --master, --opt8bit and --opt4bit, which belong to ours"
        published = "--opt8bit --optimizer bitsandbytes is the published one"
        raise Refused(f"--optimizer {name} rounds in its own way: {flags} ({published})")
    if peer.codes is not None and {r.exp_avg, r.exp_avg_sq} != {peer.codes}:
        what = f"--optimizer {name} holds both moments in {peer.codes}"
        raise Refused(f"{what}: add --{FORMATS[peer.codes].flag}")
    if not peer.takes_fp32 and (not r.low_weights or r.islands != "none"):
        raise Refused(f"--optimizer {name} is for bf16 parameters only: add --pure_bf16 and no islands")
    own = {key: value for key, value in options.items() if key not in MOMENTUM_OPTIONS}
    made = peer.make(params, {**PEER_DEFAULTS, **own})
    made.attach(net)
    return made
