"""The pictures of README and docs/: a function for each, which returns it as SVG, and all of them by file name."""

from __future__ import annotations

from deploy.site.drawing import Arrow, Box, draw


def overview() -> str:
    """Return the picture of the flow of data, from rows to downstream models."""
    return draw(
        "Rows become batches, training writes a checkpoint, its vectors are aligned and checked, and published.",
        {
            "rows": Box(0, 0, "rows: Parquet, CSV,\nJSON Lines ...", "store"),
            "data": Box(1, 0, "trainer.data: one\nglobal order of batches"),
            "loop": Box(2, 0, "training: SSE, deferred\nupdates, AdamAR"),
            "checkpoint": Box(3, 0, "checkpoint:\nany plan loads it", "store"),
            "align": Box(3, 1, "align onto the version\nthat is served"),
            "gate": Box(2, 1, "gate", "choice"),
            "held": Box(2, 2, "held: yesterday's\nversion stays", "end"),
            "average": Box(1, 1, "moving average"),
            "store": Box(0, 1, "feature store: atomic\nswitch, rollback", "store"),
            "consumer": Box(0, 2, "downstream models:\nfetch by id"),
        },
        [
            Arrow("rows", "data"),
            Arrow("data", "loop"),
            Arrow("loop", "checkpoint"),
            Arrow("checkpoint", "align"),
            Arrow("align", "gate"),
            Arrow("gate", "average", "passed"),
            Arrow("gate", "held", "failed"),
            Arrow("average", "store"),
            Arrow("store", "consumer"),
        ],
    )


def deferred_updates() -> str:
    """Return the picture of a deferred update: one row over five steps."""
    return draw(
        "A row is touched in step 3 and read in step 7: the decay and movement of the steps between are applied then.",
        {
            "touch": Box(0, 0, "step 3: a batch has\nthe row; it is written"),
            "stored": Box(0, 1, "stored: theta, m, v,\nlast step s = 3", "store"),
            "between": Box(1, 0, "steps 4, 5, 6: no batch\nhas it; nothing is written"),
            "read": Box(2, 0, "step 7: looked up\n(or evaluated, exported)"),
            "apply": Box(2, 1, "theta as it would be:\ndecay P and movement C\nof J = 4 steps, at once"),
            "next": Box(3, 1, "the batch's gradient\ngoes on from there;\ns = 7", "end"),
        },
        [
            Arrow("touch", "stored"),
            Arrow("touch", "between"),
            Arrow("between", "read"),
            Arrow("stored", "apply", "read, not changed"),
            Arrow("read", "apply"),
            Arrow("apply", "next"),
        ],
    )


def sse() -> str:
    """Return the picture of SSE: a swapped id in lookup and gradient."""
    return draw(
        "In training an id is swapped for another row with a small probability; the gradient goes to that row.",
        {
            "id": Box(0, 0.5, "id j of a sample"),
            "draw": Box(1, 0.5, "drawn by seed, step,\nsample, table", "choice"),
            "own": Box(2, 0, "row j"),
            "other": Box(2, 1, "row k of the same table:\nany, a neighbour, or\none on a random walk"),
            "model": Box(3, 0.5, "model, loss;\nthe gradient goes to\nthe row that was read"),
        },
        [
            Arrow("id", "draw"),
            Arrow("draw", "own", "1 - p0"),
            Arrow("draw", "other", "p0"),
            Arrow("own", "model"),
            Arrow("other", "model"),
        ],
    )


def refresh() -> str:
    """Return the picture of the steps from the rows of a run to a published version."""
    return draw(
        "Rows of a run are aligned, checked by the gate, averaged, written as a version, and published or held.",
        {
            "rows": Box(0, 0, "rows of the run,\nwithout decay", "store"),
            "eligible": Box(1, 0, "touched, finite, long\nenough, not erased?", "choice"),
            "generation": Box(2, 0, "same dim and model,\n12 d shared items?", "choice"),
            "new": Box(3, 0, "new generation: held\nuntil it is promoted", "end"),
            "align": Box(2, 1, "align: Procrustes onto\nwhat was current when\nthe job started"),
            "gate": Box(3, 1, "gate, on the\naligned rows"),
            "plan": Box(1, 1, "plan: found, carried,\nmissing"),
            "average": Box(1, 2, "moving average, as\nrows are written"),
            "write": Box(2, 2, "immutable version,\nwith its views", "store"),
            "switch": Box(3, 2, "gate passed, and the\nparent still current?", "choice"),
            "published": Box(2, 3, "published: one switch"),
            "held": Box(3, 3, "held, with reasons", "end"),
        },
        [
            Arrow("rows", "eligible"),
            Arrow("eligible", "generation", "yes"),
            Arrow("eligible", "plan", "no"),
            Arrow("generation", "new", "no"),
            Arrow("generation", "align", "yes"),
            Arrow("align", "gate"),
            Arrow("align", "plan"),
            Arrow("plan", "average"),
            Arrow("average", "write"),
            Arrow("write", "switch"),
            Arrow("gate", "switch", "verdict"),
            Arrow("switch", "published", "yes"),
            Arrow("switch", "held", "no"),
        ],
    )


