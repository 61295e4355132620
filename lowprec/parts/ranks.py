"""A net that is spread over ranks by PyTorch's fully_shard, trained with the same bits on any number of them.

    for block in model.blocks:
        fully_shard(block)                       # torch.distributed.fsdp, as you like it
    fully_shard(model)
    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3)   # then as on one GPU
    print(of_a_rank(run, model.blocks))          # what each of 1, 8 and 64 ranks would hold, in a line

Each rank holds some rows of each parameter (a DTensor, sharded along dim 0) and steps these alone. The noise
of an entry goes by its place in the whole net, so the same gradients give the same bits on 1, 2 and 4 ranks.
"""

import dataclasses

import torch
from torch.utils._pytree import tree_map

from ..cast import Cast
from ..errors import Refused, first_line
from ..ledger import MIB, bytes_of_an_average
from ..optimizers.buckets import is_spread, local_tensor, whole_alone
from ..rules import Rule
from ..sites import LOW_PRODUCTS
from .part import Part
from .spread import as_dtensor, cut, part_of, whole_tensor

# what a net that fully_shard has spread can't be trained with: a rank has rows of its tensors alone
SPREAD_RULES = (
    Rule(
        lambda run: run.recipe.compute in LOW_PRODUCTS,
        lambda run: (
            f"--{run.recipe.compute} needs whole tensors, and a rank of fully_shard (--fsdp) has "
            "rows of them: use --bf16 or --pure_bf16 --stochastic"
        ),
    ),
    Rule(
        lambda run: run.recipe.sparse24 != "none",
        "--sparse24 needs whole tensors, and a rank of fully_shard (--fsdp) has rows of them: leave one of "
        "the two out",
    ),
    Rule(
        lambda run: run.recipe.quantises,
        lambda run: (
            f"--set generation={run.recipe.generation} needs whole tensors, and a rank of "
            "fully_shard (--fsdp) has rows of them: leave one out"
        ),
    ),
    Rule(
        lambda run: run.recipe.reduce_update == "stochastic",
        "--set reduce_update=stochastic: fully_shard (--fsdp) reduces in its own way; leave it out",
    ),
    Rule(
        lambda run: run.options.grad_release,
        "--grad_release frees gradients that fully_shard (--fsdp) is to sum: leave one out",
    ),
    Rule(
        lambda run: run.options.average_on == "cpu",
        "--average_on cpu and fully_shard (--fsdp) don't go together: leave one out",
    ),
    Rule(
        lambda run: run.options.states_on != "device",
        "--states_on cpu and fully_shard (--fsdp) don't go together: leave one out",
    ),
)

# ---- Numbers of all ranks ----------------------------------------------------------------------------------


