"""Tensors of a step gathered into few flat vectors, and its numbers into two tables."""

import dataclasses

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..errors import Refused

# ---- Buckets -----------------------------------------------------------------------------------------------


class Bucket:
    """Tensors of one dtype and device that a kernel sees as one flat vector: a large one as a view, small
    ones copied together.
    """

    SMALL = 1 << 18  # elements; below it the fixed cost of a call outweighs the copies

    def __init__(self, indices, tensors, start):
        self.indices, self.start = indices, start
        self.numel = sum(tensors[i].numel() for i in indices)

    @staticmethod
    def group(tensors, keys):
        """Buckets such that each holds only equal `keys` (hashables); their order and starts depend on shapes
        alone.
        """
        members, filling = [], {}  # [indices of a bucket]; {key: the last of them that has room}
        filled = {}  # {key: elements in that one}
        for i, t in enumerate(tensors):
            n, key = t.numel(), keys[i]
            if n >= Bucket.SMALL:
                members.append([i])
                continue
            if key not in filling or filled[key] + n > Bucket.SMALL:
                filling[key], filled[key] = [], 0
                members.append(filling[key])
            filling[key].append(i)
            filled[key] += n
        buckets, start = [], 0
        for indices in members:
            buckets.append(Bucket(indices, tensors, start))
            start += buckets[-1].numel
        return buckets

    def gather(self, tensors):
        """Flat [numel]: a view of a single contiguous tensor, else a copy."""
        return tensors[0].reshape(-1) if len(tensors) == 1 else _flatten_dense_tensors(tensors)

    def gather_gradients(self, tensors):
        """As `gather`."""
        return self.gather(tensors)

    def scatter(self, flat, tensors):
        """Copy flat [numel] back, unless it is a view."""
        if len(tensors) > 1 or not tensors[0].is_contiguous():
            torch._foreach_copy_(list(tensors), self.views(flat, tensors))

    def views(self, flat, tensors):
        return _unflatten_dense_tensors(flat, tensors)

    def length(self, n):
        """How many of `n` values of a state are held here: all of them, see RankBucket."""
        return n

    def rows(self, size=None):
        """[(first value, last, position, values of that row that come before)]: what one key of noise is for,
        in parts of `size`. Noise is numbered from the position on.
        """
        size = size or max(1, self.numel)
        found = []
        for first in range(0, self.numel, size):
            found.append((first, min(first + size, self.numel), self.start + first, 0))
        return found


class StepTable:
    """The numbers and noise keys of all kernel calls of a step, as one tensor each: on CUDA two copies a
    step, not two a bucket, and none that waits.
    """

    def __init__(self, device):
        self.device, self.numbers, self.keys = device, [], []

    def add(self, numbers, words):
        """The row that will hold `numbers` and the words of a noise key."""
        self.numbers.append(numbers)
        self.keys.append([*words, 0])  # four words: rows stay aligned to 16 bytes
        return len(self.numbers) - 1

    def fill(self):
        if not self.keys:  # a rank that holds no row of any tensor
            self.add([1.0, 1.0], (0, 0, 0))
        self.all_numbers = self._on_device(torch.tensor(self.numbers, dtype=torch.float32, device="cpu"))
        all_keys = self._on_device(torch.tensor(self.keys, dtype=torch.int32, device="cpu"))
        self.numbers, self.keys = self.all_numbers.unbind(), all_keys.unbind()

    def _on_device(self, t):
        if self.device.type != "cuda":
            return t.to(self.device)
        return t.pin_memory().to(self.device, non_blocking=True)


def scale_of(grad_scale, p):
    """What the gradient of parameter p is multiplied by. grad_scale: of all, or {parameter: of each}."""
    return grad_scale.get(p, 1.0) if isinstance(grad_scale, dict) else grad_scale


# ---- Tensors that are spread over ranks --------------------------------------------------------------------

ENTRIES_A_BLOCK = 256  # entries; a multiple of every format's block


def is_spread(t):
    """Whether a tensor is a DTensor."""
    return hasattr(t, "device_mesh")


def local_tensor(t):
    """A tensor without its graph; of a DTensor this rank's rows."""
    t = t.detach()
    return t.to_local() if is_spread(t) else t


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

    def __init__(self, index, tensor, start, ahead, block):
        self.indices, self.part = [index], part_of(tensor)
        first, last, whole = self.part.first, self.part.last, self.part.whole
        self.own = last - first
        self.first, self.numel = first, 0
        if self.own:
            self.first = first // block * block
            self.numel = min(-(-last // block) * block, whole) - self.first
        self.skip = first - self.first  # entries of other ranks that come before this one's
        self.start, self.ahead = start, ahead + self.first
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

    def length(self, n):
        return self.numel if n else 0

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


def group_tensors(tensors, keys, block_of=lambda t: 1):
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
            found.append(RankBucket(i, tensors[i], bucket.start, ahead, block_of(tensors[i])))
            ahead += tensors[i].numel()
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


def whole_alone(name):
    """What is said of an optimiser that takes no part of a tensor."""
    rows = "steps no rows of a tensor, and a rank of fully_shard (--fsdp) has these alone"
    return f"{name} {rows}: use adamw, sgd or lion of ours"
