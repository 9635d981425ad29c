"""Stochastic Shared Embeddings before the lookup: ids are swapped as by :mod:`embeddings.sse`, bit for bit.

Swaps have a launch of their own. Programs of the lookup take a few samples each, and each would have to walk through
the whole block that contains its samples.
"""

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


# Arguments that differ from batch to batch: lookup.py says why Triton must know.
VARYING = ["num_ids", "batch_size", "sample_offset", "step"]


@triton.jit(do_not_specialize=VARYING)
def swap(
    used, indices, offsets, draws, graph_offsets, neighbours, thresholds, num_ids, batch_size, sample_offset, step,
    SAMPLES: tl.constexpr, WALKERS: tl.constexpr, GRAPH: tl.constexpr,
):  # fmt: skip
    """Write the ids after SSE to ``used``; grid: features times tiles of SAMPLES samples.

    ``draws`` is SwapDraws.words, as int64; ``graph_offsets``, ``neighbours`` and ``thresholds`` are the rest of
    SwapDraws. ``sample_offset`` is the first sample's number in the global batch. GRAPH: whether any feature of the
    launch has a graph.

    The ids are copied. Then WALKERS threads at a time each walk from hit to hit of one block of samples and one
    position, so that only hits need draws. With bad offsets the result does not matter, since the lookup refuses them;
    but no write may leave ``used``.
    """
    num_tiles = tl.cdiv(batch_size, SAMPLES)
    feature = tl.program_id(0) // num_tiles
    tile_start = (tl.program_id(0) % num_tiles) * SAMPLES
    num_samples = tl.minimum(SAMPLES, batch_size - tile_start)
    bag = feature * batch_size + tile_start
    draws += feature * DRAW_WORDS
    first_id = tl.minimum(tl.maximum(tl.load(offsets + bag).to(tl.int64), 0), num_ids)
    end_id = tl.minimum(tl.maximum(tl.load(offsets + bag + num_samples).to(tl.int64), 0), num_ids)
    for start in range(first_id, end_id, 2 * SAMPLES):
        at = start + tl.arange(0, 2 * SAMPLES)
        tl.store(used + at, tl.load(indices + at, mask=at < end_id, other=0), mask=at < end_id)
    distances = tl.load(draws)
    if distances > 0:
        distances_at, third_word = thresholds + distances - 1, tl.load(draws + 1).to(tl.uint32)
        key0, key1 = tl.load(draws + 2).to(tl.uint32), tl.load(draws + 3).to(tl.uint32)
        first_live, shift = tl.load(draws + 5), tl.load(draws + 9)
        num_rows = first_live + tl.load(draws + 4) + 1
        sample_at = bag + tl.arange(0, SAMPLES)
        mine = tl.arange(0, SAMPLES) < num_samples
        first = tl.load(offsets + sample_at, mask=mine, other=0).to(tl.int64)
        last = tl.load(offsets + sample_at + 1, mask=mine, other=0).to(tl.int64)
        longest = tl.max(tl.where((first >= 0) & (last <= num_ids), last - first, 0))
        counter, first_sample = step.to(tl.uint32), sample_offset.to(tl.int64) + tile_start
        first_block = first_sample >> shift
        num_walks = (((first_sample + num_samples - 1) >> shift) - first_block + 1) * longest
        # Wait for the program's other threads: their copies are overwritten below.
        tl.debug_barrier()
        for start in range(0, num_walks, WALKERS):
            walk = start + tl.arange(0, WALKERS)
            walking = walk < num_walks
            block, position = first_block + walk // longest, walk % longest
            place = third_word | (position & 0xFFFF).to(tl.uint32)
            # Samples count from the first of the tile; the block's first may lie before it.
            behind = (block << shift) - first_sample
            sample = behind - 1
            end = tl.minimum(behind + (tl.zeros_like(behind) + 1 << shift), num_samples)
            d0, d1, d2, d3 = behind, behind, behind, behind
            drawn, stream = tl.full([], 0, tl.int32), tl.full([], _DISTANCE_STREAM, tl.uint32)
            while tl.max(walking.to(tl.int32)) > 0:
                if drawn % 4 == 0:
                    w0, w1, w2, w3 = four_words(counter, block.to(tl.uint32), place, stream, key0, key1)
                    d0, d1, d2, d3 = _distances(w0, w1, w2, w3, distances_at)
                    stream += 1
                even, odd = tl.where(drawn % 4 == 0, d0, d2), tl.where(drawn % 4 == 1, d1, d3)
                sample += tl.where(drawn % 2 == 0, even, odd)
                drawn += 1
                walking = walking & (sample < end)
                hit = walking & (sample >= 0)
                if tl.max(hit.to(tl.int32)) > 0:
                    id_at = tl.load(offsets + bag + sample, mask=hit, other=0).to(tl.int64) + position
                    hit = hit & (id_at < tl.load(offsets + bag + sample + 1, mask=hit, other=0).to(tl.int64))
                    hit = hit & (id_at >= 0) & (id_at < num_ids)
                    ids = tl.load(indices + id_at, mask=hit, other=0).to(tl.int64)
                    hit = hit & (ids >= first_live) & (ids < num_rows)
                    ids = _new_rows(
                        ids, hit, sample + first_sample, place, first_live, counter, draws, graph_offsets, neighbours,
                        thresholds, key0, key1, GRAPH,
                    )  # fmt: skip
                    tl.store(used + id_at, ids, mask=hit)


