"""What a lookup of the reference draws, from settings that a test changes one by one."""

from __future__ import annotations

import numpy as np
import torch

from embeddings.kernels.swap import swap
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import swap_in_numpy
from embeddings.tables.config import TableConfig


def draw(ids, *, num_rows=12, offsets=None, feature="item", **settings):
    offsets = torch.arange(len(ids) + 1) if offsets is None else offsets
    asked = {name: settings.pop(name) for name in ("graph", "rho", "restart", "include_unknown") if name in settings}
    config = SSEConfig(settings.pop("probability", 0.3), **asked)
    function = {"reference": swap_in_numpy, "cpu": swap}[settings.pop("backend", "reference")]
    settings = {"seed": 1, "step": 1} | settings
    table = TableConfig("item", num_rows, 4, (feature,))
    return function(ids, offsets, table=table, feature=feature, config=config, **settings)


def graph_of(pairs, num_rows, **settings):
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Graph.from_edges(ends[:, 0], ends[:, 1], num_rows, **settings)


def complete(num_rows, first_live_row=2):
    live = np.arange(first_live_row, num_rows)
    source, target = (ends.ravel() for ends in np.meshgrid(live, live))
    return Graph.from_edges(source, target, num_rows, first_live_row=first_live_row)