def run() -> str:
    """Return the picture of one run: from rows to a step, a checkpoint and what is published."""
    return draw(
        "One run: rows become columns, a batch is looked up and differentiated, a step is applied once ranks agree.",
        {
            "rows": Box(0, 0, "rows: files or tables", "store"),
            "columns": Box(1, 0, "memory-mapped columns,\none global order", "store"),
            "batch": Box(2, 0, "each rank its slice of\nthe global batch"),
            "swap": Box(3, 0, "rows split over ranks:\nSSE before the exchange"),
            "lookup": Box(3, 1, "lookup: SSE, decay at\nread, gather, pool"),
            "model": Box(2, 1, "model: interaction,\nMLP, loss"),
            "record": Box(1, 1, "backward: ids and\ngradients are recorded"),
            "step": Box(0, 1, "ranks agree that all is\nfinite: step(k), once"),
            "checkpoint": Box(0, 2, "checkpoint: any plan\nloads it", "store"),
            "publish": Box(1, 2, "embeddings.refresh:\nalign, gate, average"),
            "store": Box(2, 2, "feature store: versions,\none pointer", "store"),
            "service": Box(3, 2, "service: Arrow or JSON,\nviews"),
        },
        [
            Arrow("rows", "columns", "prepare"),
            Arrow("columns", "batch"),
            Arrow("batch", "swap"),
            Arrow("swap", "lookup", "all-to-all"),
            Arrow("lookup", "model", "all-to-all"),
            Arrow("model", "record"),
            Arrow("record", "step"),
            Arrow("step", "checkpoint"),
            Arrow("checkpoint", "publish"),
            Arrow("publish", "store"),
            Arrow("store", "service"),
        ],
    )


def checkpoint() -> str:
    """Return the picture of a checkpoint: its files, their writers and their readers."""
    return draw(
        "Ranks write rectangles of tables into a hidden folder; one rename shows it; any plan reads what it needs.",
        {
            "ranks": Box(0, 0, "each rank: rectangles\nof its tables"),
            "first": Box(0, 1, "rank 0: dense part, ids,\nmanifest with sha256"),
            "writing": Box(1, 0.5, ".writing-*: files,\nthen fsync", "store"),
            "step": Box(2, 0.5, "step-000000000500", "store"),
            "resume": Box(3, 0, "resume, any plan and\nnumber of ranks"),
            "warm": Box(3, 1, "warm start, predict,\nexport"),
        },
        [
            Arrow("ranks", "writing"),
            Arrow("first", "writing"),
            Arrow("writing", "step", "rename"),
            Arrow("step", "resume"),
            Arrow("step", "warm"),
        ],
    )


def store() -> str:
    """Return the picture of a collection: its files, their writer and their readers."""
    return draw(
        "A writer adds a version beside the others and then replaces the pointer; readers map the version it names.",
        {
            "writer": Box(0, 0.5, "writer, with a lease"),
            "new": Box(1, 0, "v000008: rows, views,\nmanifest with sha256", "store"),
            "pointer": Box(1, 1, "CURRENT", "store"),
            "old": Box(2, 0, "v000007 and before:\nkept for rollbacks", "store"),
            "reader": Box(2, 1, "readers: map the version\nthat CURRENT names"),
            "server": Box(3, 0.5, "Redis or S3: the same\nfiles and one index", "store"),
        },
        [
            Arrow("writer", "new", "1. whole"),
            Arrow("writer", "pointer", "2. switch"),
            Arrow("pointer", "reader"),
            Arrow("old", "reader"),
            Arrow("server", "reader", "fetch", dashed=True),
        ],
    )


PICTURES = {
    "overview": overview,
    "deferred_updates": deferred_updates,
    "sse": sse,
    "refresh": refresh,
    "run": run,
    "checkpoint": checkpoint,
    "store": store,
}
