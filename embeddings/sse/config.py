"""Configuration of SSE: the probability that an id is swapped, and the distribution of its replacement; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from embeddings.sse.graph import Graph


@dataclass(frozen=True)
class SSEConfig:
    """Stochastic Shared Embeddings of one feature (Wu et al., NeurIPS 2019): p(j, j) = 1 - probability.

    Without ``graph`` a swapped id is replaced by another live row, drawn uniformly (SSE-SE, equation 5). With ``graph``
    each neighbour has ``rho`` times the probability of a row that is no neighbour (SSE-Graph, equation 3); ``rho`` = 1
    is SSE-SE. With ``restart``, in [0.01, 1], the replacement is drawn from the visits of a random walk over
    neighbours, which returns to the id with this probability at each step; 1 is a uniform neighbour. With
    ``include_unknown`` the row of unknown ids is swapped and drawn as live rows are, and has no neighbours. Training
    never sees an unknown id, so without it that row keeps its initial value. (In the paper each id of the test rows has
    a row.)

    Raises:
        ValueError: a number outside its range, ``rho`` or ``restart`` without a graph, or both.

    Example:
        >>> import numpy as np
        >>> from embeddings import SSEConfig
        >>> from embeddings.sse.graph import Graph
        >>> trust = Graph.from_edges(np.array([2, 3]), np.array([3, 5]), num_rows=100)
        >>> SSEConfig(0.01, graph=trust, rho=50.0).asks_graph
        True
        >>> SSEConfig(0.01, rho=50.0)
        Traceback (most recent call last):
        ...
        ValueError: SSE rho = 50.0 needs a graph: pass one, or leave rho out
    """

    probability: float = 0.01
    graph: Graph | None = None
    rho: float = 1.0
    restart: float | None = None
    include_unknown: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"SSE probability must lie in [0, 1], not {self.probability}")
        if not 1.0 <= self.rho < float("inf"):
            raise ValueError(f"SSE rho must be a finite number of at least 1, not {self.rho}")
        if self.graph is None and self.rho != 1.0:
            raise ValueError(f"SSE rho = {self.rho} needs a graph: pass one, or leave rho out")
        if self.restart is not None:
            # Below 0.01 a swap takes hundreds of steps, and its end hardly depends on the id where it began.
            if not 0.01 <= self.restart <= 1.0:
                raise ValueError(f"SSE restart must lie in [0.01, 1], not {self.restart}")
            if self.graph is None or self.rho != 1.0:
                raise ValueError("SSE restart needs a graph and no rho: a walk visits neighbours only")

    @property
    def asks_graph(self) -> bool:
        """True if the replacement of a swapped id depends on the graph."""
        return self.graph is not None and (self.rho != 1.0 or self.restart is not None)
