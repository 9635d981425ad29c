"""The public data sets, keyed by name: files, checksums where the publisher states them, terms. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.published import conversions
from trainer.data.published.conversions import Conversion


@dataclass(frozen=True)
class RemoteFile:
    """A file of a publisher; ``md5`` as the publisher states it, None where there is none."""

    url: str
    md5: str | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class PublishedData:
    """A data set: its files, the Parquet files that it becomes, and its publisher's terms."""

    title: str
    files: tuple[RemoteFile, ...]
    tables: tuple[str, ...]
    convert: Conversion
    terms: str


_NO_TERMS = "no licence of the data is stated; cite"
_S3REC = "https://raw.githubusercontent.com/RUCAIBox/CIKM2020-S3Rec/master/data"
_LIGHTGCN = "https://raw.githubusercontent.com/gusye1234/LightGCN-PyTorch/master/data/gowalla"

PUBLISHED: dict[str, PublishedData] = {
    "ml1m": PublishedData(
        "MovieLens 1M, GroupLens",
        # https://files.grouplens.org/datasets/movielens/ml-1m.zip.md5
        (RemoteFile("https://files.grouplens.org/datasets/movielens/ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906"),),
        ("ml1m", "ml1m_users", "ml1m_movies"),
        conversions.movielens_1m,
        "research use; no redistribution and no commercial use without permission of GroupLens "
        "(https://files.grouplens.org/datasets/movielens/ml-1m-README.txt); cite Harper and Konstan 2015, "
        "https://doi.org/10.1145/2827872",
    ),
    "epinions": PublishedData(
        "Epinions, Tang et al.",
        (RemoteFile("https://www.cse.msu.edu/~tangjili/datasetcode/epinions_with_rating_timestamp_txt.zip"),),
        ("epinions", "epinions_trust"),
        conversions.epinions,
        f"{_NO_TERMS} Tang, Gao and Liu 2012 (https://www.cse.msu.edu/~tangjili/datasetcode/truststudy.htm)",
    ),
    "amazon_beauty": PublishedData(
        "Amazon reviews, Beauty, as of BERT4Rec",
        (RemoteFile("https://github.com/FeiSun/BERT4Rec/raw/master/data/beauty.txt"),),
        ("amazon_beauty",),
        conversions.amazon_beauty,
        f"{_NO_TERMS} McAuley et al. 2015 and Sun et al. 2019",
    ),
    "amazon_sports": PublishedData(
        "Amazon reviews, Sports and Outdoors, as of S3-Rec",
        (
            RemoteFile(f"{_S3REC}/Sports_and_Outdoors.txt"),
            RemoteFile(f"{_S3REC}/Sports_and_Outdoors_item2attributes.json"),
        ),
        ("amazon_sports", "amazon_sports_attrs"),
        conversions.amazon_sports,
        f"{_NO_TERMS} McAuley et al. 2015 and Zhou et al. 2020",
    ),
    "gowalla": PublishedData(
        "Gowalla check-ins, as of LightGCN",
        (RemoteFile(f"{_LIGHTGCN}/train.txt"), RemoteFile(f"{_LIGHTGCN}/test.txt")),
        ("gowalla",),
        conversions.gowalla,
        f"{_NO_TERMS} Cho, Myers and Leskovec 2011 and He et al. 2020",
    ),
}