class NetRanks(Part):
    """The ranks over which a net's parameters are spread, and what they do together: all of them call each
    method. count: how many they are. is_first: whether this rank is the one that gathers.

    named: [(name, parameter)] of the net.
    """

    rules = SPREAD_RULES

    def __init__(self, named):
        self.parts = {p: part_of(p) for _, p in named}
        self.part_of_name = {name: self.parts[p] for name, p in named}
        first_part = next(part for part in self.parts.values() if part is not None)
        self.group = first_part.group
        self.count = len(first_part.bounds) - 1
        self.device = local_tensor(named[0][1]).device
        self.is_first = torch.distributed.get_rank() == 0

    @classmethod
    def of(cls, run):
        run.ranks = cls(list(run.model.named_parameters(remove_duplicate=False)))  # tied weights have several
        return run.ranks

    def ready(self, run):
        refuse_whole(run.optimizer, run.optimizer_name)

    def gradients(self, grads):
        """This rank's rows of them."""
        return {p: local_tensor(g) for p, g in grads.items()}

    def rows(self, parameters, generation_dtype):
        rows = f"rows over {self.count} ranks"
        return {"weights": {"why": f"in {rows}, as are gradients, states and averages"}}

    # -- numbers

    def sum(self, number):
        """A number, or a 0-dim tensor, summed over the ranks: 0-dim, float64."""
        total = torch.as_tensor(number, dtype=torch.float64).to(self.device)
        torch.distributed.all_reduce(total, group=self.group)
        return total

    def norms_of(self, grads):
        """{parameter: 2-norm of its whole gradient, fp32, 0-dim}. grads: {parameter: this rank's part}.

        Squares add up in float64, so that rounding to fp32 hides their order: any number of ranks finds the
        same norm, but where it lies within 1e-15 of a boundary. One rank that spreads nothing sums in fp32
        and may differ in the last bits.
        """
        squares = torch.stack(torch._foreach_norm(list(grads.values()), dtype=torch.float64)).square()
        total = squares.clone()
        torch.distributed.all_reduce(total, group=self.group)
        of_all = total.sqrt().float()
        of_this_rank = squares.sqrt().float()
        norms = {}
        for p, whole, own in zip(grads, of_all, of_this_rank, strict=True):
            # what is not spread is alike on all ranks
            norms[p] = own if self.parts[p] is None else whole
        return norms

    # -- weights

    def lasting_parameters(self, net):
        return ()  # fully_shard has others in a step

    def gathered(self, values):
        """{name: whole tensor} on the first rank, on the CPU; {} on the others. values: {name: a DTensor, a
        part of a parameter of this name, or a whole tensor}.
        """
        found = {}
        for name, t in values.items():
            part = self.part_of_name.get(name)
            if part is None:
                part = part_of(t)
            whole = whole_tensor(local_tensor(t), part)
            if self.is_first:
                found[name] = whole.cpu()
        return found

    def copy(self, run, values):
        """A net made by the run's `blank`, of whole tensors, on the first rank; None on the others."""
        build = run.options.blank
        if build is None:
            raise Refused(
                "a model that fully_shard has spread can't be copied: give Precision blank=, which builds it "
                "anew, or load run.weights() into one"
            )
        if not self.is_first:
            return None
        with torch.random.fork_rng(devices=[]):
            net = build()
        net.load_state_dict(values)
        net.to(self.device).requires_grad_(False)
        Cast(net, run.recipe, run.options, frozen=False)
        return net

    # -- states

    def wrapped(self, state, averages):
        """The state_dict of a run with DTensors in place of this rank's parts of averages; an optimiser's are
        wrapped already.
        """
        spread = {}  # id of this rank's part -> its DTensor
        for average in averages.values():
            for name, p in zip(average.names, average.params, strict=True):
                if self.parts[p] is not None:
                    shadow = average.shadow[name]
                    spread[id(shadow)] = as_dtensor(shadow, self.parts[p])
        return tree_map(lambda t: spread.get(id(t), t), state)

    def cut(self, state, run):
        """A saved state_dict, of DTensors and Chunks or of whole tensors, as this rank holds it."""
        held = run.state_dict(bool(state.get("trainable_only")))
        found = cut(state, held)
        for name, t in held["model"].items():  # a module takes DTensors
            if is_spread(t) and name in found["model"]:
                found["model"][name] = as_dtensor(found["model"][name].to(t.device, t.dtype), part_of(t))
        return found


def refuse_whole(optimizer, name):
    """Raise Refused for an optimiser, or one of several joined, that steps no rows of a tensor. name: what
    was asked for.
    """
    for part in getattr(optimizer, "parts", [optimizer]):
        if not part.by_rows:
            raise Refused(whole_alone(type(part).__name__ if part.by_recipe else name))


# ---- What a rank holds -------------------------------------------------------------------------------------

WORLDS_SHOWN = (1, 8, 64)  # numbers of ranks that are told where none is given


