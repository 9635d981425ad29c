"""two_tower with an item table: its equation in plain numpy, gradients, dropout of ids, ranks, resumes, warm starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchrec import KeyedJaggedTensor, KeyedTensor

from tests.support.model_specs import model_spec
from tests.trainer.item_tables import RANKING, dataset_at, job_of, prepared_log
from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.batch import Batch
from trainer.data.batches.keys import Key
from trainer.data.columns.dynamic_ids import UNKNOWN_ROW
from trainer.data.prepare.preparation import prepare
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.models.base import ModelInputs
from trainer.models.two_tower import TwoTower
from trainer.runs.directory import read_run, write_run

DIM, NUM_ROWS = 3, 9
KEYS = (
    Key("user", "user", False, "mean"),
    Key("item", "item", False, "mean"),
    Key("taste", "item", False, "mean"),
    Key("genres", "genres", True, "sum", of_item=True),
    Key("brand", "brand", False, "mean", of_item=True),
)
LISTS = {
    "user": [[2], [3], [4], [2]],
    "item": [[5], [1], [6], [5]],
    "taste": [[2], [3], [2], [8]],
    "genres": [[2, 3], [], [6], [2, 3]],
    "brand": [[4], [1], [7], [4]],
}
LABELS = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
DENSE = torch.tensor([[0.5, 1.5], [-1.0, 0.25], [2.0, -0.5], [0.0, 1.5]], dtype=torch.float64)
"""A number of the row, and one of the item."""


class Tables(nn.Module):
    """Rows of every table in float64, looked up and summed in a loop."""

    def __init__(self, spec):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.columns = [spec.table_columns(key.table) for key in KEYS]
        shapes = {key.table: (NUM_ROWS, columns) for key, columns in zip(KEYS, self.columns, strict=True)}
        self.weights = nn.ParameterDict(
            {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        )

    def forward(self, features):
        blocks = []
        for key in KEYS:
            ids, lengths = features[key.name].values(), features[key.name].lengths().tolist()
            rows = self.weights[key.table][ids].split(lengths)
            blocks.append(torch.stack([part.sum(0) for part in rows]))
        return KeyedTensor([key.name for key in KEYS], self.columns, torch.cat(blocks, dim=1))


def features_of(lists=LISTS):
    return KeyedJaggedTensor(
        keys=[key.name for key in KEYS],
        values=torch.tensor([i for key in KEYS for ids in lists[key.name] for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for key in KEYS for ids in lists[key.name]], dtype=torch.int64),
    )


BATCH = Batch(features_of(), LABELS, sample_offset=0, global_size=len(LABELS), step=3, dense=DENSE)


def make(loss="bce", **fields):
    spec = model_spec("two_tower", embedding_dim=DIM, hidden=(5,), loss=loss, **fields)
    model = TwoTower(Tables(spec), spec, ModelInputs(KEYS, 2, seed=4, dtype=torch.float64, num_item_numbers=1))
    model.loss_kind = loss
    with torch.no_grad():
        model.bias.fill_(0.25)
    model.log_probabilities = torch.linspace(-3.0, -1.0, NUM_ROWS, dtype=torch.float64)
    return model.eval()


def perceptron(tower, x):
    """The same by numpy: relu between linear layers."""
    weights = {name: value.detach().numpy() for name, value in tower.named_parameters()}
    hidden = np.maximum(weights["0.weight"] @ x + weights["0.bias"], 0.0)
    return weights["2.weight"] @ hidden + weights["2.bias"]


def plain_sides(model):
    """u, v and b of every sample, by the formula."""
    tables = {name: weight.detach().numpy() for name, weight in model.embeddings.weights.items()}
    users, items, biases = [], [], []
    for sample in range(len(LABELS)):
        rows = {key.name: tables[key.table][LISTS[key.name][sample]].sum(0) for key in KEYS}
        block = {name: row[:DIM] for name, row in rows.items()}
        own, of_item = DENSE[sample].numpy()
        users.append(perceptron(model.tower, np.concatenate([block["user"], block["taste"], [own]])))
        parts = [block["item"], block["genres"], block["brand"], [of_item]]
        items.append(perceptron(model.item_tower, np.concatenate(parts)))
        biases.append(rows["item"][DIM:])
    if not model.normalize:
        return np.stack(users), np.stack(items), np.stack(biases)
    users, items = (np.stack(part) / np.linalg.norm(part, axis=1, keepdims=True) for part in (users, items))
    return users, items, np.stack(biases)


@pytest.mark.parametrize(("normalize", "temperature"), [(False, 1.0), (True, 0.2), (False, 2.5)])
def test_scores_are_the_product_of_two_towers(normalize, temperature):
    model = make(normalize=normalize, temperature=temperature)
    users, items, biases = plain_sides(model)
    assert biases.shape[1] == normalize
    expected = ((users * items).sum(1) + biases.sum(1)) / temperature + 0.25
    torch.testing.assert_close(model(features_of(), DENSE), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
    # Those of rankings and of publications are the same, from features of one side alone.
    of_items = {name: ids if name in ("item", "genres", "brand") else [[]] * 4 for name, ids in LISTS.items()}
    found = model.item_side(features_of(of_items), DENSE[:, 1:])
    torch.testing.assert_close(found, torch.from_numpy(np.hstack([items, biases])), rtol=1e-12, atol=1e-12)


def test_the_softmax_is_over_tower_outputs_with_their_temperature_before_log_q():
    model = make("sampled_softmax", normalize=True, temperature=0.5)
    users, items, biases = plain_sides(model)
    log_q = model.log_probabilities.numpy()[[ids[0] for ids in LISTS["item"]]]
    scores = (users @ items.T + biases[:, 0]) / 0.5 - log_q
    expected = LABELS.numpy() * (np.log(np.exp(scores).sum(1)) - np.diag(scores))
    torch.testing.assert_close(model.loss(BATCH), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ["bce", "sampled_softmax"])
def test_gradients_of_rows_and_weights_are_the_finite_differences(loss):
    model = make(loss, normalize=True, temperature=0.7, item_id_dropout=0.5).train()
    names, values = zip(*model.named_parameters(), strict=True)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return self.model.loss(BATCH)

    def losses(*parameters):
        return functional_call(Loss(), {f"model.{name}": one for name, one in zip(names, parameters, strict=True)})

    inputs = tuple(value.detach().clone().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(losses, inputs, fast_mode=True, eps=1e-7, atol=1e-5, rtol=1e-4)


def test_a_share_of_the_samples_reads_the_unknown_id_and_only_in_training():
    model = make(item_id_dropout=0.5)
    count = 400
    lists = {name: (ids * count)[:count] for name, ids in LISTS.items()} | {"item": [[5]] * count}
    features = features_of(lists)
    labels, dense = torch.ones(count), DENSE.repeat(100, 1)
    batch = replace(BATCH, features=features, labels=labels, dense=dense, global_size=count)

    def dropped(batch):
        found = model._with_unknown_items(batch)
        items = found["item"].values()
        assert set(items.tolist()) <= {5, UNKNOWN_ROW}
        for key in KEYS:
            if key.name != "item":
                assert torch.equal(found[key.name].values(), batch.features[key.name].values())
        return items == UNKNOWN_ROW

    first = dropped(batch)
    # Binomial, 400 draws of 1/2: five standard deviations are 50.
    assert 150 < int(first.sum()) < 250
    assert torch.equal(first, dropped(batch))
    assert not torch.equal(first, dropped(replace(batch, step=4)))
    # A rank with the second half draws what one rank with all drew there.
    half = {name: ids[200:] for name, ids in lists.items()}
    later = replace(batch, features=features_of(half), labels=labels[200:], dense=dense[200:], sample_offset=200)
    assert torch.equal(dropped(later), first[200:])
    assert torch.equal(features["item"].values(), torch.full((count,), 5)), "the batch itself stays"
    trained, evaluated = model.train().loss(batch), model.eval().loss(batch)
    assert torch.equal(trained[~first], evaluated[~first])
    assert not torch.equal(trained[first], evaluated[first])
    without = make(item_id_dropout=0.0).train()
    torch.testing.assert_close(without.loss(batch), evaluated)


# --- trainings -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return prepared_log(tmp_path_factory.mktemp("log"))


MODEL = {"loss": "sampled_softmax", "normalize": True, "temperature": 0.3, "item_id_dropout": 0.5}


@pytest.mark.parametrize(
    "model", [MODEL, {"batch_norm": True, "residual": True, "item_id_dropout": 0.3}], ids=["softmax", "bce"]
)
def test_two_ranks_train_and_rank_as_one_does(log, ranks, tmp_path, model):
    """Also where the last batch of an epoch leaves a rank without a sample."""
    job = job_of(model, evaluation={"split": {"kind": "column", "column": "part"}, "metrics": RANKING})
    examples = prepare(dataset_at(log), job, tmp_path / "probe").num_examples["train"]
    size = next(size for size in range(200, 400) if examples % size == 1)
    job = job.model_copy(update={"batch_size": size})
    data = prepare(dataset_at(log), job, tmp_path / "data")
    steps = data.steps_per_epoch + 2
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, job, steps)
    split = job.model_copy(update={"sharding": {"item": "row_wise", "genres": "row_wise"}})
    (found, scored), nothing = ranks(2).run(train_on_ranks, data.directory, split, steps)
    assert nothing is None
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(metrics, rel=1e-7)
    assert metrics["recall_20_full"] > 0


def test_stopping_and_resuming_changes_no_bit(log, tmp_path):
    job = job_of(MODEL, batch_size=512)
    data = prepare(dataset_at(log), job, tmp_path / "data")
    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [2, data.steps_per_epoch])
        found = snapshot(whole)
        assert {"brand", "genres", "model/item_tower.0.weight"} <= found.keys()
        assert differ(snapshot(parts), found) == []
    assert parts.history == whole.history


def test_a_warm_start_goes_on_with_the_items_towers_and_statistics(log, small, tmp_path):
    """The next day's rows have items that the first day's table had and nobody had clicked."""
    publish = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}
    day1 = read_run(
        write_run(
            tmp_path / "day1", run_id="day1", job=job_of(MODEL, publish=publish), dataset=dataset_at(log),
            store_url=str(tmp_path / "store"),
        )
    )  # fmt: skip
    assert execute(day1, start_ranks) == 0
    folder = tmp_path / "next"
    folder.mkdir()
    later = prepared_log(folder, seed=1, last=70)
    day2 = read_run(
        write_run(
            tmp_path / "day2", run_id="day2", job=job_of({**MODEL, "item_id_dropout": 0.2}, publish=publish),
            dataset=dataset_at(later), store_url=str(tmp_path / "store"),
            init_checkpoint=str(day1.checkpoints), parent_version="v000001",
        )
    )  # fmt: skip
    assert execute(day2, start_ranks) == 0
    first, second = (latest_valid(run.checkpoints) for run in (day1, day2))
    assert second.tables["item"] == first.tables["item"] + 10
    losses = [small.metrics(tmp_path / name, "train")[0]["loss"] for name in ("day1", "day2")]
    assert losses[1] < losses[0]
    other = replace_model(day2.job, normalize=False)
    refused = write_run(
        tmp_path / "other", run_id="other", job=other, dataset=dataset_at(later), store_url=str(tmp_path / "store"),
        init_checkpoint=str(day1.checkpoints),
    )  # fmt: skip
    assert execute(read_run(refused), start_ranks) != 0
    assert "model.normalize: the parent was trained with True" in small.events(refused, "error")[-1]["message"]


def replace_model(job, **fields):
    return job.model_copy(update={"model": job.model.model_copy(update=fields)})


def test_log_q_counts_drawn_negatives_too(log, tmp_path):
    """Mixed negatives: a sample of the batch is of an item as often as its rows, clicks and draws, say."""
    dataset = dataset_at(log, label={"negatives": {"per_positive": 2, "of": "item"}})
    data = prepare(dataset, job_of(MODEL), tmp_path / "data")
    with single_rank_group():
        model = trainer_of(job_of(MODEL), data).sharded.module
    counts = np.bincount(data.column("train", data.keys[1]), minlength=data.tables["item"].num_rows)
    assert counts.sum() == data.num_examples["train"] == 3 * data.num_positives["train"]
    live = counts > 0
    np.testing.assert_allclose(model.log_probabilities.numpy()[live], np.log(counts[live] / counts.sum()), rtol=1e-6)
