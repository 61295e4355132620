"""The choice of an optimiser: ours and other people's by name, and several of them as one."""

import inspect

import torch

from ..errors import Refused
from ..rounding import hash64
from .adafactor import Adafactor
from .adamw import AdamW
from .lion import Lion
from .muon import Muon, hidden_matrices
from .peers import PEERS, Peer
from .rounded import Rounded, own_attributes
from .sgd import SGD

OPTIMIZERS = {"adamw": AdamW, "sgd": SGD, "lion": Lion, "adafactor": Adafactor, "muon": Muon}


def kinds(name):
    """The classes that serve --optimizer `name`, itself first; () for what is none of ours. name: of
    OPTIMIZERS, or a class.
    """
    kind = OPTIMIZERS.get(name) if isinstance(name, str) else name
    if not (isinstance(kind, type) and issubclass(kind, Rounded)):
        return ()
    return (kind, *kinds(kind.others)) if kind.others else (kind,)


def divided(groups, name, net=None):
    """Parameter groups of which each optimiser has what it takes: those of an optimiser with `others` in two.

    name: the optimiser of groups without an `optimizer`. net: tells hidden layers; None: by shape alone.
    """
    found = []
    for group in groups:
        kind = group.get("optimizer", name)
        others = next((k.others for k in kinds(kind)), None)
        if others is None:
            found.append(group)
            continue
        params = [group["params"]] if torch.is_tensor(group["params"]) else list(group["params"])
        hidden = hidden_matrices(params if net is None else net)
        own = [p for p in params if p in hidden]
        rest = [p for p in params if p not in hidden]
        parts = ((own, kind), (rest, others))
        found += [{**group, "params": part, "optimizer": its} for part, its in parts if part]
    return found

NAMES = (*OPTIMIZERS, *PEERS)


class Joined(torch.optim.Optimizer):
    """Several optimisers that answer and step as one: for parameter groups with an `optimizer` of their own.

    param_groups are those of the parts, so torch's schedulers work on them.
    """

    def __init__(self, parts):
        self.parts, self.defaults = parts, {}
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.owner = {p: part for part in parts for group in part.param_groups for p in group["params"]}
        self.coders = {name: coder for part in parts for name, coder in part.coders.items()}
        self.by_recipe = all(part.by_recipe for part in parts)
        self.by_rows = all(part.by_rows for part in parts)

    def __getstate__(self):
        return own_attributes(self)

    def add_param_group(self, param_group):
        if hasattr(self, "owner"):
            whose = "several optimisers step as one here, and a later group belongs to none of them"
            raise Refused(f"{whose}: give all groups at the start")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None, *, grads=None, grad_scale=1.0):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step(grads=grads, grad_scale=grad_scale)
        return loss

    @property
    def state(self):
        return {p: state for part in self.parts for p, state in part.state.items()}

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

    def held(self, p, *pick):
        return self.owner[p].held(p, *pick)

    def moment(self, p, name, *pick):
        return self.owner[p].moment(p, name, *pick)

    def wanted(self, p, g, *pick):
        return self.owner[p].wanted(p, g, *pick)

    def decayed(self, p):
        return self.owner[p].decayed(p)

    def decay(self, p, name):
        return self.owner[p].decay(p, name)

    def coded(self, p, name):
        return self.owner[p].coded(p, name)

    def clear(self, p, name):
        return self.owner[p].clear(p, name)

    def still(self, p):
        return self.owner[p].still(p)

    def announce(self, grads, grad_scale):
        for part in self.parts:
            part.announce(grads, grad_scale)

    def set_exact(self, p, value):
        self.owner[p].set_exact(p, value)

    def nbytes(self):
        total = {}
        for part in self.parts:
            for site, n in part.nbytes().items():
                total[site] = total.get(site, 0) + n
        return total

    def notes(self):
        return {site: note for part in self.parts for site, note in part.notes().items()}

    def attach(self, model):
        for part in self.parts:
            part.attach(model)

    def collect(self):
        for part in self.parts:
            part.collect()

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts], "state": {}, "param_groups": []}

    def load_state_dict(self, state):
        if len(state.get("parts", ())) != len(self.parts):
            wrong = f"optimiser state is not one of {len(self.parts)} joined optimisers"
            raise Refused(f"{wrong}: it was written by another recipe")
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        # a peer's own loader makes its groups anew
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build(name, params, r, *, weight_decay=0.0, seed=0, net=None, away=None, **options):
    """The optimiser of recipe `r`: ours by name, a peer by name as its authors publish it, or a stranger's.

    name: an entry of NAMES, a subclass of Rounded, or a function params -> torch.optim.Optimizer.
    params: parameters, or groups with options of their own, `optimizer` among them. options: lr, betas, eps,
    momentum, nesterov; None or left out: the optimiser's own. net: the module that they belong to, which
    tells hidden layers. away: an offload.Offload for the moments of ours. Raises Refused when the name is
    unknown, the package absent, the peer can't serve the recipe, or no optimiser here has a momentum that was
    given.
    """
    if unknown := set(options) - {*COMMON, *SOME}:
        raise TypeError(f"build() got an unexpected keyword argument '{sorted(unknown)[0]}'")
    options = {key: value for key, value in options.items() if value is not None}
    groups = divided(_groups(params), name, net)
    of_groups = [group.pop("optimizer", name) for group in groups]
    parts, r = [], r.keeping(*of_groups)
    for kind in dict.fromkeys(of_groups):
        own = [group for group, its in zip(groups, of_groups, strict=True) if its == kind]
        # each counts the places of its parameters from 0: another seed, so that no two share noise
        seed_of_part = hash64(seed, len(parts)) if parts else seed
        own_options = {**options, "weight_decay": weight_decay}
        parts.append(_one(kind, own, r, own_options, seed_of_part, away))
    for option in SOME:
        if option in options and not any(option in part.defaults for part in parts):
            theirs = " and ".join(key for key, kind in OPTIMIZERS.items() if option in arguments(kind))
            raise Refused(f"--{option} belongs to --optimizer {theirs}: drop it, or choose one of these")
    return parts[0] if len(parts) == 1 else Joined(parts)


