#!/usr/bin/env python3
"""Times cuDNN's BF16 decode attention through PyTorch for `oscar bench kernels --against cudnn`.

usage: cudnn_sdpa.py HQxHKVxD CONTEXTS BATCHES    (comma-separated numbers)
Prints one JSON object a line: context, batch, time_us (median), time_us_min, time_us_max, form.
Method as in the kernels' own bench: a CUDA graph of several launches over different buffers (cold L2
cache), 15 replays, time of a launch. Of the two ways to hand grouped heads to cuDNN (enable_gqa; the
group as query rows, which is the same sum without a mask) the faster one is reported.
"""
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def time_graph(launch, launches, replays=15):
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [launch(i) for i in range(launches)]
    times = []
    for replay in range(-2, replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 0:
            times.append(begin.elapsed_time(end) * 1000.0 / launches)
    del outputs, graph
    return sorted(times)


def main():
    num_q_heads, num_kv_heads, head_dim = (int(x) for x in sys.argv[1].split("x"))
    group = num_q_heads // num_kv_heads
    for context in (int(x) for x in sys.argv[2].split(",")):
        for batch in (int(x) for x in sys.argv[3].split(",")):
            size = 4.0 * batch * num_kv_heads * context * head_dim
            copies = max(1, min(64, int(320e6 / size) + 1))
            try:
                caches = [
                    [torch.randn(batch, num_kv_heads, context, head_dim, device="cuda",
                                 dtype=torch.bfloat16) for _ in range(2)] for _ in range(copies)
                ]
                q = torch.randn(batch, num_q_heads, 1, head_dim, device="cuda", dtype=torch.bfloat16)
                rows = q.reshape(batch, num_kv_heads, group, head_dim)
                forms = {
                    "gqa": lambda i: scaled_dot_product_attention(q, *caches[i % copies],
                                                                  enable_gqa=True),
                    "rows": lambda i: scaled_dot_product_attention(rows, *caches[i % copies]),
                }
                best = None
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    for name, launch in forms.items():
                        try:
                            times = time_graph(launch, max(copies, 1 if size > 1e9 else 4))
                        except RuntimeError as error:
                            print(f"cudnn_sdpa.py: {name}: {error}", file=sys.stderr)
                            continue
                        if best is None or times[len(times) // 2] < best[1][len(best[1]) // 2]:
                            best = (name, times)
                if best is not None:
                    print(json.dumps({"context": context, "batch": batch, "form": best[0],
                                      "time_us": best[1][len(best[1]) // 2],
                                      "time_us_min": best[1][0], "time_us_max": best[1][-1]}),
                          flush=True)
            except torch.OutOfMemoryError:
                print(f"cudnn_sdpa.py: context {context} batch {batch}: out of memory",
                      file=sys.stderr)
            caches = None
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
