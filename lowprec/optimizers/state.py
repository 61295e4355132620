"""States of an optimiser whose parameters are spread over ranks, saved and loaded."""

import torch
from torch.utils._pytree import tree_map

from .buckets import BLOCK, as_dtensor, is_spread, local, part_of


def wrapped_states(optimizer, state):
    """The state_dict of an Rounded with DTensors and Chunks in place of this rank's rows, as
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
