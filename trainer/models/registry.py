"""Model classes by the name that a job gives them; other packages register theirs as ``evenkeel.models``."""

from embeddings.outside_packages import Registry
from trainer.models.autoint import AutoInt
from trainer.models.base import RankingModel
from trainer.models.bpr import BPR
from trainer.models.din import DIN
from trainer.models.dnn import DNN, FM, DeepFM, WideDeep
from trainer.models.finalmlp import FinalMLP
from trainer.models.gru4rec import GRU4Rec
from trainer.models.hstu import HSTU
from trainer.models.item2vec import Item2Vec
from trainer.models.lightgcn import LightGCN
from trainer.models.mf import MF
from trainer.models.products import DLRM, PNN, DCNv2, XDeepFM
from trainer.models.sasrec import SASRec
from trainer.models.several_labels import ESMM, PLE, MMoE, SharedBottom
from trainer.models.two_tower import TwoTower
from trainer.models.wukong import Wukong

MODELS: Registry[type[RankingModel]] = Registry(
    "evenkeel.models",
    {
        "dnn": DNN,
        "fm": FM,
        "wide_deep": WideDeep,
        "deepfm": DeepFM,
        "xdeepfm": XDeepFM,
        "dcnv2": DCNv2,
        "dlrm": DLRM,
        "pnn": PNN,
        "wukong": Wukong,
        "autoint": AutoInt,
        "finalmlp": FinalMLP,
        "din": DIN,
        "two_tower": TwoTower,
        "mf": MF,
        "bpr": BPR,
        "lightgcn": LightGCN,
        "item2vec": Item2Vec,
        "sasrec": SASRec,
        "gru4rec": GRU4Rec,
        "hstu": HSTU,
        "shared_bottom": SharedBottom,
        "mmoe": MMoE,
        "ple": PLE,
        "esmm": ESMM,
    },
)
