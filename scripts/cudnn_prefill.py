#!/usr/bin/env python3
"""Times BF16 prefill attention through PyTorch beside `oscar bench kernels`.

usage: cudnn_prefill.py HQxHKVxD NEW CACHED    (CACHED: comma-separated numbers)
Prints one JSON object a line: new_tokens, cached, form, time_us (median), time_us_min, time_us_max, tflop_per_s.
Forms: cudnn-causal (no cached tokens), cudnn-full (cached tokens: new queries over cached + new / 2 keys without a
mask, which is the same number of products), flash-causal (PyTorch's FlashAttention, the causal corner at the lower
right). Grouped heads through enable_gqa, or with keys and values repeated where that is refused.
"""
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def time_graph(launch, launches=2, replays=11):
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [launch() for _ in range(launches)]
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
    new = int(sys.argv[2])
    for cached in (int(x) for x in sys.argv[3].split(",")):
        products = 4.0 * head_dim * num_q_heads * (new * cached + new * (new + 1) / 2)

        def rows(heads, tokens):
            return torch.randn(1, tokens, heads, head_dim, device="cuda",
                               dtype=torch.bfloat16).transpose(1, 2)

        q = rows(num_q_heads, new)
        forms = {}
        if cached == 0:
            forms["cudnn-causal"] = (SDPBackend.CUDNN_ATTENTION, new, {"is_causal": True})
        else:
            forms["cudnn-full"] = (SDPBackend.CUDNN_ATTENTION, cached + new // 2, {})
        forms["flash-causal"] = (SDPBackend.FLASH_ATTENTION, cached + new,
                                 {"attn_mask": causal_lower_right(new, cached + new)})
        for form, (backend, keys, options) in forms.items():
            k, v = rows(num_kv_heads, keys), rows(num_kv_heads, keys)
            group = num_q_heads // num_kv_heads
            repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]
            for name, tensors, extra in (("gqa", (k, v), {"enable_gqa": True}),
                                         ("repeated", repeated, {})):
                try:
                    with sdpa_kernel(backend):
                        times = time_graph(lambda: scaled_dot_product_attention(
                            q, *tensors, **options, **extra))
                except (RuntimeError, TypeError, ValueError) as error:
                    print(f"cudnn_prefill.py: {form} {name}: {error}", file=sys.stderr)
                    continue
                median = times[len(times) // 2]
                print(json.dumps({"new_tokens": new, "cached": cached, "form": f"{form}-{name}",
                                  "time_us": median, "time_us_min": times[0],
                                  "time_us_max": times[-1],
                                  "tflop_per_s": products / median * 1e-6}), flush=True)


if __name__ == "__main__":
    main()
