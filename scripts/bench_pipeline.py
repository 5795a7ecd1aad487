#!/usr/bin/env python3
"""Capture and calibration by oscar beside the same pipeline in Python (transformers, torch), in one run.

usage: bench_pipeline.py --oscar build/tools/oscar --model MODEL.gguf --text TEXT [--tokens 20480] [--venv .cache/bench-venv]

Python: forward in fp32 over sequences of 1024 tokens, post-RoPE q, k, v and attention outputs written to disk as
bf16 (capture), then C_Q, exact C_S = mean of o o^T in double and eigh per layer (calibration).
oscar: capture and calibrate --recipe paper from that capture, and straight from the model without a capture.
Processor time (user + system, all threads) and wall time of each; the ratio of processor times counts on a busy machine.
The table goes to results/cpu_pipeline.md.
"""
import argparse
import datetime
import os
import resource
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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
    with torch.no_grad():
        for number, begin in enumerate(range(0, len(ids), 1024)):
            for kept in (rows, values, outputs):
                kept.clear()
            model(torch.tensor([ids[begin:begin + 1024]]), use_cache=False, logits_to_keep=1)
            for layer, ((q, k), v, o) in enumerate(zip(rows, values, outputs)):
                torch.save([x.to(torch.bfloat16) for x in (q, k, v, o)], f"{args.folder}/{layer}.{number}.pt")
    print("python-capture", time.process_time() - used, time.perf_counter() - start)


def python_calibrate(args):
    import glob
    import torch
    torch.set_num_threads(args.threads)
    start, used = time.perf_counter(), time.process_time()
    layers = len(glob.glob(f"{args.folder}/*.0.pt"))
    for layer in range(layers):
        c_q = c_s = None
        for path in sorted(glob.glob(f"{args.folder}/{layer}.*.pt")):
            q, _, _, o = torch.load(path)
            width = q.shape[-1]
            q = q.reshape(-1, width).double()
            o = o.reshape(-1, width).double()
            c_q = q.T @ q if c_q is None else c_q + q.T @ q
            c_s = o.T @ o if c_s is None else c_s + o.T @ o
        torch.linalg.eigh(c_q)
        torch.linalg.eigh(c_s)
    print("python-calibrate", time.process_time() - used, time.perf_counter() - start)


def run(command):
    """Processor seconds, wall seconds and largest memory in MiB of a command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - start


def worker(args, name, folder):
    command = [os.path.join(args.venv, "bin", "python"), os.path.abspath(__file__), "--worker", name, "--folder", folder,
               "--model", args.model, "--text", args.text, "--tokens", str(args.tokens), "--threads", str(args.threads)]
    fields = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(fields[-2]), float(fields[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oscar", default="build/tools/oscar")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--venv", default=os.path.join(ROOT, ".cache", "bench-venv"))
    parser.add_argument("--out", default=os.path.join(ROOT, "results", "cpu_pipeline.md"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return {"capture": python_capture, "calibrate": python_calibrate}[args.worker](args)
    common = ["--model", args.model, "--text", args.text, "--tokens", str(args.tokens), "--seq-len", "1024",
              "--threads", str(args.threads)]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        rows = {"Python: capture to disk": worker(args, "capture", folder),
                "Python: moments and eigh from the capture": worker(args, "calibrate", folder)}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        paper = ["calibrate", "--recipe", "paper", "--out", folder + "/b.h5", "--held-out", "0"]
        for compute in ("fp32", "bf16"):
            rows[f"oscar: capture to disk, {compute}"] = run(
                [args.oscar, "capture"] + common + ["--outputs", "--compute", compute, "--out", folder + "/c.h5"])
            rows[f"oscar: calibrate from the capture ({compute})"] = run(
                [args.oscar] + paper + ["--capture", folder + "/c.h5", "--threads", str(args.threads)])
            os.remove(folder + "/c.h5")
            rows[f"oscar: calibrate from the model, {compute}"] = run([args.oscar] + paper + common + ["--compute", compute])
    whole = [a + b for a, b in zip(rows["Python: capture to disk"], rows["Python: moments and eigh from the capture"])]
    version = subprocess.run([args.oscar, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")[0]
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(f"# Capture and calibration beside Python\n\n{os.path.basename(args.model)}, {args.tokens} tokens in sequences of 1024, recipe `paper` "
                   f"(exact C_S), {args.threads} threads, load average at the start {load:.1f}, {version}, {datetime.date.today()}.\n"
                   "Command: `python3 scripts/bench_pipeline.py --model MODEL --text TEXT`. Python: transformers and torch in fp32.\n\n"
                   "| job | processor s | wall s | Python's whole pipeline / this, processor time |\n|---|---:|---:|---:|\n")
        for name, (used, wall) in rows.items():
            file.write(f"| {name} | {used:.1f} | {wall:.1f} | {whole[0] / used:.1f} |\n")
    print(open(args.out, encoding="utf-8").read())


if __name__ == "__main__":
    sys.exit(main())
