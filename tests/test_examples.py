"""The examples in docstrings of what users import: each runs as it stands.

Those that need a run or a service are run beside the tests of theirs (Predictor, Exported, Client).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import run_example

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = [
    "embeddings.embedding_tables.EmbeddingTables",
    "embeddings.stochastic_shared_embedding.StochasticSharedEmbedding",
    "embeddings.optimized_embedding.OptimizedEmbedding",
    "embeddings.sse.config.SSEConfig",
    "embeddings.tables.config.InitConfig",
    "embeddings.tables.config.TableConfig",
    "embeddings.optim.adam.AdamAR",
    "embeddings.rff.features.RandomFourierFeatures",
    "embeddings.refresh.procrustes.procrustes",
    "embeddings.refresh.gate_metrics.compare",
    "embeddings.store.backend_registry.open_store",
    "embeddings.dynamic.tables.DynamicTables",
    "trainer.spec.reading.parse_dataset",
    "trainer.spec.reading.parse_job",
    "trainer.spec.reading.load_documents",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_example(name, directory=tmp_path / "store")