def held_by_rank(run, world):
    """{part: bytes} that the first of `world` ranks holds of a Precision that is not spread and may be on the
    meta device. Its rows are the most. Sums of micro-batches count as gradients.
    """
    found = dict.fromkeys(("weights", "grads", "states", "average"), 0.0)
    one_by_one = any(part.frees_gradients for part in run.parts)
    for p in run.params:
        rows = p.shape[0] if p.dim() else 1
        rows_of_first = -(-rows // world)
        share = rows_of_first / max(1, rows)
        found["weights"] += share * p.nbytes
        gradient = share * p.nbytes
        if run.keeps_sums and p.dtype.itemsize < 4:
            gradient += share * 4 * p.numel()
        if one_by_one:
            found["grads"] = max(found["grads"], gradient)
        else:
            found["grads"] += gradient
        states = 0
        for name, t in run.optimizer.state[p].items():
            if name != "step":
                states += t.nbytes
        found["states"] += share * states
        found["average"] += share * bytes_of_an_average(run) * p.numel()
    return found


def gathered_at_once(run, parts):
    """Bytes that a rank has whole at once, at most: the weights and gradients of a block, the weights of the
    next one, which are fetched ahead, and those in no block. parts: the blocks.
    """
    itemsize = 2 if run.recipe.narrow_products else 4
    sizes = []
    for block in parts:
        sizes.append(sum(p.numel() for p in block.parameters()))
    rest = sum(p.numel() for p in run.params) - sum(sizes)
    return itemsize * (3 * max(sizes, default=0) + rest)


def of_a_rank(run, parts, worlds=WORLDS_SHOWN):
    """`held_by_rank` for each number of ranks and `gathered_at_once`, in a line."""
    sizes = []
    for world in worlds:
        total = sum(held_by_rank(run, world).values())
        sizes.append(f"{total / MIB:.1f} MiB as one of {world}")
    at_once = f"and for a moment {gathered_at_once(run, parts) / MIB:.1f} MiB of whole blocks"
    return f"a rank holds, of weights, gradients, states and averages: {', '.join(sizes)}; {at_once}"


# ---- Spreading a net ---------------------------------------------------------------------------------------


def spread_over_ranks(net, r, device, blocks=(), apart=()):
    """fully_shard each of the blocks, then the rest of a net, over all ranks, in place; returns it.

    r: the Recipe, which says what is computed and reduced in. blocks: modules whose weights are gathered one
    after another. apart: modules whose weights have another dtype than the others'. Raises Refused for a net
    that can't be spread.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # autocast gives these 16-bit inputs and reads their gains in fp32, beside fp32 statistics
    exact = norms_with_statistics(net) if policy_dtype(r) else []
    policy_of_exact = dataclasses.replace(policy(r), param_dtype=None)
    try:
        for module in [*exact, *apart, *_callable(blocks)]:
            is_empty = next(module.parameters(), None) is None
            is_spread_already = hasattr(module, "reshard")
            if is_empty or is_spread_already:
                continue
            fully_shard(module, mesh=mesh, mp_policy=policy_of_exact if module in exact else policy(r))
        fully_shard(net, mesh=mesh, mp_policy=policy(r))
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise Refused(
            f"--fsdp can't spread this net ({first_line(error)}): train it without --fsdp"
        ) from None
    return net.to(device)


def policy(r):
    """The MixedPrecisionPolicy of a recipe.

    fp32 weights that autocast reads in bf16 or fp16 are gathered in that dtype: half the bytes. So gains of
    norms without running statistics are read in 16 bits too; they are held and stepped in fp32. bf16 weights
    travel as they are.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=policy_dtype(r),
        reduce_dtype=r.dtype("reduce"),
        cast_forward_inputs=False,  # inputs are cast by the recipe alone: timesteps stay as they are
    )


def policy_note(r):
    """What is lost by that, a line; None where nothing is."""
    if not policy_dtype(r):
        return None
    return (
        f"--fsdp gathers weights in {r.compute}: gains of norms, but those with running statistics, are read "
        "so too, and stepped in fp32"
    )


def policy_dtype(r):
    """The dtype in which fp32 weights are gathered; None for their own."""
    return r.dtype("compute") if r.autocasts else None


def _callable(blocks):
    """Modules that are called; a list of modules in a list is none."""
    for block in blocks:
        if isinstance(block, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _callable(block.children())
        else:
            yield block


def norms_with_statistics(net):
    """The norms of a net that have running statistics."""
    return [module for module in net.modules() if getattr(module, "running_mean", None) is not None]


def share_buffers(net):
    """Let floating buffers that training changes (running statistics) be those of the first rank at each
    forward, as DistributedDataParallel does.
    """
    norms = norms_with_statistics(net)

    def from_first(module, args):
        if not module.training or not torch.is_grad_enabled():
            return
        for norm in norms:
            for buffer in norm.buffers(recurse=False):
                torch.distributed.broadcast(buffer, 0)

    if norms:
        net.register_forward_pre_hook(from_first)
