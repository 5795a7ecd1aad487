#!/usr/bin/env python3
"""Capture and calibration by oscar beside the same pipeline in Python (transformers, torch), in one run.

usage: bench_pipeline.py --oscar build/tools/oscar --model MODEL.gguf --text TEXT [--tokens 20480] [--rounds 3] [--venv .cache/bench-venv]

Python: forward in fp32 over sequences of 1024 tokens, post-RoPE q, k, v written to disk as bf16 (capture); then per layer
C_Q, proxy C_S, exact C_S = mean of o o^T in double, and eigh (moments). The attention outputs o are computed from q, k, v in
fp32 by torch's fused attention (SDPA), by plain matrix products and softmax, or taken from a hook (written by the capture).
oscar: capture of q, k, v and calibrate from it (outputs recomputed), the same from a capture with outputs, and calibrate
straight from the model without a capture. Recipe `paper` = exact C_S; `official,paper` has the proxy besides.
Processor time (user + system, all threads) and wall time of each; on a busy machine the ratio of processor times counts.
The table goes to results/cpu_pipeline.md.
"""
import argparse
import datetime
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON_CAPTURE = "Python: capture of q, k, v to disk"
PYTHON_OUTPUTS = "Python: hooked outputs to disk besides"
METHODS = {"sdpa": "Python: moments and eigh from the capture, SDPA",
           "plain": "Python: moments and eigh from the capture, plain attention",
           "hook": "Python: moments and eigh, hooked outputs"}


