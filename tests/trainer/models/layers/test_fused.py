"""Fused layers beside plain torch: outputs and gradients, to the bit where float32 is exact; what is not fused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainer.models.test_ctr_models import VARIANTS
from trainer.models.layers import fused
from trainer.models.layers.mlp import tower
from trainer.models.products import CrossLayer

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "columns of a wider matrix": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "transposed": lambda x: x.T.contiguous().T,
}
SIZES = st.lists(st.integers(1, 20), min_size=2, max_size=4)
BATCHES = st.sampled_from([0, 1, 2, 63, 64, 65, 200])


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within the block nothing is fused."""
    with (
        mock.patch("trainer.models.layers.fused.is_fusible", return_value=False),
        mock.patch("trainer.models.products.is_fusible", return_value=False),
        mock.patch("trainer.models.ctr_base.is_fusible", return_value=False),
    ):
        yield


def split_fields_in_torch(rows, dim):
    fields_ = rows.unflatten(1, (-1, dim + 1))
    vectors = fields_[:, :, :dim]
    return vectors.flatten(1), fields_[:, :, dim].sum(1), fused.pairs(vectors)


def small_integers(*shape: int, seed: int) -> Tensor:
    """Integers so small that float32 rounds none of the sums of their products."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def stack(sizes: Sequence[int], logits: bool = True) -> fused.Stack:
    layers = tower(sizes, seed=0, dtype=torch.float32, logits=logits).train()
    assert isinstance(layers, fused.Stack)
    return layers


def filled(module: nn.Module, seed: int = 1) -> Any:
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(small_integers(*parameter.shape, seed=seed + number))
    return module


def outcome(function: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
    """The output and the gradient of each input that wants one."""
    for one in inputs:
        one.grad = None
    output = function()
    if output.requires_grad:
        output.backward(upstream)
    return [output.detach(), *(one.grad for one in inputs)]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one, other)


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], limit: float = 1e-6) -> None:
    """Check that each tensor's largest difference is below ``limit`` times its largest element."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert float((one - other).abs().max()) <= limit * float(other.abs().max())


@given(
    sizes=SIZES, batch=BATCHES, logits=st.booleans(), layout=st.sampled_from(sorted(LAYOUTS)),
    wants=st.lists(st.booleans(), min_size=7, max_size=7), is_expanded=st.booleans(),
)  # fmt: skip
def test_a_stack_is_plain_torch_to_the_bit(sizes, batch, logits, layout, wants, is_expanded):
    layers = filled(stack(sizes, logits))
    leaf = small_integers(batch, sizes[0], seed=10)
    inputs = [leaf, *layers.parameters()]
    for one, wanted in zip(inputs, wants, strict=False):
        one.requires_grad_(wanted)
    upstream = torch.ones(()).expand(batch, sizes[-1]) if is_expanded else small_integers(batch, sizes[-1], seed=11)
    found = outcome(lambda: layers(LAYOUTS[layout](leaf)), inputs, upstream)
    with plain_torch():
        expected = outcome(lambda: layers(LAYOUTS[layout](leaf)), inputs, upstream)
    assert_equal(found, expected)


@given(width=st.integers(1, 10), batch=BATCHES, count=st.integers(1, 3), layout=st.sampled_from(sorted(LAYOUTS)))
def test_cross_layers_are_plain_torch_to_the_bit(width, batch, count, layout):
    layers = [filled(CrossLayer(width, None, torch.float32), seed=3 * number) for number in range(count)]
    parameters = [parameter for layer in layers for parameter in (*layer.maps, layer.bias)]
    leaf = small_integers(batch, width, seed=10).sign().requires_grad_()
    upstream = small_integers(batch, width, seed=11).sign()

    def one_by_one() -> Tensor:
        x = first = LAYOUTS[layout](leaf)
        for layer in layers:
            x = layer(first, x)
        return x

    function = fused.CrossLayers.apply
    found = outcome(lambda: function(LAYOUTS[layout](leaf).contiguous(), *parameters), [leaf, *parameters], upstream)
    assert_equal(found, outcome(one_by_one, [leaf, *parameters], upstream))


