"""The tables of recipe ``sse`` with the published figures of Wu et al. 2019, and its claims."""

from __future__ import annotations

from benchmarks.papers.pages import published
from benchmarks.papers.trials.trial import Claim, Column, Table

RMSE = (Column("RMSE", "mf", "rmse"),)
FEW_DIMS, BPR_DIMS = (5, 20, 40), (32, 128)
TABLES = (
    Table(
        "ml1m", "MovieLens-1M, MF, dimension 100, l2 .1: test RMSE at the best epoch", RMSE, "best", "rmse", lower=True,
        published=published.SSE_ML1M, comparable=False,
        published_is="table 1: users with fewer than 60 ratings alone, so that levels are not comparable",
    ),
    Table(
        "ml1m_few", "MovieLens-1M, users with fewer than 60 ratings, MF, dimension 10: test RMSE at the best epoch",
        RMSE, "best", "rmse", lower=True, published=published.SSE_ML1M_FEW, comparable=False,
        published_is="table 1, whose dimension, split and rates are not said, with a graph of casts and one of the "
        "users' ages",
    ),
    Table(
        "figures", "MovieLens-1M, users with fewer than 60 ratings, MF without biases, p .05, whose rows are looked at",
        RMSE, "best", "rmse", lower=True,
    ),
    Table(
        "few_dims", "MovieLens-1M, users with fewer than 60 ratings, MF by dimension: test RMSE at the best epoch",
        tuple(Column(f"RMSE, d = {dim}", f"d{dim}", "rmse") for dim in FEW_DIMS), "best", "rmse", lower=True,
    ),
    Table(
        "douban", "Douban, MF, dimension 10, l2 .08: test RMSE at the best epoch", RMSE, "best", "rmse", lower=True,
        published=published.SSE_DOUBAN,
        published_is="table 2; whether its cut of Douban is this one (3,000 x 3,000) is not said",
    ),
    Table("epinions", "Epinions, MF, dimension 10: test RMSE at the best epoch", RMSE, "best", "rmse", lower=True),
    Table(
        "ml1m_bpr", "MovieLens-1M, BPR, all items ranked: precision of the test split",
        tuple(Column(f"P@{k}", "bpr", f"precision_{k}_full") for k in (1, 5, 10)),
        "best", "precision_5_full", published=published.SSE_BPR,
        published_is="table 3, split as in the papers it refers to: 50 ratings train, of users with at least 60",
    ),
    Table(
        "bpr_dims", "MovieLens-1M, BPR by dimension, all items ranked: precision of the test split",
        tuple(Column(f"P@{k}, d = {dim}", f"d{dim}", f"precision_{k}_full") for dim in BPR_DIMS for k in (1, 5, 10)),
        "best", "precision_5_full",
    ),
    Table(
        "gowalla", "Gowalla, BPR, dimension 64, all items ranked",
        (Column("recall@20", "bpr", "recall_20_full"), Column("NDCG@20", "bpr", "ndcg_20_full")),
        "best", "recall_20_full", published=published.GOWALLA,
        published_is="Wang et al. 2019 (NGCF), table 2, MF by BPR on the same split",
    ),
    Table(
        "ml1m_sasrec", "MovieLens-1M, SASRec, two blocks of dimension 100, against 100 negatives",
        (Column("NDCG@10", "sasrec", "ndcg_10"), Column("HR@10", "sasrec", "hit_rate_10")),
        "best", "ndcg_10", published=published.SSE_SASREC,
        published_is="table 4: sequences of 200, dropout .1, L2 1e-5; of 50, dropout .1 or .2 here, all of a history",
    ),
    Table(
        "ml1m_sasrec_200", "MovieLens-1M, SASRec of dimension 100, sequences of 200, against 100 negatives",
        (Column("NDCG@10", "sasrec", "ndcg_10"), Column("HR@10", "sasrec", "hit_rate_10"),
         Column("NDCG@10, 6 blocks", "sasrec_6", "ndcg_10"), Column("HR@10, 6 blocks", "sasrec_6", "hit_rate_10")),
        "best", "ndcg_10", published=published.SSE_SASREC_200,
        published_is="table 4: two blocks and six, dropout .1, weight decay 1e-5 (here of all but the rows of items)",
    ),
)  # fmt: skip

CLAIMS = (
    Claim("ml1m: SSE-SE is at least .004 RMSE below plain MF, each at its best epoch", "ml1m", "mf",
          ("SSE-SE + MF", "best"), ("MF", "best"), 0.004),
    Claim("ml1m, no biases: SSE-SE is at least .004 RMSE below plain MF, each at its best epoch", "ml1m", "mf",
          ("SSE-SE + MF, no biases", "best"), ("MF, no biases", "best"), 0.004),
    Claim("ml1m, users with fewer than 60 ratings, no biases: SSE-SE is at least .004 RMSE below plain MF", "ml1m_few",
          "mf", ("SSE-SE + MF, no biases", "best"), ("MF, no biases", "best"), 0.004),
    Claim("the same: SSE-SE that draws the row of unseen ids is at least .010 below plain MF", "ml1m_few", "mf",
          ("SSE-SE, unseen too + MF, no biases", "best"), ("MF, no biases", "best"), 0.01),
    Claim("the same: SSE-Graph by ages is below SSE-SE that draws the row of unseen ids", "ml1m_few", "mf",
          ("SSE-Graph (ages) + MF, no biases", "best"), ("SSE-SE, unseen too + MF, no biases", "best"), 0.0),
    Claim("douban: SSE-SE is below plain MF", "douban", "mf", ("SSE-SE + MF", "best"), ("MF", "best"), 0.0),
    Claim("douban, no biases: SSE-SE is below plain MF", "douban", "mf",
          ("SSE-SE + MF, no biases", "best"), ("MF, no biases", "best"), 0.0),
    Claim("epinions: SSE-Graph is below plain MF", "epinions", "mf", ("SSE-Graph + MF", "best"), ("MF", "best"), 0.0),
    Claim("ml1m: SSE-SE + BPR is above BPR", "ml1m_bpr", "bpr", ("SSE-SE + BPR", "best"), ("BPR", "best"), 0.0),
    Claim("ml1m: SASRec with p_x and p_y is above SASRec", "ml1m_sasrec", "sasrec",
          ("p_x .1, p_y .1", "best"), ("SASRec", "best"), 0.0),
    Claim("the same with sequences of 200", "ml1m_sasrec_200", "sasrec",
          ("p_x .1, p_y .1", "best"), ("SASRec", "best"), 0.0),
    Claim("the same with six blocks", "ml1m_sasrec_200", "sasrec_6",
          ("p_x .1, p_y .1", "best"), ("SASRec", "best"), 0.0),
    *(
        Claim(f"{table}: SSE-Graph by {name} is below plain MF", table, "mf",
              (f"SSE-Graph ({name}) + MF", "best"), ("MF", "best"), 0.0)
        for table in ("ml1m", "ml1m_few") for name in ("genres", "titles")
    ),
)  # fmt: skip
