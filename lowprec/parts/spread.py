"""The optimiser's state of a net that PyTorch's fully_shard has spread over ranks: which rows are ours.

Each rank holds some rows of each parameter (a DTensor, sharded along dim 0) and steps these alone. A tensor
that is spread is a bucket of its own, which numbers its entries as one rank would: so the same gradients give
the same bits on any number of ranks. Ranks share a block of codes where a block crosses from one to the next,
and each steps all of it. Checkpoints hold DTensors, and Chunks of codes.
"""

import dataclasses
import functools

import torch
from torch.utils._pytree import tree_map

from ..errors import Refused
from ..optimizers.buckets import ENTRIES_A_BLOCK, Bucket, Rows, is_spread, local_tensor

# ---- The rows of a rank ------------------------------------------------------------------------------------


class RankRows(Rows):
    """The rows of this rank."""

    def buckets(self, tensors, keys, blocks=None):
        found = []
        for bucket in Bucket.group(tensors, keys):
            if not is_spread(tensors[bucket.indices[0]]):
                found.append(bucket)
                continue
            ahead = 0
            for i in bucket.indices:
                block = 1 if blocks is None else blocks[i]
                found.append(RankBucket(i, tensors, bucket.start, ahead, block))
                ahead += tensors[i].numel()
        return found

    @property
    def before_step(self):
        return (exchange,)

    def wrap(self, state, optimizer):
        """DTensors and Chunks in place of this rank's rows, as torch.distributed.checkpoint takes them: plain
        tensors would be those of one rank for all.
        """
        found = {}
        for bucket in optimizer.begun():
            if isinstance(bucket, RankBucket):
                (p,) = bucket.params
                for name, t in wrapped_state(bucket).items():
                    found[id(optimizer.state[p][name])] = t
        return tree_map(lambda t: found.get(id(t), t), state)

    def cut(self, saved, own):
        return cut(saved, own())


RANK = RankRows()


def wrapped_state(bucket):
    """{name in a checkpoint: DTensor or Chunk} of a RankBucket."""
    (held,), (views,) = bucket.of_each()
    found = {name: as_dtensor(t, bucket.part) for name, t in views.items() if t.shape == bucket.part.rows}
    for name, own in held.items():
        if own.keyed:
            for place, (suffix, t) in enumerate(own.tensors().items()):
                sizes = functools.partial(_size, own.coder, place)
                found[name + suffix] = chunk(t, bucket, sizes)
    return found


def _size(coder, place, n):
    """How many codes, or scales, n entries have."""
    return coder.sizes(n)[place]


