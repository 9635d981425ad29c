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
def swap_tile(
    used, indices, offsets, bag, first_id, end_id, first_sample, num_samples, num_rows, longest, step, draws,
    graph_offsets, neighbours, thresholds, WALKERS: tl.constexpr, GRAPH: tl.constexpr,
):  # fmt: skip
    """Write the ids of ``num_samples`` bags of one feature after SSE to ``used``.

    ``bag`` is the number of the first bag and [first_id, end_id) its and the others' ids; ``longest`` is the most ids
    of one. ``first_sample``, int64, is the first bag's sample in the global batch, ``num_rows`` that of the table.
    ``draws`` points to the feature's SwapDraws.words, as int64; ``graph_offsets``, ``neighbours`` and ``thresholds``
    are the rest of SwapDraws. GRAPH: whether any feature of the launch has a graph.

    The ids are copied; then WALKERS threads at a time each walk from hit to hit of one block of samples and one
    position, so that only what hits is drawn for.
    """
    for start in range(first_id, end_id, 4 * WALKERS):
        at = start + tl.arange(0, 4 * WALKERS)
        tl.store(used + at, tl.load(indices + at, mask=at < end_id, other=0), mask=at < end_id)
    distances = tl.load(draws)
    if distances > 0:
        distances_at, feature = thresholds + distances - 1, tl.load(draws + 1).to(tl.uint32)
        key0, key1 = tl.load(draws + 2).to(tl.uint32), tl.load(draws + 3).to(tl.uint32)
        first_live, shift = tl.load(draws + 5), tl.load(draws + 9)
        first_block = first_sample >> shift
        num_walks = (((first_sample + num_samples - 1) >> shift) - first_block + 1) * longest
        # What other threads of the program have copied is overwritten below.
        tl.debug_barrier()
        for start in range(0, num_walks, WALKERS):
            walk = start + tl.arange(0, WALKERS)
            walking = walk < num_walks
            block, position = first_block + walk // longest, walk % longest
            place = feature | (position & 0xFFFF).to(tl.uint32)
            # Samples count from the first of the tile; the block's first may lie before it.
            behind = (block << shift) - first_sample
            sample = behind - 1
            end = tl.minimum(behind + (tl.zeros_like(behind) + 1 << shift), num_samples)
            d0, d1, d2, d3 = behind, behind, behind, behind
            drawn, stream = tl.full([], 0, tl.int32), tl.full([], _DISTANCE_STREAM, tl.uint32)
            while tl.max(walking.to(tl.int32)) > 0:
                if drawn % 4 == 0:
                    w0, w1, w2, w3 = four_words(step, block.to(tl.uint32), place, stream, key0, key1)
                    # Independent of one another, so that none waits for another's thresholds.
                    d0, d1 = _distance(w0, distances_at), _distance(w1, distances_at)
                    d2, d3 = _distance(w2, distances_at), _distance(w3, distances_at)
                    stream += 1
                even, odd = tl.where(drawn % 4 == 0, d0, d2), tl.where(drawn % 4 == 1, d1, d3)
                sample += tl.where(drawn % 2 == 0, even, odd)
                drawn += 1
                walking = walking & (sample < end)
                hit = walking & (sample >= 0)
                if tl.max(hit.to(tl.int32)) > 0:
                    id_at = tl.load(offsets + bag + sample, mask=hit, other=0).to(tl.int64) + position
                    hit = hit & (id_at < tl.load(offsets + bag + sample + 1, mask=hit, other=0).to(tl.int64))
                    ids = tl.load(indices + id_at, mask=hit, other=0).to(tl.int64)
                    hit = hit & (ids >= first_live) & (ids < num_rows)
                    ids = _new_rows(
                        ids, hit, sample + first_sample, place, first_live, step, draws, graph_offsets, neighbours,
                        thresholds, key0, key1, GRAPH,
                    )  # fmt: skip
                    tl.store(used + id_at, ids, mask=hit)
    # What other threads of the program have written is read by the caller.
    tl.debug_barrier()


@triton.jit
def _distance(word, distances):
    """Return how far the next hit is: one more than the thresholds not above the word, found by bisection.

    ``distances`` points to embeddings.sse.swap.distance_thresholds.
    """
    word, count = word.to(tl.int64), word.to(tl.int64) * 0
    for level in tl.static_range(1, _LEVELS + 1):
        is_behind = tl.load(distances + count + (_LONGEST >> level) - 1) <= word
        count += tl.where(is_behind, _LONGEST >> level, 0)
    return 1 + count + (tl.load(distances + count) <= word).to(tl.int64)


@triton.jit
def _new_rows(
    ids, hit, samples, place, first_live, step, draws, graph_offsets, neighbours, thresholds, key0, key1,
    GRAPH: tl.constexpr,
):  # fmt: skip
    """Return what the ids that ``hit`` become; samples count in the global batch, ``place`` is the third word."""
    group, lane = (samples >> 2).to(tl.uint32), samples & 3
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
        if GRAPH:
            pending = pending & _contains(neighbours, start, end, other, pending)
        else:
            pending = pending & False
        stream += 1
    return swapped


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