COMMON = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}  # as AdamW has them, for peers
SOME = ("momentum", "nesterov")  # options of some of ours


def arguments(kind):
    """The names of what a class takes."""
    return set(inspect.signature(kind).parameters)


def title(optimizer, name):
    """What the ledger calls the optimiser that was asked for as `name`."""
    if isinstance(optimizer, Joined):
        return " and ".join(title(part, None) for part in optimizer.parts)
    return name if isinstance(name, str) else type(getattr(optimizer, "inner", optimizer)).__name__


def _groups(params):
    params = list(params)
    if params and isinstance(params[0], dict):
        return [dict(group) for group in params]
    return [{"params": params}]


def _one(name, params, r, options, seed, away=None):
    if kinds(name):
        own = kinds(name)[0]
        writing = dict(update=r.update, kahan=r.kahan == "on", master=r.master, seed=seed)
        writing.update({} if away is None else {"away": away})
        writing["kinds"] = {moment: r[moment] for moment in own.moments if moment in r.values}
        writing.update((site, r[site]) for site in own.sites if site not in own.moments)
        for option in {"betas", "eps", *SOME} - arguments(own):
            options.pop(option, None)  # Lion has no eps, SGD neither
        return own(params, **options, **writing)
    options = {**COMMON, **{key: value for key, value in options.items() if key not in SOME}}
    rounds_itself = r.update == "stochastic" or r.kahan == "on" or r.master != "none"
    if not isinstance(name, str):
        if rounds_itself or r.coded:
            ours = "stochastic, kahan, master and moments in codes belong to ours"
            raise Refused(f"this optimiser rounds in its own way: {ours}")
        made = name(params)
        closure = inspect.signature(type(made).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise Refused(f"{title(made, None)} asks for a closure at each step, and step() here has none")
        return made if hasattr(made, "held") else Peer(made)
    if name not in PEERS:
        raise Refused(f"--optimizer {name}: unknown; choose from {', '.join(NAMES)}")
    if rounds_itself:
        flags = "drop --stochastic, --kahan and --master, which belong to ours"
        raise Refused(f"--optimizer {name} rounds in its own way: {flags}")
    if name == "bitsandbytes":
        if (r.exp_avg, r.exp_avg_sq) != ("int8", "int8"):
            what = "--optimizer bitsandbytes is its AdamW8bit, which holds both moments in 8 bits"
            raise Refused(f"{what}: add --opt8bit")
    elif r.coded:
        published = "--opt8bit --optimizer bitsandbytes is the published one"
        raise Refused(f"--opt8bit and --opt4bit are ours: drop --optimizer {name} ({published})")
    elif name != "torch" and (not r.low_weights or r.islands != "none"):
        raise Refused(f"--optimizer {name} is for bf16 parameters only: add --pure_bf16 and no islands")
    return PEERS[name].make(params, options)
