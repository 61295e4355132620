"""A net that is spread over ranks by PyTorch's fully_shard, trained with the same bits on any number of them.

    for block in model.blocks:
        fully_shard(block)                       # torch.distributed.fsdp, as you like it
    fully_shard(model)
    run = Precision(model, recipe(pure_bf16=True, stochastic=True), lr=1e-3)   # then as on one GPU

Each rank holds some rows of each parameter (a DTensor, sharded along dim 0), and steps these alone. Rounding
noise is numbered by an entry's place in the whole net, and whether a moment is coded goes by the size of the
whole tensor. So the same gradients give the same bits on 1, 2 and 4 ranks, and on one that spreads nothing.

Codes have a scale for each block of 128 or 256 entries, counted from the start of the whole tensor. Where
rows end within a block, the ranks that share it all hold the moments of the whole block and exchange its
gradients: one all_reduce a step of 1 KiB for each such place. The bits travel as integers, whose sum with
zeros is exact. Needs torch alone; copy it.
"""

import dataclasses

import torch
from torch.utils._pytree import tree_map

from .machine import Refused, first_line
from .optimizers.buckets import Bucket

BLOCK = 256  # entries; a multiple of every format's block

# ---- Where a rank's part lies ------------------------------------------------------------------------------


def is_spread(t):
    """Whether a tensor is a DTensor."""
    return hasattr(t, "device_mesh")


def local(t):
    """A tensor without its graph; of a DTensor this rank's rows."""
    t = t.detach()
    return t.to_local() if is_spread(t) else t


