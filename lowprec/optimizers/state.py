"""The state of an optimiser: how moments lie in buckets, how they are saved and loaded, and how
torch.distributed.checkpoint takes those of tensors that are spread over ranks.
"""

import copy

import torch
from torch.utils._pytree import tree_map

from ..errors import Refused
from ..formats import Coded
from ..kernels import choose
from .buckets import ENTRIES_A_BLOCK, Bucket, RankBucket, as_dtensor, is_spread, local_tensor, part_of
from .groups import check_groups

# what completes a weight, and its site
SITE_OF_LOW_PART = {"compensation": "kahan", "remainder": "master", "master": "master"}
DTYPE_OF_REMAINDER = {"split": torch.int16, "split8": torch.int8}


def low_of(state):
    """What completes the weights of this state, {name: tensor}; None where nothing does."""
    for name in SITE_OF_LOW_PART:
        if name in state:
            return state[name]
    return None


def own_attributes(optimizer):
    """What a copy of an optimiser takes along: all but hooks and a scheduler's `step`, which are bound to the
    original. torch's own __getstate__ keeps three attributes alone.
    """
    kept = {}
    for name, value in vars(optimizer).items():
        if name != "step" and not name.startswith("_optimizer_"):
            kept[name] = value
    return kept


# ---- Layout ------------------------------------------------------------------------------------------------