@given(fields=st.integers(1, 9), dim=st.sampled_from([1, 3, 8, 16, 17, 32, 64]), batch=BATCHES, used=st.integers(1, 7))
def test_fields_are_split_as_plain_torch_does(fields, dim, batch, used):
    """``used``: the bits of the outputs that the loss reads."""
    leaf = small_integers(batch, fields * (dim + 1), seed=1).requires_grad_()
    factors = [small_integers(batch, fields * dim, seed=2), *(small_integers(batch, seed=seed) for seed in (3, 4))]

    def chosen(outputs: tuple[Tensor, ...]) -> Tensor:
        parts = [(output * factor).sum() for output, factor in zip(outputs, factors, strict=True)]
        return torch.stack([part for bit, part in enumerate(parts) if used >> bit & 1]).sum()

    for one, other in zip(fused.SplitFields.apply(leaf, dim), split_fields_in_torch(leaf, dim), strict=True):
        assert torch.equal(one, other)
    one = torch.ones(())
    assert_equal(
        outcome(lambda: chosen(fused.SplitFields.apply(leaf, dim)), [leaf], one),
        outcome(lambda: chosen(split_fields_in_torch(leaf, dim)), [leaf], one),
    )


@pytest.mark.parametrize("has_dense", [False, True])
@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_models_train_as_in_plain_torch(lab, kind, settings, has_dense):
    """In float32, whose sums are made in another order."""
    num_dense = lab.num_dense if has_dense else 0
    model, batch = lab.model(kind, num_dense=num_dense, **settings).float().train(), lab.batch(num_dense)
    inputs = list(model.parameters())
    upstream = torch.linspace(-1.0, 2.0, len(lab.labels))
    found = outcome(lambda: model.loss(batch), inputs, upstream)
    with plain_torch():
        expected = outcome(lambda: model.loss(batch), inputs, upstream)
    assert_close(found, expected, limit=1e-5)


def test_a_tower_of_usual_size_is_plain_torchs():
    generator = torch.Generator().manual_seed(0)
    layers, x = stack([416, 256, 128, 1]), torch.randn(2048, 416, generator=generator).requires_grad_()
    upstream = torch.randn(2048, 1, generator=generator)
    inputs = [x, *layers.parameters()]
    found = outcome(lambda: layers(x), inputs, upstream)
    with plain_torch():
        assert_close(found, outcome(lambda: layers(x), inputs, upstream))


def test_bits_are_the_same_for_any_number_of_threads():
    """Checks the compiled passes; torch's matrix products may differ by the number of threads."""
    from embeddings.kernels.cpu import cross_backward, relu_backward, split_fields

    generator = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(3000, 119, generator=generator) for _ in range(4))
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            masked, of_first = a.clone(), b.clone()
            crossed = cross_backward(a, c, d, b[0], of_first, adds=True, input_is_first=False)
            parts = relu_backward(masked, b), *crossed, *split_fields(a, 6)
            found.append([masked, of_first, *parts])
    finally:
        torch.set_num_threads(threads)
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad):
    layers = stack([3, 4, 2, 1])
    x = torch.ones(5, 3)
    x[2, 1] = bad
    found = outcome(lambda: layers(x), list(layers.parameters()), torch.ones(5, 1))
    with plain_torch():
        expected = outcome(lambda: layers(x), list(layers.parameters()), torch.ones(5, 1))
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.isfinite(), other.isfinite())


def test_backward_may_run_twice_and_adds_up():
    layers, x = filled(stack([3, 4, 2])), small_integers(7, 3, seed=5).requires_grad_()
    output = layers(x)
    output.sum().backward(retain_graph=True)
    once = [one.grad.clone() for one in (x, *layers.parameters())]
    output.sum().backward()
    for one, first in zip((x, *layers.parameters()), once, strict=True):
        assert torch.equal(one.grad, 2 * first)


def test_logits_may_be_changed_in_place():
    layers: Any = stack([3, 4, 2])
    layers(torch.ones(2, 3)).mul_(2.0).sum().backward()
    assert torch.equal(layers[2].bias.grad, torch.full((2,), 4.0))