def python_capture(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama import modeling_llama
    torch.set_num_threads(args.threads)
    folder, name = os.path.split(os.path.abspath(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    with open(args.text, encoding="utf-8") as file:
        ids = tokenizer(file.read(), add_special_tokens=False)["input_ids"][:args.tokens]
    rows = []
    plain_rope = modeling_llama.apply_rotary_pos_emb

    def rope(q, k, *rest, **options):
        q, k = plain_rope(q, k, *rest, **options)
        rows.append([q, k])
        return q, k

    modeling_llama.apply_rotary_pos_emb = rope
    values, outputs = [], []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda m, i, o: values.append(o))
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, i: outputs.append(i[0]))
    start, used = time.perf_counter(), time.process_time()
    outputs_used = outputs_wall = 0.0
    with torch.no_grad():
        for number, begin in enumerate(range(0, len(ids), 1024)):
            for kept in (rows, values, outputs):
                kept.clear()
            model(torch.tensor([ids[begin:begin + 1024]]), use_cache=False, logits_to_keep=1)
            for layer, ((q, k), v) in enumerate(zip(rows, values)):
                v = v.view(1, v.shape[1], -1, k.shape[-1]).transpose(1, 2)
                torch.save([x.to(torch.bfloat16).contiguous() for x in (q, k, v)], f"{args.folder}/{layer}.{number}.pt")
            part = time.process_time(), time.perf_counter()
            for layer, o in enumerate(outputs):
                torch.save(o.to(torch.bfloat16), f"{args.folder}/o{layer}.{number}.pt")
            outputs_used += time.process_time() - part[0]
            outputs_wall += time.perf_counter() - part[1]
    print("python-capture", outputs_used, outputs_wall, time.process_time() - used, time.perf_counter() - start)


def attention_outputs(q, k, v, method):
    """o [heads, T, D] of causal attention in fp32; q [heads, T, D], k and v [kv_heads, T, D]."""
    import torch
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if method == "sdpa":
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v


def python_calibrate(args):
    """C_Q, proxy C_S, exact C_S and eigh per layer, in double, from the captured q, k, v (and o for `hook`)."""
    import glob
    import torch
    torch.set_num_threads(args.threads)
    gram = lambda rows: rows.reshape(-1, rows.shape[-1]).T @ rows.reshape(-1, rows.shape[-1])
    start, used = time.perf_counter(), time.process_time()
    exact_used = exact_wall = 0.0
    for layer in range(len(glob.glob(f"{args.folder}/o*.0.pt"))):
        paths = sorted(glob.glob(f"{args.folder}/{layer}.*.pt"))
        parts = [[x[0] for x in torch.load(path)] for path in paths]
        heads, width = parts[0][0].shape[0], parts[0][0].shape[-1]
        kv_heads = parts[0][1].shape[0]
        q, k, v = (torch.cat([part[i] for part in parts], 1).double() for i in range(3))
        per_head = torch.stack([gram(rows) for rows in q.view(kv_heads, -1, width)]) / (q[0].numel() / width * heads / kv_heads)
        weights = ((k @ per_head) * k).sum(-1, keepdim=True)
        weights /= weights.mean(1, keepdim=True)
        proxy = sum(gram(rows) for rows in v * weights.sqrt())
        begin = time.process_time(), time.perf_counter()
        exact = 0.0
        for path, part in zip(paths, parts):
            if args.method == "hook":
                folder, name = os.path.split(path)
                o = torch.load(os.path.join(folder, "o" + name)).view(-1, heads, width)
            else:
                o = attention_outputs(*(x.float() for x in part[:3]), args.method)
            exact = exact + gram(o.double())
        exact_used += time.process_time() - begin[0]
        exact_wall += time.perf_counter() - begin[1]
        for matrix in (per_head.mean(0), proxy, exact):
            torch.linalg.eigh(matrix)
    print("python-calibrate", exact_used, exact_wall, time.process_time() - used, time.perf_counter() - start)


def run(command):
    """Processor seconds and wall seconds of a command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - start


def worker(args, name, folder, method):
    """(processor, wall) seconds of the attention-output part and of the whole job."""
    command = [os.path.join(args.venv, "bin", "python"), os.path.abspath(__file__), "--worker", name, "--folder", folder,
               "--method", method, "--model", args.model, "--text", args.text, "--tokens", str(args.tokens),
               "--threads", str(args.threads)]
    # Threads that spin while they wait would multiply torch's processor time on a busy machine.
    environment = dict(os.environ, OMP_WAIT_POLICY="PASSIVE", KMP_BLOCKTIME="0")
    fields = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.split()
    numbers = [float(field) for field in fields[-4:]]
    return tuple(numbers[:2]), tuple(numbers[2:])


def minus(a, b):
    return a[0] - b[0], a[1] - b[1]


def measure(args, scratch):
    """{job: (processor s, wall s)} of one round."""
    common = ["--model", args.model, "--text", args.text, "--tokens", str(args.tokens), "--seq-len", "1024",
              "--threads", str(args.threads)]
    rows = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        part, whole = worker(args, "capture", folder, "hook")
        rows[PYTHON_CAPTURE] = minus(whole, part)
        rows[PYTHON_OUTPUTS] = part
        for method, label in METHODS.items():
            part, whole = worker(args, "calibrate", folder, method)
            rows[label] = whole
            rows[label + ": of it exact C_S"] = part
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        capture, bundle = folder + "/c.h5", folder + "/b-{recipe}.h5"
        calibrate = [args.oscar, "calibrate", "--held-out", "0", "--out", bundle, "--recipe"]
        for compute in ("fp32", "bf16"):
            rows[f"oscar {compute}: capture of q, k, v to disk"] = run(
                [args.oscar, "capture"] + common + ["--compute", compute, "--out", capture])
            from_capture = ["--capture", capture, "--compute", compute, "--threads", str(args.threads)]
            rows[f"oscar {compute}: `paper` from the capture"] = run(calibrate + ["paper"] + from_capture)
            rows[f"oscar {compute}: `official,paper` from the capture"] = run(calibrate + ["official,paper"] + from_capture)
            os.remove(capture)
            run([args.oscar, "capture"] + common + ["--outputs", "--compute", compute, "--out", capture])
            rows[f"oscar {compute}: `paper` from a capture with outputs"] = run(calibrate + ["paper"] + from_capture)
            os.remove(capture)
            rows[f"oscar {compute}: `paper` from the model"] = run(
                calibrate + ["paper", "--compute", compute] + common)
    return rows


def median_of(rounds, job, clock):
    return statistics.median(rows[job][clock] for rows in rounds)


def table(rounds):
    """Every job with its medians, spread and the factor to the Python side that does the same."""
    sdpa = METHODS["sdpa"]
    pipeline = [median_of(rounds, PYTHON_CAPTURE, clock) + median_of(rounds, sdpa, clock) for clock in (0, 1)]
    lines = ["| job | processor s | wall s | against Python's | processor time | wall time |", "|---|---:|---:|---|---:|---:|"]
    for job in rounds[0]:
        used, wall = (median_of(rounds, job, clock) for clock in (0, 1))
        against, base = "", None
        if job.startswith("oscar"):
            if "with outputs" in job:
                against, base = "moments given outputs", [median_of(rounds, METHODS["hook"], clock) for clock in (0, 1)]
            elif "capture of" in job:
                against, base = "capture", [median_of(rounds, PYTHON_CAPTURE, clock) for clock in (0, 1)]
            elif "from the capture" in job:
                against, base = "moments (SDPA)", [median_of(rounds, sdpa, clock) for clock in (0, 1)]
            else:
                against, base = "capture + moments (SDPA)", pipeline
        factors = ["", ""] if base is None else [f"{base[0] / used:.1f} x", f"{base[1] / wall:.1f} x"]
        spread = [f" ({min(values):.2f} .. {max(values):.2f})" if len(rounds) > 1 else ""
                  for values in ([rows[job][clock] for rows in rounds] for clock in (0, 1))]
        lines.append(f"| {job} | {used:.2f}{spread[0]} | {wall:.2f}{spread[1]} | {against} | {factors[0]} | {factors[1]} |")
    lines += ["", f"Python's whole pipeline (capture + moments by SDPA): {pipeline[0]:.1f} s processor, {pipeline[1]:.1f} s wall."]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oscar", default="build/tools/oscar")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scratch", default=ROOT, help="folder for the captures (4 GB)")
    parser.add_argument("--venv", default=os.path.join(ROOT, ".cache", "bench-venv"))
    parser.add_argument("--out", default=os.path.join(ROOT, "results", "cpu_pipeline.md"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--method", choices=list(METHODS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return {"capture": python_capture, "calibrate": python_calibrate}[args.worker](args)
    rounds, load = [], [os.getloadavg()[0]]
    for number in range(args.rounds):
        rounds.append(measure(args, args.scratch))
        load.append(os.getloadavg()[0])
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    version = subprocess.run([args.oscar, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")[0]
    text = (f"# Capture and calibration beside Python\n\n{os.path.basename(args.model)}, {args.tokens} tokens in sequences of 1024, "
            f"{args.threads} threads; medians of {args.rounds} rounds in turns; load average {min(load):.1f} to {max(load):.1f}; "
            f"{version}, {datetime.date.today()}.\n"
            f"Command: `python3 scripts/bench_pipeline.py --model MODEL --text TEXT --rounds {args.rounds}`.\n\n"
            f"{table(rounds)}\n")
    with open(args.out + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(args.out + ".part", args.out)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