@dataclasses.dataclass(frozen=True)
class RankPart:
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
    """The RankPart of a DTensor; None for another tensor. Raises Refused where it is not made of whole rows.
    """
    if not is_spread(t):
        return None
    spread = [i for i, placement in enumerate(t.placements) if not placement.is_replicate()]
    plain = len(spread) == 1 and type(t.placements[spread[0]]).__name__ == "Shard"
    if not plain or t.placements[spread[0]].dim != 0 or t.dim() == 0:
        how = ", ".join(map(str, t.placements))
        raise Refused(f"a parameter is spread as ({how}): fully_shard along dim 0 alone, without other plans")
    dim = spread[0]
    rows = t.shape[0]
    ranks = t.device_mesh.size(dim)
    rows_each = -(-rows // ranks)
    entries = t.numel() // max(1, rows)  # of a row
    bounds = []
    for rank in range(ranks + 1):
        first_row = min(rows, rows_each * rank)
        bounds.append(first_row * entries)
    rank = t.device_mesh.get_local_rank(dim)
    return RankPart(
        first=bounds[rank],
        last=bounds[rank + 1],
        whole=t.numel(),
        bounds=tuple(bounds),
        shape=t.shape,
        mesh=t.device_mesh,
        placements=tuple(t.placements),
        dim=dim,
    )


def whole_tensor(t, part):
    """The whole tensor of which this rank holds `t`, or the tensor itself where part is None. All ranks call
    it.
    """
    if part is None:
        return t
    if t.dtype == torch.int16:  # neither gloo nor NCCL carries it, but its bits
        return whole_tensor(t.view(torch.bfloat16), part).view(torch.int16)
    return as_dtensor(t, part).full_tensor()


def as_dtensor(t, part):
    """The DTensor of which this rank holds `t`; it shares its memory."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(part.shape, device="meta").stride()
    rows = t.view(part.rows)
    return DTensor.from_local(
        rows, part.mesh, part.placements, run_check=False, shape=part.shape, stride=stride
    )


class RankBucket(Bucket):
    """This rank's part of one parameter as a bucket, with the rest of the blocks of codes that it shares.

    start: of the bucket in which the parameter would lie on one rank; ahead: entries before it there. block:
    entries that stay together, 1 where nothing is coded.
    """

    def __init__(self, index, tensors, start, ahead, block):
        self.part = part_of(tensors[index])
        super().__init__([index], tensors, start)
        first, last, whole = self.part.first, self.part.last, self.part.whole
        self.own = last - first
        self.first, self.numel = first, 0
        if self.own:
            self.first = first // block * block
            self.numel = min(-(-last // block) * block, whole) - self.first
        self.skip = first - self.first  # entries of other ranks that come before this one's
        self.ahead = ahead + self.first
        self.block = block
        self.edges = None  # gradients of the entries of other ranks, before and after this one's

    @property
    def shared(self):
        """The numbers of the blocks that two ranks or more share: the same list on every rank."""
        found = set()
        for bound in self.part.bounds[1:-1]:
            if bound < self.part.whole and bound % self.block:
                found.add(bound // self.block)
        return sorted(found)

    def gather(self, tensors):
        flat = local_tensor(tensors[0]).reshape(-1)
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
        (view,) = self.views(flat, tensors)
        own = local_tensor(tensors[0])
        if view.data_ptr() != own.data_ptr():
            own.copy_(view)

    def views(self, flat, tensors):
        return [flat[self.skip : self.skip + self.own].view(self.part.rows)]

    @property
    def local_shapes(self):
        return [self.part.rows]

    def views_of_codes(self, codes, lengths):
        return [codes]

    @property
    def whole(self):
        return self.part.whole

    def own_rows(self, values):
        return values if values.numel() == self.own else self.views(values, self.params)[0].flatten()

    def one_by_one(self):
        return [self]

    def rows(self, size=None):
        if not self.numel:
            return []
        end = self.ahead + self.numel
        size = size or end
        found = []
        for at in range(self.ahead // size * size, end, size):  # as the whole tensor is cut
            first = max(at, self.ahead)
            found.append((first - self.ahead, min(at + size, end) - self.ahead, self.start + at, first - at))
        return found


def exchange(buckets, grad_of):
    """Give each bucket the gradients of the entries that it shares with other ranks, as its `edges`."""
    groups = {}
    for bucket in buckets:
        if isinstance(bucket, RankBucket) and bucket.shared:
            groups.setdefault(bucket.part.group, []).append(bucket)
    for group, members in groups.items():
        _exchange_within(group, members, grad_of)


def _exchange_within(group, members, grad_of):
    """As `exchange`, of buckets that are spread over the ranks of one group."""
    places = []  # (bucket, number of a block that it shares)
    for bucket in members:
        places += [(bucket, number) for number in bucket.shared]
    device = local_tensor(members[0].params[0]).device
    bits = torch.zeros(len(places), ENTRIES_A_BLOCK, dtype=torch.int32, device=device)
    for row, (bucket, number) in zip(bits, places, strict=True):
        part, start = bucket.part, number * ENTRIES_A_BLOCK
        a, b = max(part.first, start), min(part.last, start + ENTRIES_A_BLOCK)
        if a < b:
            g = local_tensor(grad_of(bucket.params[0])).reshape(-1)[a - part.first : b - part.first]
            row[a - start : b - start] = g.float().view(torch.int32)
    torch.distributed.all_reduce(bits, group=group)
    values = dict(zip(places, bits.view(torch.float32), strict=True))
    for bucket in members:
        first, last = bucket.part.first, bucket.part.last
        before = after = bits.new_zeros(0).float()
        if bucket.skip:
            before = values[bucket, first // ENTRIES_A_BLOCK][: bucket.skip]
        if bucket.first + bucket.numel > last:
            at = last % ENTRIES_A_BLOCK
            after = values[bucket, last // ENTRIES_A_BLOCK][at : at + bucket.first + bucket.numel - last]
        bucket.edges = before, after


# ---- Checkpoints -------------------------------------------------------------------------------------------


def cut(saved, held):
    """A saved state, of DTensors and Chunks or of whole tensors, as this rank holds it: `held`. What is cut
    already stays.
    """
    if isinstance(saved, dict) and isinstance(held, dict):
        return cut_dict(saved, held)
    if isinstance(saved, dict):
        return cut_dict(saved, {})
    if isinstance(saved, list) and isinstance(held, list) and len(saved) == len(held):
        return [cut(*pair) for pair in zip(saved, held, strict=True)]
    if isinstance(saved, Chunk):
        return saved.tensor
    if torch.is_tensor(saved):
        return cut_tensor(saved, held)
    return saved


def cut_dict(saved, held):
    """As `cut`. torch.distributed.checkpoint puts some of it under texts for numbers."""
    named = {}
    for key, value in saved.items():
        key = _key(key, held)
        old = named.get(key)
        if isinstance(old, dict):
            value = {**old, **value}
        named[key] = value
    found = {}
    for key, value in named.items():
        found[key] = cut(value, held.get(key))
    return found


def cut_tensor(saved, held):
    """As `cut`."""
    if is_spread(saved):
        return local_tensor(saved)
    if isinstance(held, Chunk):
        n = held.tensor.numel()
        if saved.numel() == n:
            return saved
        return saved.reshape(-1)[held.first : held.first + n]
    if not torch.is_tensor(held):
        return saved
    part = part_of(held)
    if part is None or saved.shape != part.shape:
        return saved
    return saved.reshape(-1)[part.first : part.last].view(part.rows)


def _key(key, held):
    is_number = isinstance(key, str) and key.isdigit() and int(key) in held
    if is_number and key not in held:
        return int(key)
    return key


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
        if not index.offset:
            return self.tensor
        # both end where the part ends; what is written begins with the first block that is this rank's
        return self.tensor[index.offset[0] - self.first :]


def chunk(t, bucket, sizes):
    """The Chunk of the codes or the scales `t` (flat) of a moment in a RankBucket.

    sizes: n -> how many of them n entries have.
    """
    part = bucket.part
    whole = sizes(part.whole)
    first = sizes(bucket.first) if bucket.own else whole
    write = []
    for at in (part.first, part.last):  # a block that ranks share is written by the first of them
        end_of_block = min(-(-at // ENTRIES_A_BLOCK) * ENTRIES_A_BLOCK, part.whole)
        write.append(sizes(end_of_block))
    shape = part.shape if whole == part.whole else torch.Size([whole])
    return Chunk(t, first, whole, tuple(write), shape)
