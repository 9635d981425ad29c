"""The CTR models against plain loops of their papers' equations; gradients, parameter counts, zero rows, tiny sets."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec import KeyedJaggedTensor

from tests.support.model_specs import model_spec, table_columns
from tests.support.models import make_model

KINDS = ("dnn", "fm", "wide_deep", "deepfm", "xdeepfm", "dcnv2", "dlrm", "pnn", "wukong", "autoint", "finalmlp", "din")
TOWERS = tuple(kind for kind in KINDS if kind != "fm")
WIDE = (16, 8)  # so wide that ReLU leaves something of every sample
VARIANTS = [
    *((kind, {}) for kind in KINDS),
    ("dcnv2", {"structure": "parallel", "cross_layers": 3}),
    ("dcnv2", {"low_rank": 2, "hidden": WIDE}),
    ("dcnv2", {"structure": "parallel", "low_rank": 3}),
    ("wukong", {"interaction_layers": 1, "fm_vectors": 2, "linear_vectors": 2}),  # as many vectors out as in
    ("autoint", {"hidden": (), "attention_layers": 1}),
    (
        "finalmlp",
        {
            "hidden": (8, 6),
            "second_hidden": (12, 9),
            "fusion_heads": 3,
            "first_gate": ("user", "history"),
            "second_gate": ("item",),
        },
    ),
    ("din", {"attention_activation": "prelu"}),
    ("din", {"attention_hidden": (8, 6), "attention_activation": "relu"}),
]


# --- the equations, sample by sample ---------------------------------------------------------------------------------


def mlp(network: nn.Module, x: Tensor, *, logits: bool = True) -> Tensor:
    """ReLU after all linear layers, but the last where it gives logits."""
    linear = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(linear):
        x = torch.stack([(row * x).sum() + b for row, b in zip(layer.weight, layer.bias, strict=True)])
        if number + 1 < len(linear) or not logits:
            x = torch.where(x > 0, x, torch.zeros_like(x))
    return x


def dnn(model, vectors, weights, x):
    return mlp(model.tower, torch.cat([*vectors, x]))[0]


def wide_deep(model, vectors, weights, x):
    linear = sum(weights)
    for u, value in zip(model.first_order.weight[0] if len(x) else [], x, strict=True):
        linear = linear + u * value
    return linear + dnn(model, vectors, weights, x)


def fm(model, vectors, weights, x):
    linear, fields = model.bias[0] + sum(weights), list(vectors)
    for number, value in enumerate(x):
        linear = linear + model.first_order.weight[0, number] * value
        fields.append(value * model.numeric.vectors[number])
    return linear + sum((v * w).sum() for v, w in itertools.combinations(fields, 2))


def deepfm(model, vectors, weights, x):
    second = sum((v * w).sum() for v, w in itertools.combinations(vectors, 2))
    return wide_deep(model, vectors, weights, x) + second


def xdeepfm(model, vectors, weights, x):
    """Equations 6 and 7, one feature map and one pair at a time."""
    before, pooled = list(vectors), []
    for weight in model.cin.weights:
        maps = []
        for row in weight:
            total = torch.zeros_like(vectors[0])
            for i, left in enumerate(before):
                for j, right in enumerate(vectors):
                    total = total + row[i * len(vectors) + j] * left * right
            maps.append(total)
        pooled += [one.sum() for one in maps]
        before = maps
    cin = sum(w * p for w, p in zip(model.cin.output, pooled, strict=True))
    return wide_deep(model, vectors, weights, x) + cin


def dcnv2(model, vectors, weights, x):
    first = torch.cat([*vectors, x])
    found = first
    for layer in model.cross:
        matrix = layer.maps[0] if len(layer.maps) == 1 else layer.maps[1] @ layer.maps[0]  # U V^T
        product = torch.stack([(row * found).sum() for row in matrix])
        found = first * (product + layer.bias) + found
    if not model.parallel:
        return mlp(model.tower, found)[0]
    both = torch.cat([found, mlp(model.tower, first, logits=False)])
    return (model.output.weight[0] * both).sum() + model.output.bias[0]


def dlrm(model, vectors, weights, x):
    seen = [mlp(model.bottom, x, logits=False)] if len(x) else []
    dots = [(v * w).sum() for v, w in itertools.combinations([*seen, *vectors], 2)]
    return mlp(model.top, torch.cat([*seen, torch.stack(dots)]))[0]


def pnn(model, vectors, weights, x):
    dots = [(v * w).sum() for v, w in itertools.combinations(vectors, 2)]
    return mlp(model.tower, torch.cat([*vectors, x, torch.stack(dots)]))[0]


def layer_norm(layer, x):
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return (x - mean) / torch.sqrt(variance + layer.eps) * layer.weight + layer.bias


def wukong(model, vectors, weights, x):
    """With the whole matrix X X^T of the factorization machine, which is then compressed."""
    rows = torch.stack([*vectors, *([mlp(model.bottom, x)] if len(x) else [])])
    for layer in model.layers:
        products = torch.stack([torch.stack([(a * b).sum() for b in rows]) for a in rows])
        flat = (products @ layer.compressed).flatten()
        fmb = mlp(layer.network, layer_norm(layer.before, flat)).view(-1, rows.shape[1])
        lcb = layer.linear @ rows
        added = rows if layer.shortcut is None else layer.shortcut @ rows
        rows = torch.stack([layer_norm(layer.after, row) for row in torch.cat([fmb, lcb]) + added])
    return mlp(model.tower, rows.flatten())[0]


def autoint(model, vectors, weights, x):
    """Equations 5 to 9, one head and one pair of fields at a time."""
    fields = list(vectors) + [value * model.numeric.vectors[number] for number, value in enumerate(x)]
    found = fields
    for layer in model.attention:
        _, heads, units = layer.sizes
        maps = layer.maps.view(4, heads, units, -1)
        added = []
        for one in found:
            parts = []
            for head in range(heads):
                query, key, value, residual = maps[:, head]
                scores = torch.stack([((query @ one) * (key @ other)).sum() for other in found])
                shares = scores.exp() / scores.exp().sum()
                parts.append(sum(a * (value @ other) for a, other in zip(shares, found, strict=True)) + residual @ one)
            added.append(torch.cat(parts).clamp(min=0))
        found = added
    logit = (model.output.weight[0] * torch.cat(found)).sum()
    if model.tower is None:
        return logit + model.output.bias[0]
    return logit + mlp(model.tower, torch.cat(fields))[0]


def finalmlp(model, vectors, weights, x):
    everything, outputs = torch.cat([*vectors, x]), []
    for gate, stream in zip(model.gates, model.streams, strict=True):
        told = torch.cat([vectors[field] for field in gate.fields]) if gate.fields else gate.context
        share = 2 / (1 + torch.exp(-mlp(gate, told)))
        outputs.append(mlp(stream, share * everything, logits=False))
    fusion = model.fusion
    logit = (fusion.linear.weight[0] * torch.cat(outputs)).sum() + fusion.linear.bias[0]
    first, second = (output.chunk(fusion.heads) for output in outputs)
    for number, matrix in enumerate(fusion.maps):
        for i, left in enumerate(first[number]):
            for j, right in enumerate(second[number]):
                logit = logit + left * matrix[i, j] * right
    return logit


def din(model, vectors, weights, x, *, history, target):
    vectors = list(vectors)
    total = torch.zeros_like(target)
    for row in history:
        seen = torch.cat([row, target, row - target, row * target])
        for layer in model.attention["of_history"]:
            if isinstance(layer, nn.Linear):
                seen = layer.weight @ seen + layer.bias
            elif isinstance(layer, nn.PReLU):
                seen = torch.where(seen > 0, seen, layer.weight * seen)
            elif isinstance(layer, nn.ReLU):
                seen = seen.clamp(min=0)
            else:  # Dice in evaluation
                moments = layer.norm.running_mean, layer.norm.running_variance
                p = 1 / (1 + torch.exp(-(seen - moments[0]) / torch.sqrt(moments[1] + 1e-8)))
                seen = p * seen + (1 - p) * layer.alpha * seen
        total = total + seen[0] * row
    vectors[2] = total
    return dnn(model, vectors, weights, x)


PLAIN = {
    "dnn": dnn, "fm": fm, "wide_deep": wide_deep, "deepfm": deepfm, "xdeepfm": xdeepfm, "dcnv2": dcnv2, "dlrm": dlrm,
    "pnn": pnn, "wukong": wukong, "autoint": autoint, "finalmlp": finalmlp, "din": din,
}  # fmt: skip


@pytest.mark.parametrize("has_dense", [False, True])
@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_logits_are_those_of_the_equations(lab, kind, settings, has_dense):
    num_dense = lab.num_dense if has_dense else 0
    model, batch = lab.model(kind, num_dense=num_dense, **settings), lab.batch(num_dense)
    logits = model.scores(batch)
    assert logits.shape == lab.labels.shape
    plain = []
    for sample in range(len(lab.labels)):
        rows = [model.embeddings.vector(name, sample) for name in lab.names]
        vectors, weights = [row[: lab.dim] for row in rows], [row[lab.dim :].sum() for row in rows]
        x = lab.dense[sample] if has_dense else torch.empty(0, dtype=torch.float64)
        extra = {"history": model.embeddings.rows("history")[sample], "target": vectors[1]} if kind == "din" else {}
        plain.append(PLAIN[kind](model, vectors, weights, x, **extra))
    # float64 sums in another order.
    torch.testing.assert_close(logits, torch.stack(plain), rtol=1e-10, atol=1e-12)
    losses = [math.log1p(math.exp(-z if y else z)) for z, y in zip(logits.tolist(), lab.labels.tolist(), strict=True)]
    torch.testing.assert_close(model.loss(batch), torch.tensor(losses, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "settings"), [*VARIANTS, ("two_tower", {})])
def test_gradients_of_rows_and_weights_are_the_finite_differences(lab, kind, settings):
    """All of them, also first-order weights and the moments that dice is trained with."""
    num_dense = 0 if kind == "two_tower" else lab.num_dense
    model, batch = lab.model(kind, num_dense=num_dense, **settings).train(), lab.batch(num_dense)
    names, values = zip(*model.named_parameters(), strict=True)
    arguments = (batch.features, batch.dense) if num_dense else (batch.features,)

    def losses(*parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), arguments)

    inputs = tuple(value.detach().clone().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(losses, inputs, fast_mode=True, eps=1e-7, atol=1e-5, rtol=1e-4)
    losses(*inputs).square().sum().backward()
    used = {name: value.grad for name, value in zip(names, inputs, strict=True)}
    assert [name for name, grad in used.items() if grad is None or not grad.abs().max() > 0] == []


# --- how many parameters ---------------------------------------------------------------------------------------------


def linear(*sizes: int) -> int:
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


F, D, N, H = 4, 4, 3, (6, 3)
COUNTS = [
    # (kind, settings, parameters without numeric features, with 3 of them)
    ("dnn", {}, linear(F * D, *H, 1), linear(F * D + N, *H, 1)),
    ("fm", {}, 1, 1 + N + N * D),
    ("wide_deep", {}, linear(F * D, *H, 1), linear(F * D + N, *H, 1) + N),
    ("deepfm", {}, linear(F * D, *H, 1), linear(F * D + N, *H, 1) + N),
    (
        "xdeepfm", {"cin_layers": (5, 3)},
        linear(F * D, *H, 1) + 5 * (1 + F * F) + 3 * (1 + 5 * F),
        linear(F * D + N, *H, 1) + N + 5 * (1 + F * F) + 3 * (1 + 5 * F),
    ),
    (
        "dcnv2", {"cross_layers": 3},
        3 * (16 * 16 + 16) + linear(16, *H, 1),
        3 * (19 * 19 + 19) + linear(19, *H, 1),
    ),
    (
        "dcnv2", {"structure": "parallel", "low_rank": 2},
        2 * (2 * 16 * 2 + 16) + linear(16, *H) + (16 + 3 + 1),
        2 * (2 * 19 * 2 + 19) + linear(19, *H) + (19 + 3 + 1),
    ),
    ("pnn", {}, linear(F * D + F * (F - 1) // 2, *H, 1), linear(F * D + F * (F - 1) // 2 + N, *H, 1)),
    ("dlrm", {}, linear(F * (F - 1) // 2, *H, 1), linear(N, *H, D) + linear(D + (F + 1) * F // 2, *H, 1)),
    (
        "wukong", {"interaction_layers": 2, "fm_vectors": 3, "linear_vectors": 2, "fm_rank": 3, "fm_hidden": (5,)},
        (2 * 4 + 4 * 3 + 2 * 4 * 3 + linear(4 * 3, 5, 3 * D) + 5 * 4 + 2 * D)
        + (2 * 5 + 5 * 3 + 2 * 5 * 3 + linear(5 * 3, 5, 3 * D) + 2 * D) + linear(5 * D, *H, 1),
        linear(N, *H, D) + 2 * (2 * 5 + 5 * 3 + 2 * 5 * 3 + linear(5 * 3, 5, 3 * D) + 2 * D) + linear(5 * D, *H, 1),
    ),
    (
        "autoint", {"attention_layers": 3, "attention_heads": 2, "attention_units": 5},
        4 * D * 10 + 2 * 4 * 10 * 10 + F * 10 + linear(F * D, *H, 1),
        N * D + 4 * D * 10 + 2 * 4 * 10 * 10 + (F + N) * 10 + linear((F + N) * D, *H, 1),
    ),
    (
        "autoint", {"hidden": (), "attention_layers": 1, "attention_heads": 3, "attention_units": 2},
        4 * D * 6 + F * 6 + 1, N * D + 4 * D * 6 + (F + N) * 6 + 1,
    ),
    (
        "finalmlp", {"gate_hidden": (5,)},
        2 * (D + linear(D, 5, 16) + linear(16, *H)) + 3 + 3 + 1 + 3 * 3,
        2 * (D + linear(D, 5, 19) + linear(19, *H)) + 3 + 3 + 1 + 3 * 3,
    ),
    (
        "finalmlp",
        {"second_hidden": (7, 9), "fusion_heads": 3, "gate_hidden": (), "first_gate": ("user", "tags")},
        linear(2 * D, 16) + D + linear(D, 16) + linear(16, *H) + linear(16, 7, 9) + 3 + 9 + 1 + 9,
        linear(2 * D, 19) + D + linear(D, 19) + linear(19, *H) + linear(19, 7, 9) + 3 + 9 + 1 + 9,
    ),
    (
        "din", {"attention_hidden": (5, 3)},
        linear(4 * D, 5, 3, 1) + 5 + 3 + linear(F * D, *H, 1),
        linear(4 * D, 5, 3, 1) + 5 + 3 + linear(F * D + N, *H, 1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "without", "with_dense"), COUNTS)
def test_parameters_are_as_many_as_the_paper_counts(lab, kind, settings, without, with_dense):
    spec = model_spec(**{"kind": kind, "embedding_dim": D, "hidden": H, **settings})
    for num_dense, expected in ((0, without), (N, with_dense)):
        model = lab.model(kind, num_dense=num_dense, **settings)
        assert sum(p.numel() for _, p in model.dense_parameters()) == expected
        size = spec.size(F, num_dense=num_dense, num_lists=1 if kind == "din" else 0, list_ids=5.0)
        assert size.parameters == expected
    columns = D + 1 if kind in ("fm", "wide_deep", "deepfm", "xdeepfm") else D
    assert {table_columns(kind, name, D) for name in ("user", "item")} == {columns}


@pytest.mark.parametrize("options", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", [*TOWERS, "two_tower"])
def test_towers_with_options_have_what_they_need_more(lab, kind, options):
    residual, batch_norm = options
    spec = {"residual": residual, "batch_norm": batch_norm}
    model = lab.model(kind, **spec)
    settings = lab.settings.get(kind, {})
    size = model_spec(kind, embedding_dim=D, hidden=H, **settings, **spec).size(F, num_lists=kind == "din")
    assert size.parameters == sum(p.numel() for _, p in model.dense_parameters())
    assert size.parameters > model_spec(kind, embedding_dim=D, hidden=H, **settings).size(F).parameters


def starts_from_zeros(kind, settings) -> bool:
    """Whether rows of zeros learn where there is no numeric feature: products of rows alone do not, nor does ReLU of
    attention alone."""
    return kind not in ("dlrm", "fm") and not (kind == "autoint" and settings.get("hidden") == ())


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_rows_of_zeros_have_a_gradient(lab, kind, settings):
    """The AdamAR paper's start: but for what needs a numeric feature."""
    for num_dense in (0, lab.num_dense):
        model = lab.model(kind, num_dense=num_dense, zero=True, stir=False, **{"hidden": WIDE, **settings}).train()
        batch = lab.batch(num_dense)
        model.loss(batch).sum().backward()
        touched = {"user": [2, 3, 4, 6], "item": [2, 3, 4, 5, 6, 7], "tags": [2, 3, 4, 5, 6, 7]}
        for table, rows in touched.items():
            norms = model.embeddings.weights[table].grad[rows, : lab.dim].norm(dim=1)
            if not starts_from_zeros(kind, settings) and not num_dense:
                assert not norms.any()
            else:
                assert (norms > 1e-7).all(), (table, norms)


