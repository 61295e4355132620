"""What a net holds, whoever writes it: the dtypes of its tensors, its buffers, values that were rounded."""

import torch

NARROW_DTYPES = (torch.bfloat16, torch.float16)
LAST_WHOLE_NUMBER = {torch.bfloat16: 256, torch.float16: 2048}  # up to which all are held


def dtype_name(dtype):
    """bf16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp16", "bf16")


def has_parameters(module):
    return next(module.parameters(), None) is not None


def rounded_values(values):
    """Whether fp32 [n] all fit into bf16 or fp16, and many of them need more than 5 bits."""
    values = values[values.isfinite() & (values != 0)]
    if values.numel() < 4:
        return False
    exact = values.bfloat16().float() == values
    fits = bool(exact.all()) or bool((values.half().float() == values).all())
    if not fits or bool((values == values.round()).all()):
        return False
    mantissa, _ = torch.frexp(values)
    plain = torch.frac(mantissa * 2**5) == 0
    return float(plain.float().mean()) < 0.75


def floating_buffers(net):
    return [(name, b) for name, b in net.named_buffers() if b.is_floating_point() and b.numel()]