@triton.jit
def _distances(w0, w1, w2, w3, thresholds):
    """Return each word's distance to the next hit: 1 plus the number of thresholds up to the word, found by bisection.

    ``thresholds`` points to embeddings.sse.swap.distance_thresholds. All four searches advance together.
    """
    w0, w1, w2, w3 = w0.to(tl.int64), w1.to(tl.int64), w2.to(tl.int64), w3.to(tl.int64)
    d0, d1, d2, d3 = w0 * 0, w1 * 0, w2 * 0, w3 * 0
    for level in tl.static_range(1, _LEVELS + 1):
        half = thresholds + (_LONGEST >> level) - 1
        t0, t1, t2, t3 = tl.load(half + d0), tl.load(half + d1), tl.load(half + d2), tl.load(half + d3)
        d0 += tl.where(t0 <= w0, _LONGEST >> level, 0)
        d1 += tl.where(t1 <= w1, _LONGEST >> level, 0)
        d2 += tl.where(t2 <= w2, _LONGEST >> level, 0)
        d3 += tl.where(t3 <= w3, _LONGEST >> level, 0)
    t0, t1, t2, t3 = (
        tl.load(thresholds + d0), tl.load(thresholds + d1), tl.load(thresholds + d2), tl.load(thresholds + d3),
    )  # fmt: skip
    d0, d1 = d0 + 1 + (t0 <= w0).to(tl.int64), d1 + 1 + (t1 <= w1).to(tl.int64)
    d2, d3 = d2 + 1 + (t2 <= w2).to(tl.int64), d3 + 1 + (t3 <= w3).to(tl.int64)
    return d0, d1, d2, d3


@triton.jit
def _new_rows(
    ids, hit, samples, place, first_live, step, draws, graph_offsets, neighbours, thresholds, key0, key1,
    GRAPH: tl.constexpr,
):  # fmt: skip
    """Draw replacements for the ids that ``hit``; samples count in the global batch, ``place`` is the third word."""
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
    """Return ``swapped`` with the end of a walk from each id that is ``walking``, whose list is [start, end)."""
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
    """Return True if the ascending list neighbours[start:end] holds ``wanted``, by bisection of all lists at once."""
    low, high = start, end
    while tl.max((asked & (low < high)).to(tl.int32)) > 0:
        middle = (low + high) >> 1
        searching = asked & (low < high)
        smaller = tl.load(neighbours + middle, mask=searching, other=0) < wanted
        low = tl.where(searching & smaller, middle + 1, low)
        high = tl.where(searching & ~smaller, middle, high)
    inside = asked & (low < end)
    return inside & (tl.load(neighbours + low, mask=inside, other=0) == wanted)
