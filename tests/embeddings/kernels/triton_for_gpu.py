"""Compiles every Triton kernel for an H200 (sm_90), which needs no GPU, and prints what it moves, as a line of JSON.

Run by test_triton.py with TRITON_INTERPRET=0. The interpreter checks no types, and says nothing of access widths.
"""

from __future__ import annotations

import collections
import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from embeddings.kernels.triton.entries import entries
from embeddings.kernels.triton.lookup import lookup
from embeddings.kernels.triton.rules import ADAGRAD, ADAM, RMSPROP
from embeddings.kernels.triton.swap import swap
from embeddings.kernels.triton.update import finish, update

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "output": "fp32", "used": "i64", "vectors": "fp32", "row_values": "fp32", "last_steps": "i32", "descriptors": "i64",
    "indices": "i64", "offsets": "i64", "scales": "fp32", "fault": "i32", "draws": "i64", "graph_offsets": "i64",
    "neighbours": "i32", "thresholds": "i64", "near": "fp32", "lookahead": "fp32", "decay": "fp32", "logs": "fp64",
    "now": "fp64", "keys": "i32", "grad_offsets": "i64", "pooling_weights": "fp32", "norms": "fp64",
    "grads": "fp32", "order": "i64",
    "partials": "fp32", "pieces": "i32", "table_descriptors": "i64", "settings": "fp64",
}  # fmt: skip
OPTIONS = {
    "CLIP": True,
    "DECAY": True,
    "INSIDE": False,
    "AHEAD": True,
    "DEFERRED": True,
    "MOMENTUM": True,
    "FROM_START": False,
    "LOGS": True,
}
DIM, TILE, SPLIT = 64, 32, 16
CONSTANTS = {
    "DIM": DIM, "BLOCK": DIM, "TILE": TILE, "POSITIONS": 16, "WALKERS": 32, "SAMPLES": 256, "ROWS": 32, "ALIGNMENT": 16,
    "VECTORS": 2, "ROWWISE": False, "POOLED": True, "SCALED": True, "GRAPH": True, "IGNORE": False,
    "SHARED": True, "SPLIT": SPLIT, "RULE": ADAM, "WINDOW": 16, "DEPTH": 16, "QUADS": True,
    **OPTIONS,
}  # fmt: skip
# What other row optimizers than Adam are.
NO_MOMENTUM = {"MOMENTUM": False, "AHEAD": False}
OPTIMIZERS = {
    "adam": {},
    "rmsprop": {"RULE": RMSPROP, "VECTORS": 1, **NO_MOMENTUM},
    "rowwise_adam": {"VECTORS": 1, "ROWWISE": True},
    "rowwise_adagrad": {
        "RULE": ADAGRAD, "VECTORS": 0, "ROWWISE": True, "DEFERRED": False, "LOGS": False, "DECAY": False,
        **NO_MOMENTUM,
    },
}  # fmt: skip


def compile_for_gpu(kernel, stored: str, optimizer: str = "adam") -> dict[str, object]:
    """``stored``: the type of rows, fp32, fp16 or bf16."""
    given = CONSTANTS | OPTIMIZERS[optimizer]
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if parameter.is_constexpr:
            signature[name], constants[(i,)] = "constexpr", given[name]
        elif name in POINTERS or name == "weights":
            signature[name] = "*" + (stored if name == "weights" else POINTERS[name])
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name == "total_dim":
                attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants, attrs=attributes), target=TARGET)
    moves = collections.Counter(re.findall(r"\b(?:ld|st)\.(?:global|local)[\w.]*", compiled.asm["ptx"]))
    return {
        "kernel": kernel.__name__, "stored": stored, "optimizer": optimizer, "moves": moves,
        "shared_bytes": compiled.metadata.shared,
    }  # fmt: skip


if __name__ == "__main__":
    for stored in sys.argv[1:] or ["fp32"]:
        for kernel in (swap, lookup, entries, update, finish) if stored == "fp32" else (update,):
            print(json.dumps(compile_for_gpu(kernel, stored)), flush=True)
    for optimizer in ("rmsprop", "rowwise_adam", "rowwise_adagrad"):
        for kernel in (lookup, update, finish) if optimizer == "rowwise_adam" else (update,):
            print(json.dumps(compile_for_gpu(kernel, "fp32", optimizer)), flush=True)
