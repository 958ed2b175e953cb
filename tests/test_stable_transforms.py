"""`whynan.stable` under gradcheck, double backward, autocast, torch.compile, torch.func and on a GPU."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
from stable_functions import ALL, ELEMENTWISE, HALF, Pair, uneven, value_and_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from whynan import stable

TANGENTS = [
    Pair("sqrt tangent", torch.sqrt, lambda x: stable.sqrt(x, max_slope=0.7), positive=True),
    Pair("log tangent", torch.log, lambda x: stable.log(x, max_slope=2.0)),
    Pair("pow tangent", torch.sqrt, lambda x: stable.pow(x, 0.5, max_slope=0.7)),
    Pair("acos tangent", torch.acos, lambda x: stable.acos(x, max_slope=1.2)),
    Pair("running", torch.acos, lambda x, y: stable.fraction_of_variance_unexplained(x, y, variance=torch.tensor(2.0)), inputs=2),
    Pair("floor", torch.acos, lambda x, y: stable.fraction_of_variance_unexplained(x, y, floor=2.0), inputs=2),
    Pair("rms_norm weight", torch.acos, lambda x, w: stable.rms_norm(x, w[0], eps=0.1), inputs=2),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> None:
    """The first compilation in a process makes torch replace methods of its optimizers; that is not of these tests."""
    torch.compile(torch.sqrt, backend="eager")(torch.ones(1))


@pytest.mark.parametrize("pair", [*ALL, *TANGENTS], ids=str)
def test_first_and_second_derivatives_agree_with_finite_differences(pair: Pair) -> None:
    inputs = [x.requires_grad_() for x in pair.arguments(torch.float64)]
    if pair.name == "sinkhorn":
        inputs = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(pair.ours, inputs)
    assert torch.autograd.gradgradcheck(pair.ours, inputs)


@pytest.mark.parametrize("pair", [p for p in ALL if p.name in ("sqrt", "pow 0.6", "acos", "asin", "normalize", "cosine_similarity", "div", "log")], ids=str)
def test_the_second_derivative_at_the_edge_is_finite(pair: Pair) -> None:
    inputs = [torch.zeros(2, 3) if pair.name not in ("acos", "asin") else torch.ones(2, 3) for _ in range(pair.inputs)]
    inputs = [x.requires_grad_() for x in inputs]
    first = torch.autograd.grad(pair.ours(*inputs).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g.square().sum() for g in first), torch.zeros(())), inputs, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in second)


@pytest.mark.parametrize("pair", ALL, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_changes_nothing_but_the_precision(pair: Pair, dtype: torch.dtype) -> None:
    check_autocast(pair, dtype, "cpu")


def check_autocast(pair: Pair, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    weight = torch.eye(8, device=device)
    inputs = [x.to(device) for x in pair.arguments()]
    if pair.name in ("div", "pow -2"):
        inputs = [x.abs() + 0.5 for x in inputs]  # 1 / x³ of a small x is beyond float16
    with torch.autocast(device, dtype=dtype):
        value, slopes = value_and_gradients(lambda *xs: pair.ours(*(x @ weight for x in xs)), *inputs)
    exact, exact_slopes = value_and_gradients(pair.ours, *(x.to(dtype).double() for x in inputs))
    for mine, true in zip([value, *slopes], [exact, *exact_slopes], strict=True):
        assert mine.isfinite().all()
        assert (mine.double() - true).abs().max() <= 8 * torch.finfo(dtype).eps * max(1, true.abs().max())


def compiled(backend: str, pairs: list[Pair], device: str = "cpu") -> None:
    """One graph for all of them, each with inputs of its own: tracing is slow. A graph break names its function by itself."""
    torch._dynamo.reset()
    leaves = [[x.to(device).requires_grad_() for x in pair.arguments()] for pair in pairs]
    flat = [x for inputs in leaves for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.compile(lambda leaves: [p.ours(*xs) for p, xs in zip(pairs, leaves, strict=True)], backend=backend, fullgraph=True)(leaves)
        slopes = torch.autograd.grad(unevenly(values), flat)
    plain = [pair.ours(*inputs) for pair, inputs in zip(pairs, leaves, strict=True)]
    for pair, mine, eager in zip(pairs, values, plain, strict=True):
        assert torch.allclose(mine, eager, rtol=1e-5, atol=1e-6), pair.name
    names = [pair.name for pair in pairs for _ in range(pair.inputs)]
    for name, mine, eager in zip(names, slopes, torch.autograd.grad(unevenly(plain), flat), strict=True):
        assert torch.allclose(mine, eager, rtol=1e-5, atol=1e-6), f"gradient of {name}"
        assert eager.abs().max() > 1e-2, f"no gradient to compare in {name}"


def unevenly(values: list[Tensor]) -> Tensor:
    """A sum in which every entry has another weight."""
    return sum((uneven(torch.clone)(v).sum() for v in values), torch.zeros((), device=values[0].device))


def test_every_function_compiles_without_a_graph_break() -> None:
    compiled("aot_eager", [*ALL, *TANGENTS])


# one of each autograd function; the others are operations of torch, which the slow compiler knows
EACH_KIND = ("sqrt", "log", "div", "pow 0.6", "acos", "masked_softmax", "rms_norm")


def each_kind(x: Tensor, y: Tensor) -> Tensor:
    """One number of them all: fewer kernels."""
    pairs = [pair for pair in ALL if pair.name in EACH_KIND]
    return sum((pair.ours(*[x, y][: pair.inputs]).square().sum() for pair in pairs), torch.zeros(()))


def test_functions_of_each_kind_together_compile_with_inductor() -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs g++, which is not here")
    compiled("inductor", [Pair("each kind", each_kind, each_kind, inputs=2, positive=True)])


def test_the_edge_is_the_same_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    scores = torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf], [0.0, 0.0]])

    def edges(x: Tensor) -> Tensor:
        return stable.sqrt(x * 0).sum() + stable.log(x * 0, max_slope=3.0).sum() + stable.normalize(x * 0).sum() + stable.div(1.0, x * 0).sum()

    form = torch.compile(edges, backend="aot_eager", fullgraph=True)
    value, (slope,) = value_and_gradients(form, torch.ones(2, 2))
    expected, (true,) = value_and_gradients(edges, torch.ones(2, 2))
    assert torch.equal(value, expected)
    assert torch.equal(slope, true)
    soft = torch.compile(stable.masked_softmax, backend="aot_eager", fullgraph=True)(scores)
    assert torch.equal(soft, stable.masked_softmax(scores))


def test_averages_compile_without_a_graph_break_and_still_refuse_a_nan() -> None:
    torch._dynamo.reset()
    average, running = stable.MovingAverage(2), stable.RunningVariance()
    form = torch.compile(lambda x: average(x.mean(0)) + running(x), backend="aot_eager", fullgraph=True)
    first = form(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert torch.equal(form(torch.full((2, 2), torch.nan)), first)
    assert average.refused == 2
    assert running.kept.refused == 1


WAYS = {"sqrt": stable.sqrt, "log": stable.log, "acos": stable.acos, "div": lambda x: stable.div(1.0, x), "pow": lambda x: stable.pow(x, 0.6)}


@pytest.mark.parametrize("name", WAYS)
def test_a_trace_of_numbers_without_an_edge_guards_the_edge_too(name: str) -> None:
    inside, edge = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.25]) if name == "acos" else torch.tensor([0.0, 0.25])
    for traced in (make_fx(torch.func.grad(lambda x: WAYS[name](x).sum()))(inside), make_fx(slope_of(name))(inside)):
        assert torch.equal(traced(edge), value_and_gradients(WAYS[name], edge)[1][0])


def slope_of(name: str) -> Callable[[Tensor], Tensor]:
    def slope(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(WAYS[name](leaf).sum(), leaf)[0]

    return slope


@pytest.mark.parametrize("pair", ALL, ids=str)
def test_shapes_are_found_without_numbers_and_empty_tensors_pass(pair: Pair) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = pair.ours(*(mode.from_tensor(x) for x in pair.arguments()))
    assert out.shape == pair.ours(*pair.arguments()).shape
    if pair in ELEMENTWISE:
        assert pair.ours(*(torch.zeros(0, 3) for _ in range(pair.inputs))).shape == (0, 3)


@pytest.mark.parametrize("pair", ALL, ids=str)
def test_vmap_gives_each_sample_its_own_gradient(pair: Pair) -> None:
    if pair.name in ("masked_softmax", "masked_mean"):
        pair = Pair(pair.name, pair.plain, lambda x: getattr(stable, pair.name)(x, torch.arange(8) < 3, -1))
    samples = [torch.stack([x, x.flip(0)]) for x in pair.arguments(torch.float64)]
    gradient = torch.func.grad(lambda *xs: pair.ours(*xs).square().sum(), argnums=tuple(range(pair.inputs)))
    together = torch.func.vmap(gradient)(*samples)
    for index in range(2):
        alone = gradient(*(x[index] for x in samples))
        assert all(torch.allclose(t[index], a, rtol=1e-12) for t, a in zip(together, alone, strict=True))


def test_vmap_over_the_mask_alone() -> None:
    scores, masks = torch.randn(5), torch.rand(4, 5) > 0.5
    together = torch.func.vmap(stable.masked_softmax, in_dims=(None, 0))(scores, masks)
    assert torch.equal(together, torch.stack([stable.masked_softmax(scores, mask) for mask in masks]))


def test_hessian_by_reverse_over_reverse() -> None:
    hessian = torch.func.jacrev(torch.func.jacrev(lambda x: stable.normalize(x).prod() + stable.sqrt(x.square()).sum()))
    assert hessian(torch.tensor([1.0, 2.0, 0.0])).isfinite().all()


def test_a_model_with_the_functions_survives_pickling_and_a_copy() -> None:
    import copy
    import pickle

    average = stable.MovingAverage(2)
    average(torch.ones(2))
    for twin in (copy.deepcopy(average), pickle.loads(pickle.dumps(average))):
        assert torch.equal(twin.average, average.average)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pair", ALL, ids=str)
def test_on_a_gpu_the_numbers_are_those_of_the_cpu_compiled_and_under_autocast_too(pair: Pair) -> None:
    value, slopes = value_and_gradients(pair.ours, *pair.arguments())
    there, slopes_there = value_and_gradients(pair.ours, *(x.cuda() for x in pair.arguments()))
    for mine, cpu in zip([there, *slopes_there], [value, *slopes], strict=True):
        assert torch.allclose(mine.cpu(), cpu, rtol=1e-5, atol=1e-6)
    compiled("inductor", [pair], "cuda")
    for dtype in HALF:
        check_autocast(pair, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_edges_are_those_of_the_cpu_and_denormals_count() -> None:
    from stable_functions import whole_range

    for pair in ELEMENTWISE:
        numbers = whole_range(torch.float32)
        inputs = [numbers, numbers.flip(0)][: pair.inputs]
        value, slopes = value_and_gradients(pair.plain, *(x.cuda() for x in inputs))
        ours, our_slopes = value_and_gradients(pair.ours, *(x.cuda() for x in inputs))
        finite = value.isfinite() & torch.stack([s.isfinite() for s in slopes]).all(0)
        assert torch.equal(ours[finite], value[finite]), pair.name
        assert all(torch.equal(a[finite], b[finite]) for a, b in zip(our_slopes, slopes, strict=True)), pair.name
    average = stable.MovingAverage(2).cuda()
    average(torch.tensor([torch.nan, 1.0]).cuda())
    assert average.refused == 1
    assert stable.masked_softmax(torch.full((2, 3), -torch.inf).cuda()).eq(0).all()
    with pytest.raises(ValueError, match="token id -1"):
        stable.tokens_to_rgb(torch.tensor([-1]).cuda())
