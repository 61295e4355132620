import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowprec import machine
from lowprec.kernels import cpu_products

SLOW = [torch.bfloat16, torch.float16]
OLD_CPU, FAST_CPU = ("cpu", None, {"avx2"}), ("cpu", None, {"avx512_bf16"})


@pytest.fixture
def installed():
    """The products in the place of torch's, for one test, on any CPU."""
    before = cpu_products.install_products.cache_info().currsize
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch says that a kernel is replaced: users need not read it
        cpu_products.install_products()
    yield
    if not before:
        take_back()


def take_back():
    cpu_products.install_products()._destroy()
    cpu_products.install_products.cache_clear()


def draw(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


PRODUCTS = {
    "mm": (lambda a, b: a @ b, (5, 7), (7, 3)),
    "bmm": (lambda a, b: a @ b, (2, 5, 7), (2, 7, 3)),
    "mv": (lambda a, b: a @ b, (5, 7), (7,)),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b), (5, 7), (7, 3), (3,)),
    "addmv": (lambda a, b, c: torch.addmv(c, a, b), (5, 7), (7,), (5,)),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5), (2, 5, 7), (2, 7, 3), (2, 5, 3)),
    "linear": (F.linear, (4, 5, 7), (3, 7), (3,)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    "transposed": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (2, 3, 6), (3, 4, 3)),
}


@pytest.mark.parametrize("dtype", SLOW, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_one_of_fp32_rounded_once(installed, name, dtype):
    function, *shapes = PRODUCTS[name]
    low = [draw(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    wide = [value.detach().float().requires_grad_() for value in low]
    with torch.autograd.profiler.profile() as record:
        out = function(*low)
    assert "aten::_to_copy" in [event.name for event in record.function_events]  # else it is torch's own
    expected = function(*wide)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    seed = draw(*out.shape, dtype=dtype)
    gradients = torch.autograd.grad(out, low, seed)
    for gradient, right in zip(gradients, torch.autograd.grad(expected, wide, seed.float()), strict=True):
        assert gradient.dtype == dtype
        assert torch.allclose(gradient.float(), right, rtol=2**-7, atol=2**-7)  # a bias is summed in 16 bits


def test_products_into_a_given_tensor_and_in_compiled_code(installed):
    a, b, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((5, 7), (7, 3), (3,)))
    out = torch.empty(5, 3, dtype=torch.bfloat16)
    assert torch.mm(a, b, out=out) is out
    assert torch.equal(out, (a.float() @ b.float()).bfloat16())
    compiled = torch.compile(lambda: torch.addmm(bias, a, b))
    assert torch.equal(compiled(), torch.addmm(bias.float(), a.float(), b.float()).bfloat16())


@pytest.mark.parametrize("others", [torch.float32, torch.float16])
def test_dtypes_that_differ_are_refused_as_by_torch(installed, others):
    for function, *shapes in PRODUCTS.values():
        first, *rest = (draw(*shape, dtype=torch.bfloat16) for shape in shapes)
        with pytest.raises(RuntimeError, match="dtype|type"):
            function(first.to(others), *rest)


def test_products_of_fp32_keep_their_bits(installed):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
    x = draw(2, 3, 6, 6, dtype=torch.float32)
    net(x).square().sum().backward()
    with_products = [weight.grad.clone() for weight in net.parameters()]
    take_back()
    net.zero_grad()
    net(x).square().sum().backward()
    cpu_products.install_products()
    assert all(map(torch.equal, with_products, [weight.grad for weight in net.parameters()]))


@pytest.mark.parametrize("facts, expected", [(OLD_CPU, True), (FAST_CPU, False)])
def test_only_a_cpu_without_bf16_gets_them(monkeypatch, facts, expected):
    asked = []
    monkeypatch.setattr(cpu_products, "cpu_features", lambda: facts[2])
    monkeypatch.setattr(cpu_products, "install_products", lambda: asked.append(1))
    cpu_products.settle_products(torch.device("cpu"))
    cpu_products.settle_products(torch.device("meta"))
    assert bool(asked) == expected
    assert machine.support(*facts)["bf16"][0] == ("emulated" if expected else "native")
