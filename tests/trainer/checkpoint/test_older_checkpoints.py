"""What a checkpoint of an older version did not have is taken for absent, or asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.checkpoint.test_format import save_simple
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.warm_start import id_maps, numeric_features, profile_of_rows, vectors_read


def test_files_that_came_later_are_optional_and_ids_are_not(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save_simple(tmp_path))
    assert numeric_features(checkpoint) == ()
    assert vectors_read(checkpoint) == ()
    assert profile_of_rows(checkpoint) is None
    with pytest.raises(CheckpointError, match=r"an older version wrote it: train the parent job again, or leave init_"):
        id_maps(checkpoint)