def test_a_weight_that_changed_before_backward_is_an_error():
    layers: Any = stack([3, 4, 2])
    output = layers(torch.ones(2, 3))
    with torch.no_grad():
        layers[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def second_derivatives(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    firsts = torch.autograd.grad((function() ** 3).sum(), inputs, create_graph=True)
    total = torch.stack([(one**2).sum() for one in firsts]).sum()
    return list(torch.autograd.grad(total, inputs, materialize_grads=True))


def test_gradients_of_gradients_are_plain_torchs():
    generator = torch.Generator().manual_seed(0)
    layers, x = stack([4, 6, 5, 2]), torch.randn(9, 4, generator=generator).requires_grad_()
    inputs = [x, *layers.parameters()]
    found = second_derivatives(lambda: layers(x), inputs)
    with plain_torch():
        assert_close(found, second_derivatives(lambda: layers(x), inputs), limit=1e-5)
    crosses = [CrossLayer(4, None, torch.float32) for _ in range(2)]
    parameters = [parameter for layer in crosses for parameter in (*layer.maps, layer.bias)]
    found = second_derivatives(lambda: fused.CrossLayers.apply(x, *parameters), [x, *parameters])
    expected = second_derivatives(lambda: crosses[1](x, crosses[0](x, x)), [x, *parameters])
    assert_close(found, expected, limit=1e-5)
    rows = torch.randn(9, 15, generator=generator).requires_grad_()

    def side_by_side(split: Callable[..., Any]) -> Tensor:
        return torch.cat([one.flatten() for one in split(rows, 4)])

    found = second_derivatives(lambda: side_by_side(fused.SplitFields.apply), [rows])
    expected = second_derivatives(lambda: side_by_side(split_fields_in_torch), [rows])
    assert_close(found, expected, limit=1e-5)


# --- what is not fused -----------------------------------------------------------------------------------------------


def is_fused(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "LinearLayersBackward"


def test_what_is_fused():
    x = torch.ones(5, 3)
    assert is_fused(stack([3, 1])(x))
    assert is_fused(stack([3, 4, 2, 1])(x))
    assert is_fused(stack([3, 4, 2], logits=False)(x))
    assert is_fused(copy.deepcopy(stack([3, 4, 1]))(x))
    assert is_fused(pickle.loads(pickle.dumps(stack([3, 4, 1])))(x))
    assert is_fused(stack([3, 4, 2, 1])[:2](x))


def test_other_layers_types_and_modes_are_not():
    x = torch.ones(5, 3)
    assert not is_fused(stack([3, 4, 1]).eval()(x))
    assert not is_fused(stack([3, 4, 1]).double()(x.double()))
    assert not is_fused(stack([3, 4, 1])(torch.ones(2, 5, 3)))
    for settings in ({"batch_norm": True}, {"residual": True}):
        assert not is_fused(tower([3, 4, 1], seed=0, dtype=torch.float32, **settings).train()(x))
    assert not is_fused(fused.Stack(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 1))(x))
    assert not is_fused(fused.Stack(nn.Linear(3, 4, bias=False), nn.ReLU())(x))
    assert not is_fused(fused.Stack(nn.ReLU(), nn.Linear(3, 4))(x))
    assert not is_fused(fused.Stack(nn.Linear(3, 4), nn.Tanh())(x))
    assert torch.equal(fused.Stack()(x), x)
    with torch.no_grad():
        assert stack([3, 4, 1])(x).grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stack([3, 4, 1])(x).dtype == torch.bfloat16


@pytest.mark.parametrize("logits", [True, False])
def test_hooks_see_every_layer(logits):
    layers, x, seen = stack([3, 4, 2], logits), torch.ones(5, 3), []
    for layer in list(layers.modules())[1:]:
        handle = layer.register_forward_hook(lambda module, *_: seen.append(module))
        layers(x)
        handle.remove()
        assert seen == [layer]
        seen.clear()
        assert is_fused(layers(x))
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        layers(x)
    assert set(seen) == set(layers.modules())


@pytest.mark.slow
def test_transforms_and_tracing_run_plain_torch():
    layers, x = stack([3, 4, 1]), torch.ones(5, 3)
    jacobian = torch.func.jacrev(lambda one: layers(one).sum(0))(x)
    assert jacobian.shape == (1, 5, 3)
    assert torch.func.vmap(lambda one: layers(one[None])[0])(x).shape == (5, 1)
    traced = torch.jit.trace(layers, (x,), check_trace=False)
    torch.testing.assert_close(traced(x), layers.eval()(x))
    program = torch.export.export(layers.train(), (x,))
    torch.testing.assert_close(program.module()(x), layers(x))
