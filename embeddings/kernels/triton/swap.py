"""Stochastic Shared Embeddings inside the lookup: the swaps of :mod:`embeddings.sse`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from embeddings.kernels.triton.philox import below, four_words, one_word
from embeddings.sse.swap import DISTANCE_STREAM, LONGEST_BLOCK, NEIGHBOUR_STREAM, ROW_STREAM

_DISTANCE_STREAM, _ROW_STREAM = tl.constexpr(DISTANCE_STREAM), tl.constexpr(ROW_STREAM)
_NEIGHBOUR_STREAM, _LONGEST = tl.constexpr(NEIGHBOUR_STREAM), tl.constexpr(LONGEST_BLOCK)
_LEVELS = tl.constexpr(LONGEST_BLOCK.bit_length() - 1)
# Words for each feature in embeddings.sse.SwapDraws.words.
DRAW_WORDS = tl.constexpr(10)


@triton.jit
def swap(ids, live, samples, positions, step, draws, graph_offsets, neighbours, thresholds, GRAPH: tl.constexpr):
    """Return the ids of one feature after SSE.

    ``ids``, ``samples`` and ``positions`` are int64 tensors of one shape; samples count in the global batch. ``live``
    says which of the ids are rows of the table. ``draws`` points to the feature's SwapDraws.words, as int64;
    ``graph_offsets``, ``neighbours`` and ``thresholds`` are the rest of SwapDraws. GRAPH: whether any feature of the
    launch has a graph.
    """
    distances, place = thresholds + tl.load(draws) - 1, tl.load(draws + 1).to(tl.uint32)
    key0, key1 = tl.load(draws + 2).to(tl.uint32), tl.load(draws + 3).to(tl.uint32)
    first_live = tl.load(draws + 5)
    group, lane = (samples >> 2).to(tl.uint32), samples & 3
    place = place | (positions & 0xFFFF).to(tl.uint32)
    hit = _hits(live & (ids >= first_live), samples, step, place, key0, key1, distances, tl.load(draws + 9))
    # Most tiles have no hit at the usual probabilities: they skip the other draws.
    if tl.max(hit.to(tl.int32)) > 0:
        others = tl.zeros_like(ids) + tl.load(draws + 4)
        start, end = tl.zeros_like(ids), tl.zeros_like(ids)
        pending, swapped = hit, ids
        if GRAPH:
            graph = tl.load(draws + 6) - 1
            listed = hit & (graph >= 0)
            start = tl.load(graph_offsets + graph + ids, mask=listed, other=0)
            end = tl.load(graph_offsets + graph + ids + 1, mask=listed, other=0)
            listed = listed & (end > start)
            limit = tl.load(thresholds + tl.load(draws + 7) + end - start, mask=listed, other=0)
            word = one_word(step, group, place, _NEIGHBOUR_STREAM, key0, key1, lane)
            stop = tl.load(draws + 8)
            near = listed & (stop == 0) & (word.to(tl.int64) < limit)
            drawn = below(tl.maximum(end - start, 1), step, group, place, _ROW_STREAM, key0, key1, lane)
            swapped = tl.where(near, tl.load(neighbours + start + drawn, mask=near, other=0).to(tl.int64), swapped)
            walks = listed & (stop > 0)
            swapped = _walk(
                ids, swapped, walks, stop, start, end, step, group, place, key0, key1, lane, graph_offsets + graph,
                neighbours,
            )  # fmt: skip
            pending = pending & ~near & ~walks
        stream = tl.full([], _ROW_STREAM, tl.uint32)
        while tl.max(pending.to(tl.int32)) > 0:
            drawn = below(others, step, group, place, stream, key0, key1, lane)
            other = first_live + drawn + (drawn >= ids - first_live).to(tl.int64)
            swapped = tl.where(pending, other, swapped)
            pending = pending & _contains(neighbours, start, end, other, pending)
            stream += 1
        ids = swapped
    return ids


@triton.jit
def _hits(live, samples, step, place, key0, key1, distances, shift):
    """Return which of the ids that are ``live`` hit.

    Each walks from hit to hit of its block and position until it is reached or passed. ``distances`` points to
    embeddings.sse.swap.distance_thresholds, a block has 2^shift samples.
    """
    block = (samples >> shift).to(tl.uint32)
    sample = samples - (samples >> shift << shift)
    at, hit = tl.zeros_like(samples) - 1, live & False
    stream = tl.full([], _DISTANCE_STREAM, tl.uint32)
    while tl.max((live & (at < sample)).to(tl.int32)) > 0:
        w0, w1, w2, w3 = four_words(step, block, place, stream, key0, key1)
        at = _next_hit(at, w0, distances)
        hit = hit | (live & (at == sample))
        at = _next_hit(at, w1, distances)
        hit = hit | (live & (at == sample))
        at = _next_hit(at, w2, distances)
        hit = hit | (live & (at == sample))
        at = _next_hit(at, w3, distances)
        hit = hit | (live & (at == sample))
        stream += 1
    return hit


@triton.jit
def _next_hit(at, word, distances):
    """Return the hit behind ``at``: one more than the thresholds not above the word, found by bisection."""
    word, count = word.to(tl.int64), tl.zeros_like(at)
    for level in tl.static_range(1, _LEVELS + 1):
        is_behind = tl.load(distances + count + (_LONGEST >> level) - 1) <= word
        count += tl.where(is_behind, _LONGEST >> level, 0)
    return at + 1 + count + (tl.load(distances + count) <= word).to(tl.int64)


@triton.jit
def _walk(
    ids, swapped, walking, stop, start, end, step, group, place, key0, key1, lane, graph_offsets, neighbours,
):  # fmt: skip
    """Return ``swapped`` with the end of a walk with restart from each id that is ``walking``.

    The list of an id is [start, end).
    """
    first, last = start, end
    stream = tl.full([], 0, tl.uint32)
    while tl.max(walking.to(tl.int32)) > 0:
        drawn = below(tl.maximum(last - first, 1), step, group, place, _ROW_STREAM + stream, key0, key1, lane)
        here = tl.load(neighbours + first + drawn, mask=walking, other=0).to(tl.int64)
        word = one_word(step, group, place, _NEIGHBOUR_STREAM + stream, key0, key1, lane)
        ends = walking & (here != ids) & (word.to(tl.int64) < stop)
        swapped = tl.where(ends, here, swapped)
        walking = walking & ~ends
        first = tl.load(graph_offsets + here, mask=walking, other=0)
        last = tl.load(graph_offsets + here + 1, mask=walking, other=0)
        stranded = first == last
        first, last = tl.where(stranded, start, first), tl.where(stranded, end, last)
        stream += 1
    return swapped


@triton.jit
def _contains(neighbours, start, end, wanted, asked):
    """Return whether the ascending list neighbours[start:end] holds ``wanted``.

    All lists are searched at once, by bisection.
    """
    low, high = start, end
    while tl.max((asked & (low < high)).to(tl.int32)) > 0:
        middle = (low + high) >> 1
        searching = asked & (low < high)
        smaller = tl.load(neighbours + middle, mask=searching, other=0) < wanted
        low = tl.where(searching & smaller, middle + 1, low)
        high = tl.where(searching & ~smaller, middle, high)
    inside = asked & (low < end)
    return inside & (tl.load(neighbours + low, mask=inside, other=0) == wanted)