class KeptState:
    """The part of `Rounded` that keeps its state. A bucket has one flat tensor for each moment and low part,
    and `state[p]` views of it. A moment in codes is two tensors, `name` and `name_scale`.
    """

    def size(self, p, name):
        """How many values the moment of p has; 0 where it keeps none."""
        return p.numel()

    def is_signed(self, name):
        """Whether the values of a moment may be negative."""
        return self.signed.get(name, True)

    def coded_names(self, p):
        """The moments of p that are held in codes."""
        return [name for name, coder in self.coders.items() if coder.takes(self.size(p, name))]

    def bucket_key(self, i, p):
        """Parameters of equal keys may share a bucket. i: number of p in its group."""
        coded = self.coded_names(p)
        # blocks of codes must not cross from one tensor into the next: a coded tensor that ends within a
        # block gets a bucket of its own
        alone = i if coded and p.numel() % ENTRIES_A_BLOCK else None
        return p.dtype, p.device, *coded, alone

    def new_state(self, bucket):
        """{name: flat tensor} of zeros for a bucket; a master begins as the weights."""
        first, state = bucket.params[0], {}
        home = first.device if self.away is None else self.away.home
        coded = self.coded_names(first)
        for name, dtype in self.dtypes.items():
            values = sum(self.size(p, name) for p in bucket.params)
            n = bucket.length(values)
            if name in coded:
                state[name], state[f"{name}_scale"] = self.coders[name].new(n, home)
            elif n or isinstance(bucket, RankBucket):
                state[name] = torch.zeros(n, dtype=dtype, device=home)
        if self.away is not None:
            state = self.away.keep(state)
        if first.dtype != torch.bfloat16:
            return state
        if self.kahan:
            state["compensation"] = torch.zeros(bucket.numel, dtype=torch.bfloat16, device=first.device)
        elif self.master in DTYPE_OF_REMAINDER:
            dtype = DTYPE_OF_REMAINDER[self.master]
            state["remainder"] = torch.zeros(bucket.numel, dtype=dtype, device=first.device)
        elif self.master == "fp32":
            state["master"] = bucket.gather([local_tensor(p) for p in bucket.params]).float()
        return state

    def share_state(self, bucket):
        """Give each parameter its views of the bucket's state."""
        for name, flat in bucket.state.items():
            for p, view in zip(bucket.params, self.state_views(name, flat, bucket), strict=True):
                self.state[p][name] = view

    def state_views(self, name, flat, bucket):
        """Views of a bucket's flat state, one a parameter: in its shape, packed codes and scales flat."""
        moment = name.removesuffix("_scale")
        if isinstance(bucket, RankBucket) and f"{moment}_scale" in bucket.state:
            return [flat]
        if flat.numel() == bucket.numel:
            return bucket.views(flat, bucket.params)
        lengths = [self._code_count(name, self.size(p, moment)) for p in bucket.params]
        return flat.split(lengths)

    def _code_count(self, name, n):
        """How many values the state `name`, codes or their scales, has for a moment of n values."""
        codes, scales = self.coders[name.removesuffix("_scale")].sizes(n)
        return scales if name.endswith("_scale") else codes

    def coded_sizes(self, p, name):
        """A function, entries of p -> how many values the state `name` has for them, where it is codes or
        their scales; else None.
        """
        moment = name.removesuffix("_scale")
        if moment not in self.coders or not self.coded(p, moment):
            return None
        return lambda n: self._code_count(name, n)

    def state_part(self, name, t, start, end):
        """Values start to end of a flat state."""
        coder = self.coders.get(name.removesuffix("_scale"))
        if name.endswith("_scale"):
            return t[start // coder.block : -(-end // coder.block)]
        if coder is None or t.dtype == torch.float32:  # a small tensor's moment stays fp32
            return t[start:end]
        return t[start * coder.bits // 8 : -(-end * coder.bits // 8)]

    def held_moment(self, name, state, key=None):
        """A moment as it is held: a tensor, or Coded, to be written by the noise of `key`."""
        if f"{name}_scale" not in state:
            return state[name]
        codes, scales = state[name].view(-1), state[f"{name}_scale"].view(-1)
        return Coded(self.coders[name], codes, scales, self.is_signed(name), key)

    def moment_values(self, name, state, n):
        """A moment as a tensor: as it is held, or the fp32 [n] that its codes stand for."""
        held = self.held_moment(name, state)
        return held.decoded(n, self.compiled) if choose.is_coded(held) else held

    def tensor_by_tensor(self, bucket):
        """A bucket for each parameter of one, with the same noise: that depends on the position alone."""
        found, start = [], bucket.start
        for p in bucket.params:
            alone = Bucket([0], [p], start)
            alone.params = [p]
            alone.state = {}
            for name, t in self.state[p].items():
                if name != "step":
                    alone.state[name] = t.view(-1)
            found.append(alone)
            start += p.numel()
        return found

    def __getstate__(self):
        return own_attributes(self)

    def __setstate__(self, state):
        super().__setstate__(state)
        if "_buckets" in state and self.away is None:
            for _, bucket in self._buckets:
                self.share_state(bucket)  # plain pickle makes a tensor of its own of each view

    # -- save and load

    def state_dict(self):
        if self.away is not None:
            self.away.settle()
        state = super().state_dict()
        if self.rank_buckets:
            state = wrapped_states(self, state)
        if self.coders:
            state = {**state, "codes": self._formats()}
        if self.by_noise:  # what `compare` can't see in a moment
            state = {**state, "rounded": "stochastic"}
        return state

    def _formats(self):
        return {name: coder.name for name, coder in self.coders.items()}

    def load_state_dict(self, state_dict):
        """Take a state_dict of the same recipe, or of torch's AdamW where states are fp32. Raises Refused for
        one of another model or recipe.

        torch's own loader casts floating states to the parameter's dtype: fp32 moments of bf16 weights would
        come back in bf16.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if self.away is not None:
            self.away.settle()
        if self.rank_buckets:
            state_dict = cut(state_dict, self.state_dict())
        groups = state_dict["param_groups"]
        check_groups(groups, self)
        self._check_formats(state_dict)
        states, options = [], []
        for group, saved in zip(self.param_groups, groups, strict=True):
            options.append({**copy.deepcopy(saved), "params": group["params"]})
            self.check_group({**group, **options[-1]})
            for p, i in zip(group["params"], saved["params"], strict=True):
                states.append((p, self._checked(p, state_dict["state"].get(i, {}))))
        for p, state in states:  # from here on nothing is refused: half a state would be neither
            self._take(p, state)
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _check_formats(self, state_dict):
        own = self._formats()
        # format 1 of checkpoints does not tell: it had these two, of other shapes; all codes of 8 bits have
        # the same
        untold = {name: kind for name, kind in own.items() if kind in ("int8", "int4")}
        theirs = state_dict.get("codes", untold)
        if theirs != own:
            said = ", ".join(f"{name} in {kind}" for name, kind in theirs.items()) or "no codes"
            raise Refused(f"optimiser state with {said}: it was written by another model or recipe")

    def _checked(self, p, saved):
        """A saved state of p, its moments in codes where p's are; {} of a parameter without a step."""
        saved, state = dict(saved), self.state[p]
        if not saved and low_of(state) is None:  # torch keeps nothing of a parameter without a step
            return {}
        for name in self.coded_names(p):
            self._encode_old(p, name, saved)
        if shapes_of(saved) != shapes_of(state):
            wrong = "optimiser state has other shapes or dtypes than this recipe"
            raise Refused(f"{wrong}: it was written by another model or recipe")
        return saved

    def _take(self, p, saved):
        """Copy a state that was checked."""
        state = self.state[p]
        for name in state.keys() - {"step"}:
            if saved:
                state[name].copy_(saved[name])
            else:
                state[name].zero_()
        state["step"] = int(saved["step"]) if saved else 0

    def _encode_old(self, p, name, saved):
        """Encode a moment that was saved in fp32, before codes took any length."""
        coder, old = self.coders[name], saved.get(name)
        was_plain = torch.is_tensor(old) and (old.shape, old.dtype) == (p.shape, torch.float32)
        if was_plain and p not in self.rank_buckets and coder.stayed(p.numel()):
            codes, scales = coder.new(p.numel(), old.device)
            coder.encode(old.float().flatten(), codes, scales, self.is_signed(name))
            saved[name], saved[f"{name}_scale"] = codes, scales


def shapes_of(state):
    """{name: (shape, dtype)} of the tensors of a parameter's state."""
    return {name: (t.shape, t.dtype) for name, t in state.items() if name != "step"}


# ---- Spread over ranks -------------------------------------------------------------------------------------


def wrapped_states(optimizer, state):
    """The state_dict of a Rounded with DTensors and Chunks in place of this rank's rows, as
    torch.distributed.checkpoint takes them: plain tensors would be those of one rank for all.
    """
    found = {}
    for p, bucket in optimizer.rank_buckets.items():
        for name, t in optimizer.state[p].items():
            if name == "step":
                continue
            sizes = optimizer.coded_sizes(p, name)
            if sizes is None:
                found[id(t)] = as_dtensor(t, bucket.part)
            else:
                found[id(t)] = chunk(t, bucket, sizes)
    return tree_map(lambda t: found.get(id(t), t), state)


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
