"""RecBole and FuxiCTR as peers: train one CTR model on given rows and print its figures as JSON.

It is run by the interpreter of the peers' own environment (benchmarks.published_ctr), and imports nothing from this
project, since that environment lacks its dependencies.

    python ctr_library_peers.py recbole|fuxictr ROWS.parquet FOLDER SETTINGS

The last line has ``epoch``, the best by validation AUC; ``auc`` and ``logloss`` of its test rows; ``seconds`` of the
processor for an epoch, evaluation included. RecBole trains its own models from its own files of rows. FuxiCTR's package
holds no DeepFM, DCN-V2 or Wide & Deep for such rows, so they are made of its layers and trained by its BaseModel.
"""

import json
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # type: ignore[import-untyped]
import torch

FOLDS = ("train", "validation", "test")
LISTS = "genres"
library, rows_path, given_folder, given_settings = sys.argv[1:]
rows, folder, settings = pandas.read_parquet(rows_path), Path(given_folder), json.loads(given_settings)
folds = [rows[rows.fold == fold].drop(columns="fold") for fold in FOLDS]
features = [name for name in folds[0] if name != "label"]
best: dict[str, float] = {}
torch.set_num_threads(1)


def recbole() -> None:
    # RecBole 1.2.1 names types that numpy 2 took away.
    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        setattr(np, name, kind)
    from recbole.config import Config  # type: ignore[import-not-found]
    from recbole.data import create_dataset, data_preparation  # type: ignore[import-not-found]
    from recbole.trainer import Trainer  # type: ignore[import-not-found]
    from recbole.utils import get_model, init_seed  # type: ignore[import-not-found]

    (folder / "rows").mkdir()
    for name, of_fold in zip(FOLDS, folds, strict=True):
        of_fold = of_fold.assign(genres=of_fold.genres.map(" ".join)).rename(
            columns={name: f"{name}:token" for name in features if name != LISTS}
            | {LISTS: f"{LISTS}:token_seq", "label": "label:float"}
        )
        of_fold.to_csv(folder / "rows" / f"rows.{name}.inter", sep="\t", index=False)
    towers, dropout = settings["hidden"], settings["dropout"]
    config = Config(
        model={"deepfm": "DeepFM", "dcnv2": "DCNV2", "autoint": "AutoInt", "wide_deep": "WideDeep"}[settings["model"]],
        dataset="rows",
        config_dict={
            "data_path": str(folder), "checkpoint_dir": str(folder), "benchmark_filename": list(FOLDS),
            "load_col": {"inter": [*features, "label"]}, "USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item",
            "LABEL_FIELD": "label", "use_gpu": False, "show_progress": False, "seed": settings["seed"],
            "epochs": settings["epochs"], "train_batch_size": settings["batch_size"], "eval_batch_size": 1_000_000,
            "learning_rate": settings["learning_rate"], "stopping_step": settings["patience"] - 1,
            "metric_decimal_place": 8, "embedding_size": settings["dim"], "mlp_hidden_size": towers,
            "dropout_prob": dropout, "dropout_probs": [dropout] * 3, "structure": "stacked",
            "cross_layer_num": settings["cross_layers"], "n_layers": settings["attention_layers"],
            "num_heads": settings["attention_heads"],
            "attention_size": settings["attention_heads"] * settings["attention_units"],
        },
    )  # fmt: skip
    init_seed(config["seed"], config["reproducibility"])
    train, validation, test = data_preparation(config, create_dataset(config))
    model = get_model(config["model"])(config, train.dataset)

    trainer = Trainer(config, model)
    begun = time.process_time()

    def tell(epoch: int, score: float) -> None:
        best["seconds"] = (time.process_time() - begun) / (epoch + 1)
        if trainer.cur_step == 0:  # the best epoch so far
            found = trainer.evaluate(test, load_best_model=False)
            best.update(epoch=epoch + 1, validation=score, auc=found["auc"], logloss=found["logloss"])

    trainer.fit(train, validation, saved=False, verbose=False, callback_fn=tell)