def test_products_alone_do_not_move_zero_rows():
    from trainer.models.dnn import pairs
    from trainer.models.products import CIN

    vectors = torch.zeros(2, 3, 4, requires_grad=True)
    (pairs(vectors).sum() + CIN(3, (5,), seed=0, dtype=torch.float32)(vectors).sum()).backward()
    assert not vectors.grad.any()


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_a_tiny_set_is_learned_by_heart(lab, kind, settings):
    zero = starts_from_zeros(kind, settings)
    model, batch = lab.model(kind, zero=zero, stir=False, **{"hidden": WIDE, **settings}).train(), lab.batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(batch).mean()
        if loss.item() < 0.02:
            return
        loss.backward()
        optimizer.step()
    pytest.fail(f"a loss of {loss.item():.3f} after 150 steps")


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize(("kind", "settings"), [*VARIANTS, ("two_tower", {})])
def test_a_rank_without_samples_takes_part(lab, kind, settings, options):
    """Forward and backward of no sample: every parameter has a gradient, of zeros."""
    if kind in TOWERS:
        settings = {**settings, "residual": options, "batch_norm": options}
    model = lab.model(kind, **settings).train()
    empty = torch.empty(0, dtype=torch.int64)
    features = KeyedJaggedTensor(list(lab.names), empty, lengths=empty, stride=0)
    model.embeddings.no_samples = True
    loss = model.loss(SimpleNamespace(features=features, labels=torch.empty(0), dense=None, shares=None))
    assert loss.shape == (0,)
    loss.sum().backward()
    for name, parameter in model.dense_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