@dataclasses.dataclass(frozen=True)
class Part:
    """Entries `first` to `last` of a tensor of `whole` entries, flat. bounds: where each rank's begin, and
    the end. mesh, placements: as a DTensor has them; dim: of the mesh that spreads it.
    """

    first: int
    last: int
    whole: int
    bounds: tuple
    shape: torch.Size
    mesh: object
    placements: tuple
    dim: int

    @property
    def group(self):
        """The ranks that share the tensor."""
        return self.mesh.get_group(self.dim)

    @property
    def rows(self):
        """The shape of this rank's part."""
        row = self.whole // max(1, self.shape[0])
        return torch.Size((((self.last - self.first) // max(1, row)), *self.shape[1:]))


def part_of(t):
    """The Part of a DTensor; None for another tensor. Raises Refused where it is not made of whole rows."""
    if not is_spread(t):
        return None
    spread = [i for i, placement in enumerate(t.placements) if not placement.is_replicate()]
    plain = len(spread) == 1 and type(t.placements[spread[0]]).__name__ == "Shard"
    if not plain or t.placements[spread[0]].dim != 0 or t.dim() == 0:
        how = ", ".join(map(str, t.placements))
        raise Refused(f"a parameter is spread as ({how}): fully_shard along dim 0 alone, without other plans")
    dim, rows, whole = spread[0], t.shape[0], t.numel()
    ranks = t.device_mesh.size(dim)
    each, row = -(-rows // ranks), whole // max(1, rows)
    bounds = tuple(min(rows, each * rank) * row for rank in range(ranks + 1))
    rank = t.device_mesh.get_local_rank(dim)
    return Part(
        bounds[rank], bounds[rank + 1], whole, bounds, t.shape, t.device_mesh, tuple(t.placements), dim
    )


def gathered(t, part):
    """The whole tensor of which this rank holds `t`, or the tensor itself where part is None. All ranks call
    it.
    """
    if part is None:
        return t
    if t.dtype == torch.int16:  # neither gloo nor NCCL carries it, but its bits
        return gathered(t.view(torch.bfloat16), part).view(torch.int16)
    return as_dtensor(t, part).full_tensor()


def as_dtensor(t, part):
    """The DTensor of which this rank holds `t`; it shares its memory."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(part.shape, device="meta").stride()
    rows = t.view(part.rows)
    return DTensor.from_local(
        rows, part.mesh, part.placements, run_check=False, shape=part.shape, stride=stride
    )


# ---- Buckets -----------------------------------------------------------------------------------------------


class Rows(Bucket):
    """This rank's part of one parameter as a bucket, with the rest of the blocks of codes that it shares.

    start: of the bucket in which the parameter would lie on one rank; ahead: entries before it there. block:
    entries that stay together, 1 where nothing is coded.
    """

    def __init__(self, index, tensor, start, ahead, block):
        self.indices, self.part = [index], part_of(tensor)
        first, last, whole = self.part.first, self.part.last, self.part.whole
        self.own = last - first
        self.first = first // block * block if self.own else first
        self.numel = min(-(-last // block) * block, whole) - self.first if self.own else 0
        self.skip = first - self.first  # entries of other ranks that come before this one's
        self.start, self.ahead, self.block, self.edges = start, ahead + self.first, block, None

    @property
    def shared(self):
        """The numbers of the blocks that two ranks or more share: the same list on every rank."""
        inner = {bound for bound in self.part.bounds[1:-1] if bound < self.part.whole}
        return sorted({bound // self.block for bound in inner if bound % self.block})

    def gather(self, tensors):
        flat = local(tensors[0]).reshape(-1)
        if flat.numel() == self.numel:
            return flat
        whole = flat.new_zeros(self.numel)
        whole[self.skip : self.skip + self.own] = flat
        return whole

    def gather_gradients(self, tensors):
        flat = self.gather(tensors)
        if self.edges is not None and self.numel > self.own:
            before, after = self.edges
            flat[: self.skip], flat[self.skip + self.own :] = before, after
            self.edges = None
        return flat

    def scatter(self, flat, tensors):
        (view,), own = self.views(flat, tensors), local(tensors[0])
        if view.data_ptr() != own.data_ptr():
            own.copy_(view)

    def views(self, flat, tensors):
        return [flat[self.skip : self.skip + self.own].view(self.part.rows)]

    def length(self, n):
        return self.numel if n else 0

    def rows(self, size=None):
        if not self.numel:
            return []
        found, end, size = [], self.ahead + self.numel, size or self.ahead + self.numel
        for at in range(self.ahead // size * size, end, size):  # as the whole tensor is cut
            first = max(at, self.ahead)
            found.append((first - self.ahead, min(at + size, end) - self.ahead, self.start + at, first - at))
        return found


def grouped(tensors, keys, block_of=lambda t: 1):
    """As Bucket.group; a tensor that is spread has a bucket of its own, which numbers its entries as one rank
    would. block_of: tensor -> entries of a block of its codes, 1 for none.
    """
    found = []
    for bucket in Bucket.group(tensors, keys):
        if not is_spread(tensors[bucket.indices[0]]):
            found.append(bucket)
            continue
        ahead = 0
        for i in bucket.indices:
            found.append(Rows(i, tensors[i], bucket.start, ahead, block_of(tensors[i])))
            ahead += tensors[i].numel()
    return found


def exchange(buckets, grad_of):
    """Give each bucket the gradients of the entries that it shares with other ranks, as its `edges`."""
    shared = [bucket for bucket in buckets if isinstance(bucket, Rows) and bucket.shared]
    groups = {}
    for bucket in shared:
        groups.setdefault(bucket.part.group, []).append(bucket)
    for group, members in groups.items():
        device = local(members[0].params[0]).device
        places = [(bucket, number) for bucket in members for number in bucket.shared]
        bits = torch.zeros(len(places), BLOCK, dtype=torch.int32, device=device)
        for row, (bucket, number) in zip(bits, places, strict=True):
            first, start = bucket.part.first, number * BLOCK
            a, b = max(first, start), min(bucket.part.last, start + BLOCK)
            if a < b:
                g = local(grad_of(bucket.params[0])).reshape(-1)[a - first : b - first]
                row[a - start : b - start] = g.float().view(torch.int32)
        torch.distributed.all_reduce(bits, group=group)
        values = dict(zip(places, bits.view(torch.float32), strict=True))
        for bucket in members:
            first, last = bucket.part.first, bucket.part.last
            before = after = bits.new_zeros(0).float()
            if bucket.skip:
                before = values[bucket, first // BLOCK][: bucket.skip]
            if bucket.first + bucket.numel > last:
                at = last % BLOCK
                after = values[bucket, last // BLOCK][at : at + bucket.first + bucket.numel - last]
            bucket.edges = before, after


# ---- Numbers of all ranks ----------------------------------------------------------------------------------


class Over:
    """The ranks over which a net's parameters are spread, and what they do together: each method is called
    by all of them. main: whether this rank gathers and speaks.
    """

    def __init__(self, named):
        self.parts = {p: part_of(p) for _, p in named}
        self.part_of_name = {name: self.parts[p] for name, p in named}
        first = next(part for part in self.parts.values() if part is not None)
        self.group, self.device = first.group, local(named[0][1]).device
        self.ranks, self.main = len(first.bounds) - 1, torch.distributed.get_rank() == 0

    @staticmethod
    def of(net):
        """The ranks of a net; None where nothing is spread."""
        named = list(net.named_parameters(remove_duplicate=False))  # tied weights have several names
        return Over(named) if any(is_spread(p) for _, p in named) else None

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
        norms = zip(grads, total.sqrt().float(), squares.sqrt().float(), strict=True)
        # what is not spread is alike on all ranks
        return {p: own if self.parts[p] is None else whole for p, whole, own in norms}

    # -- weights

    def gathered(self, values):
        """{name: whole tensor} on the first rank, on the CPU; {} on the others. values: {name: a DTensor, a
        part of a parameter of this name, or a whole tensor}.
        """
        found = {}
        for name, t in values.items():
            part = self.part_of_name.get(name)
            whole = gathered(local(t), part if part is not None else part_of(t))
            if self.main:
                found[name] = whole.cpu()
        return found

    def copy(self, build, values):
        """A net made by `build` that holds the whole tensors `values`, on the first rank; None on others."""
        if build is None:
            none = "a model that fully_shard has spread can't be copied: give Precision blank=, which builds"
            raise Refused(f"{none} it anew, or load run.weights() into one")
        if not self.main:
            return None
        with torch.random.fork_rng(devices=[]):
            net = build()
        net.load_state_dict(values)
        return net.to(self.device)

    # -- states

    def wrapped(self, state, averages):
        """The state_dict of a run with DTensors in place of this rank's parts of averages; an optimiser's are
        wrapped already.
        """
        found = {}
        for average in averages.values():
            for name, p in zip(average.names, average.params, strict=True):
                if self.parts[p] is not None:
                    found[id(average.shadow[name])] = as_dtensor(average.shadow[name], self.parts[p])
        return tree_map(lambda t: found.get(id(t), t), state)

    def cut(self, state, held):
        """A saved state_dict, of DTensors and Chunks or of whole tensors, as this rank holds it: `held`."""
        found = cut(state, held)
        for name, t in held["model"].items():  # a module takes DTensors
            if is_spread(t) and name in found["model"]:
                found["model"][name] = as_dtensor(found["model"][name].to(t.device, t.dtype), part_of(t))
        return found


def wrapped_states(optimizer, state):
    """The state_dict of an optim.Rounded with DTensors and Chunks in place of this rank's rows, as
    torch.distributed.checkpoint takes them: plain tensors would be those of one rank for all.
    """
    found = {}
    for p, bucket in optimizer.rows_of.items():
        for name, t in optimizer.state[p].items():
            if name != "step":
                sizes = optimizer.coded_sizes(p, name)
                found[id(t)] = chunk(t, bucket, sizes) if sizes else as_dtensor(t, bucket.part)
    return tree_map(lambda t: found.get(id(t), t), state)


def cut(saved, held):
    """A saved state, of DTensors and Chunks or of whole tensors, as this rank holds it: `held`. What is cut
    already stays.
    """
    if isinstance(saved, dict):
        held = held if isinstance(held, dict) else {}
        named = {}
        for key, t in saved.items():  # torch.distributed.checkpoint puts some of it under texts for numbers
            old = named.get(_key(key, held))
            named[_key(key, held)] = {**old, **t} if isinstance(old, dict) else t
        return {key: cut(t, held.get(key)) for key, t in named.items()}
    if isinstance(saved, list) and isinstance(held, list) and len(saved) == len(held):
        return [cut(*pair) for pair in zip(saved, held, strict=True)]
    if isinstance(saved, Chunk):
        return saved.tensor
    if not torch.is_tensor(saved):
        return saved
    if is_spread(saved):
        return local(saved)
    if isinstance(held, Chunk) and saved.numel() == held.tensor.numel():
        return saved
    if isinstance(held, Chunk):
        return saved.reshape(-1)[held.first : held.first + held.tensor.numel()]
    part = part_of(held) if torch.is_tensor(held) else None
    if part is None or saved.shape != part.shape:
        return saved
    return saved.reshape(-1)[part.first : part.last].view(part.rows)


def _key(key, held):
    number = isinstance(key, str) and key.isdigit() and int(key) in held
    return int(key) if number and key not in held else key


def check(r, *, compiled=False, grad_release=False, average_on="device", states_on="device"):
    """Raise Refused for what a net that is spread, or is to be, can't be trained with. r: the Recipe."""
    rows = "a rank of fully_shard (--fsdp) has rows of them"
    hooks = "torch's compiler stops at each hook of fully_shard, so little is compiled"
    for wrong, said in (
        (r.fp8, f"--fp8 needs whole tensors, and {rows}: use --bf16 or --pure_bf16 --stochastic"),
        (r.sparse24 != "none", f"--sparse24 needs whole tensors, and {rows}: leave one of the two out"),
        (r.quantises, f"--set generation={r.generation} needs whole tensors, and {rows}: leave one out"),
        (
            r.reduce_update == "stochastic",
            "--set reduce_update=stochastic: fully_shard (--fsdp) reduces in its own way; leave it out",
        ),
        (compiled, f"--compile with --fsdp: {hooks}; leave one of them out"),
        (grad_release, "--grad_release frees gradients that fully_shard (--fsdp) is to sum: leave one out"),
        (average_on == "cpu", "--average_on cpu and fully_shard (--fsdp) don't go together: leave one out"),
        (states_on != "device", "--states_on cpu and fully_shard (--fsdp) don't go together: leave one out"),
    ):
        if wrong:
            raise Refused(said)


def check_optimizer(run):
    """The same of the optimiser of a Precision."""
    for part in getattr(run.optimizer, "parts", [run.optimizer]):
        if not part.by_rows:
            raise Refused(whole_alone(type(part).__name__ if part.by_recipe else run.optimizer_name))


def whole_alone(name):
    """What is said of an optimiser that takes no part of a tensor."""
    rows = "steps no rows of a tensor, and a rank of fully_shard (--fsdp) has these alone"
    return f"{name} {rows}: use adamw, sgd or lion of ours"


# ---- Spreading a net ---------------------------------------------------------------------------------------


def spread(net, r, device, blocks=(), apart=()):
    """fully_shard each of the blocks, then the rest of a net, over all ranks, in place; returns it.

    r: the Recipe, which says what is computed and reduced in. blocks: modules whose weights are gathered one
    after another. apart: modules whose weights have another dtype than the others'. Raises Refused for a net
    that can't be spread.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    options = dict(mesh=mesh, mp_policy=policy(r))
    # autocast gives these 16-bit inputs and reads their gains in fp32, beside fp32 statistics
    exact = keeping_statistics(net) if policy_dtype(r) else []
    exact_options = dict(mesh=mesh, mp_policy=dataclasses.replace(policy(r), param_dtype=None))
    try:
        for module in [*exact, *apart, *_callable(blocks)]:
            if next(module.parameters(), None) is not None and not hasattr(module, "reshard"):
                fully_shard(module, **(exact_options if module in exact else options))
        fully_shard(net, **options)
    except (ValueError, AssertionError, NotImplementedError) as error:
        said = first_line(error)
        raise Refused(f"--fsdp can't spread this net ({said}): train it without --fsdp") from None
    return net.to(device)


def policy(r):
    """The MixedPrecisionPolicy of a recipe.

    fp32 weights that autocast reads in bf16 or fp16 are gathered in that dtype: half the bytes. So gains of
    norms without running statistics are read in 16 bits too; they are held and stepped in fp32. bf16 weights
    travel as they are.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # inputs are cast by the recipe alone: timesteps stay as they are
    options = dict(reduce_dtype=r.dtype("reduce"), cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=policy_dtype(r), **options)


def policy_note(r):
    """What is lost by that, a line, or None."""
    if not policy_dtype(r):
        return None
    but = "gains of norms, but those with running statistics, are read so too, and stepped in fp32"
    return f"--fsdp gathers weights in {r.compute}: {but}"


def policy_dtype(r):
    """The dtype in which fp32 weights are gathered; None for their own."""
    return r.dtype("compute") if r.compute in ("bf16", "fp16") and not r.low_weights else None


def _callable(blocks):
    """Modules that are called; a list of modules in a list is none."""
    for block in blocks:
        if isinstance(block, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _callable(block.children())
        else:
            yield block


def keeping_statistics(net):
    """The norms of a net that have running statistics."""
    return [m for m in net.modules() if getattr(m, "running_mean", None) is not None]


def share_buffers(net):
    """Let floating buffers that training changes (running statistics) be those of the first rank at each
    forward, as DistributedDataParallel does.
    """
    own = keeping_statistics(net)

    def from_first(module, args):
        if module.training and torch.is_grad_enabled():
            for m in own:
                for b in m.buffers(recurse=False):
                    torch.distributed.broadcast(b, 0)

    if own:
        net.register_forward_pre_hook(from_first)


# ---- States ------------------------------------------------------------------------------------------------


class Chunk(torch.Tensor):
    """This rank's part of the codes or scales of a moment, as torch.distributed.checkpoint saves and loads
    it: a flat tensor of `whole` values of which `tensor` holds those from `first` on. A block that ranks
    share is written by one of them: write says which values are this one's.

    whole_shape: that the tensor has on one rank.
    """

    @staticmethod
    def __new__(cls, tensor, first, whole, write, whole_shape):
        made = torch.Tensor._make_wrapper_subclass(cls, (whole,), dtype=tensor.dtype, device=tensor.device)
        made.tensor, made.first, made.whole, made.write = tensor, first, whole, write
        made.whole_shape = whole_shape
        return made

    def __repr__(self):
        return f"Chunk({self.first} to {self.first + self.tensor.numel()} of {self.whole})"

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        if call is torch.ops.aten.detach.default:
            (made,) = args
            return cls(made.tensor, made.first, made.whole, made.write, made.whole_shape)
        raise TypeError(f"a Chunk is to be saved and loaded, not computed with ({call})")

    @staticmethod
    def _stored(first, last):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size([first]), torch.Size([last - first]))

    def __create_write_items__(self, name, _):
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        first, last = self.write
        if first >= last:
            return []
        data = TensorWriteData(
            chunk=self._stored(first, last),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=torch.Size([self.whole]),
        )
        index = MetadataIndex(name, torch.Size([first]))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self):
        n = self.tensor.numel()
        return [self._stored(self.first, self.first + n)] if n else []

    def __get_tensor_shard__(self, index):
        # both end where the part ends; what is written begins with the first block that is this rank's
        return self.tensor[index.offset[0] - self.first :] if index.offset else self.tensor


def chunk(t, bucket, sizes):
    """The Chunk of the codes or the scales `t` (flat) of a moment in a bucket of `Rows`.

    sizes: n -> how many of them n entries have.
    """
    part = bucket.part
    first, whole = sizes(bucket.first) if bucket.own else sizes(part.whole), sizes(part.whole)
    # a block that ranks share is written by the first of them
    write = tuple(sizes(min(-(-at // BLOCK) * BLOCK, part.whole)) for at in (part.first, part.last))
    shape = part.shape if whole == part.whole else torch.Size([whole])
    return Chunk(t, first, whole, write, shape)
