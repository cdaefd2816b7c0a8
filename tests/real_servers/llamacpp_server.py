"""llama.cpp's own HTTP server, as the package `xllamacpp` carries it.

usage: llamacpp_server.py MODEL.gguf PORT [exact]

exact: attention in float32. With the defaults (flash attention, a half-precision cache) one logprob in 2,500 lies up to
3e-2 nats from that of a float32 forward pass, which hides smaller faults; so within 3e-4.
"""

from __future__ import annotations

import os
import sys
import threading

# Read when OpenMP is loaded: waiting threads sleep, so that a busy machine does not make them wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import xllamacpp

SLOTS = 4
CONTEXT_PER_SLOT = 2048


def main(model: str, port: int, *, exact: bool) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT_PER_SLOT  # llama.cpp divides it among the slots
    params.cpuparams.n_threads = 2
    params.warmup = False
    if exact:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print("listening at", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), exact=sys.argv[3:] == ["exact"])