# --- how it is built -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_from_the_seed_alone(lab, kind):
    torch.manual_seed(1)
    first = {name: p.detach() for name, p in lab.model(kind, num_dense=3, stir=False).dense_parameters()}
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    again = dict(lab.model(kind, num_dense=3, stir=False).dense_parameters())
    assert torch.equal(before, torch.random.get_rng_state())
    assert [name for name, value in first.items() if not torch.equal(value, again[name])] == []
    drawn = [value for value in first.values() if value.dim() == 2 and value.std() > 0]
    assert drawn
    # Two weights of one shape are not one draw.
    for one, other in itertools.combinations(drawn, 2):
        assert one.shape != other.shape or not torch.allclose(one, other)


def test_what_a_model_cannot_be_built_of_is_refused(lab):
    tables = lab.tables(1, pooled=True, zero=False)
    with pytest.raises(ValueError, match="shares the table of a single id"):
        make_model("din", tables, lab.names, embedding_dim=1)
    with pytest.raises(ValueError, match="which leaves nothing of one column"):
        make_model("wukong", tables, lab.names, embedding_dim=1, hidden=(2,))
    with pytest.raises(ValueError, match="multiplies pairs of vectors, and there is one"):
        make_model("dlrm", tables, ["user"], embedding_dim=1, hidden=(2,))
    with pytest.raises(ValueError, match="fm multiplies pairs of fields, and there is one, user"):
        make_model("fm", tables, ["user"], embedding_dim=1)
    with pytest.raises(ValueError, match="4 fusion heads do not divide streams of 6 and 8 units"):
        make_model("finalmlp", tables, lab.names, embedding_dim=1, hidden=(6,), second_hidden=(8,), fusion_heads=4)
