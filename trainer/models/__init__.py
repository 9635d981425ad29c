"""Single-device models by name. Sharding is applied around them, in trainer/sharding.py; none of them knows of it."""

from trainer.models.bpr import BPR
from trainer.models.dnn import DNN
from trainer.models.item2vec import Item2Vec
from trainer.models.sasrec import SASRec
from trainer.models.two_tower import TwoTower

MODELS: dict[str, type[DNN] | type[TwoTower] | type[BPR] | type[Item2Vec] | type[SASRec]] = {
    "dnn": DNN,
    "two_tower": TwoTower,
    "bpr": BPR,
    "item2vec": Item2Vec,
    "sasrec": SASRec,
}
