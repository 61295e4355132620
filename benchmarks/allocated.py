"""How many bytes optimisers hold, and what a step takes on a GPU."""

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def forget_tables(optimizer):
    """Drop the tables of the formats that an optimiser holds its moments in.

    All optimisers share them: after its next step they hold what it needs, and no more.
    """
    for coder in getattr(optimizer, "coders", {}).values():
        getattr(coder, "tables", {}).clear()


def state_bytes(optimizer):
    """Bytes of all tensors in an optimiser's state and tables of codes; shared storage is counted once."""
    tensors = []
    for state in optimizer.state.values():
        tensors += tensors_in(state)
    for coder in getattr(optimizer, "coders", {}).values():
        tensors += getattr(coder, "tables", {}).values()
    sizes = {}
    for t in tensors:
        storage = t.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def tensors_in(state):
    """[plain tensor] of a state.

    It looks into dicts and lists, into classes of tensors that hold others, as torchao's and SDNQ's codes do,
    and into other classes that hold tensors, as FlashOptim's do.
    """
    if torch.is_tensor(state) and not is_traceable_wrapper_subclass(state):
        return [state]
    found = []
    for part in _parts_of(state):
        found += tensors_in(part)
    return found


def _parts_of(state):
    """What lies within something that is no plain tensor."""
    if is_traceable_wrapper_subclass(state):
        names, _ = state.__tensor_flatten__()
        return [getattr(state, name) for name in names]
    if isinstance(state, dict):
        return state.values()
    if isinstance(state, (list, tuple)):
        return state
    return filter(torch.is_tensor, getattr(state, "__dict__", {}).values())


def count_of(params):
    """How many numbers they hold."""
    return sum(p.numel() for p in params)


def bytes_on(device):
    """Bytes that CUDA's allocator holds now; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak_bytes(step, device, before):
    """Bytes that CUDA's allocator held during one step, above `before`.

    None on a CPU: the resident set of a process that holds all recipes says nothing about one of them.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before