def fuxictr() -> None:
    from fuxictr.features import FeatureMap  # type: ignore[import-not-found]
    from fuxictr.pytorch.dataloaders import RankDataLoader  # type: ignore[import-not-found]
    from fuxictr.pytorch.layers import (  # type: ignore[import-not-found]
        CrossNetV2,
        FactorizationMachine,
        FeatureEmbedding,
        LogisticRegression,
        MLP_Block,
    )
    from fuxictr.pytorch.models import BaseModel  # type: ignore[import-not-found]
    from fuxictr.pytorch.torch_utils import seed_everything  # type: ignore[import-not-found]

    kind, dim = settings["model"], settings["dim"]
    if kind == "autoint":
        raise NotImplementedError("the package has no AutoInt and no layer of it")
    seed_everything(settings["seed"])
    columns: dict[str, Any] = {}
    fields = OrderedDict()  # 0 is padding, the last code an id that no training row has
    for name in features:
        lists = name == LISTS
        values = [fold[name].explode() if lists else fold[name] for fold in folds]
        ids = pandas.Index(values[0].unique())
        codes = [np.where((code := ids.get_indexer(one)) < 0, len(ids), code) + 1 for one in values]
        fields[name] = {"type": "sequence" if lists else "categorical", "padding_idx": 0, "vocab_size": len(ids) + 2}
        if lists:
            width = int(rows[name].map(len).max())
            fields[name] |= {"max_len": width, "feature_encoder": "layers.MaskedAveragePooling()"}
            codes = [
                padded(code, fold[name].map(len).to_numpy(), width) for code, fold in zip(codes, folds, strict=True)
            ]
        columns[name] = codes
    feature_map = FeatureMap("rows", str(folder))
    feature_map.features, feature_map.labels, feature_map.default_emb_dim = fields, ["label"], dim
    feature_map.num_fields = feature_map.get_num_fields()
    feature_map.set_column_index()
    paths = [str(folder / f"{name}.npz") for name in FOLDS]
    for fold, (path, of_fold) in enumerate(zip(paths, folds, strict=True)):
        np.savez(path, label=of_fold.label.to_numpy(), **{name: codes[fold] for name, codes in columns.items()})
    batches = {"batch_size": settings["batch_size"], "num_workers": 0}
    train, validation, test = RankDataLoader(feature_map, "both", *paths, **batches)

    class Made(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                feature_map, model_id=kind, early_stop_patience=settings["patience"], reduce_lr_on_plateau=False,
                verbose=0, model_root=str(folder), metrics=["AUC", "logloss"],
            )  # fmt: skip
            self.embedding_layer, width = FeatureEmbedding(feature_map, dim), feature_map.sum_emb_out_dim()
            wide = {"deepfm": FactorizationMachine, "wide_deep": LogisticRegression}
            self.wide: Any = wide[kind](feature_map) if kind in wide else None
            self.cross = CrossNetV2(width, settings["cross_layers"]) if kind == "dcnv2" else None
            self.tower = MLP_Block(
                width, settings["hidden"], output_dim=1, dropout_rates=settings["dropout"], batch_norm=kind == "dcnv2"
            )
            self.compile("adam", "binary_crossentropy", settings["learning_rate"])
            self.reset_parameters()

        def forward(self, inputs: object) -> dict[str, torch.Tensor]:
            given = self.get_inputs(inputs)
            vectors = self.embedding_layer(given)
            flat = vectors.flatten(1)
            logit = self.tower(flat if self.cross is None else self.cross(flat))
            if kind == "deepfm":
                logit = logit + self.wide(given, vectors)
            elif kind == "wide_deep":
                logit = logit + self.wide(given)
            return {"y_pred": self.output_activation(logit)}

        def eval_step(self) -> None:
            super().eval_step()
            best["seconds"] = (time.process_time() - begun) / (self._epoch_index + 1)
            if self._stopping_steps == 0:  # the best epoch so far
                found = self.evaluate(test)
                best.update(epoch=self._epoch_index + 1, validation=float(self._best_metric))
                best.update(auc=found["AUC"], logloss=found["logloss"])
                self.train()

    model = Made()
    os.makedirs(model.model_dir, exist_ok=True)
    begun = time.process_time()
    model.fit(train, epochs=settings["epochs"], validation_data=validation)


def padded(codes: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return lists as rows [n, width], padded with 0 behind."""
    found = np.zeros((len(lengths), width), dtype=codes.dtype)
    found[np.arange(width) < lengths[:, None]] = codes
    return found


{"recbole": recbole, "fuxictr": fuxictr}[library]()
print(json.dumps(best))
