#!/usr/bin/env python3
"""Speed of oscar's CPU runtime beside transformers (fp32, bf16) and llama.cpp, measured in turns.

usage: bench_cpu.py --oscar build/tools/oscar --model MODEL.gguf [--rounds 3] [--threads 2] [--cpu-time]

The other engines come from PyPI into .cache/bench-venv (torch, transformers, accelerate, gguf,
llama-cpp-python, which builds from source: some ten minutes and 6 GB on the first run). Every round runs
every engine once, so that a busy machine slows all of them alike; medians over the rounds go to
results/cpu_speed.md. --cpu-time counts processor time of one thread instead of wall time: the only figures
worth having while other programs run.
"""
import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = ["torch", "transformers", "accelerate", "gguf", "llama-cpp-python", "numpy"]
PREFILL, DECODE, STEPS = (512, 2048), (512, 4096), 32


def clock(cpu_time):
    return time.process_time() if cpu_time else time.perf_counter()


def token_ids(count):
    return [(7919 * i + 13) % 48000 for i in range(count)]


def report(job, context, rate):
    print(json.dumps({"job": job, "context": context, "rate": rate}), flush=True)


def worker_torch(args, dtype_name):
    import torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(args.threads)
    folder, name = os.path.split(os.path.abspath(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model = model.to(getattr(torch, dtype_name)).eval()
    with torch.no_grad():
        square = torch.ones(2048, 2048, dtype=getattr(torch, dtype_name))
        for repeat in range(3):
            start = clock(args.cpu_time)
            square @ square
            rate = 2 * 2048**3 * 1e-9 / (clock(args.cpu_time) - start)
        report("gemm", 2048, rate)
        for length in PREFILL:
            ids = torch.tensor([token_ids(length)])
            for repeat in range(2):
                start = clock(args.cpu_time)
                model(ids, use_cache=True, logits_to_keep=1)
                rate = length / (clock(args.cpu_time) - start)
            report("prefill", length, rate)
        for context in DECODE:
            out = model(torch.tensor([token_ids(context)]), use_cache=True, logits_to_keep=1)
            token = torch.tensor([[5]])
            start = clock(args.cpu_time)
            for _ in range(STEPS):
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
            report("decode", context, STEPS / (clock(args.cpu_time) - start))


def worker_llama(args):
    from llama_cpp import Llama
    model = Llama(model_path=args.model, n_ctx=max(DECODE) + 64, n_batch=2048, n_ubatch=512,
                  n_threads=args.threads, n_threads_batch=args.threads, verbose=False)
    for length in PREFILL:
        for repeat in range(2):
            model.reset()
            start = clock(args.cpu_time)
            model.eval(token_ids(length))
            rate = length / (clock(args.cpu_time) - start)
        report("prefill", length, rate)
    for context in DECODE:
        model.reset()
        model.eval(token_ids(context))
        start = clock(args.cpu_time)
        for _ in range(STEPS):
            model.eval([5])
        report("decode", context, STEPS / (clock(args.cpu_time) - start))


def run_oscar(args, compute):
    command = [args.oscar, "bench", "cpu", "--model", args.model, "--compute", compute, "--threads",
               str(args.threads), "--prefill", ",".join(map(str, PREFILL)), "--decode",
               ",".join(map(str, DECODE)), "--decode-steps", str(STEPS), "--repeats", "1", "--gemm", "--json"]
    if args.cpu_time:
        command.append("--cpu-time")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    for row in rows:
        row["rate"] = row.get("tokens_per_s", row.get("gflop_per_s"))
    return rows


def run_worker(args, name, python):
    command = [python, os.path.abspath(__file__), "--worker", name, "--model", args.model, "--threads",
               str(args.threads)] + (["--cpu-time"] if args.cpu_time else [])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    environment["OMP_NUM_THREADS"] = str(args.threads)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            text=True, env=environment).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def prepare(folder):
    python = os.path.join(folder, "bin", "python")
    marker = os.path.join(folder, "complete")
    if not os.path.exists(marker):
        print(f"installing {', '.join(PACKAGES)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q"] + PACKAGES, check=True)
        open(marker, "w").close()
    return python


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        text = info.read()
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in text]
    return f"{names[0]}, {len(names)} cores, {' '.join(flags)}"


def table(results, args, oscar_rows):
    engines = list(results)
    lines = ["| job | " + " | ".join(engines) + " | oscar fp32 / torch fp32 | oscar bf16 / torch bf16 |"
             " oscar fp32 / llama.cpp |", "|---" * (len(engines) + 4) + "|"]
    def value(engine, job, context):
        rates = results[engine].get((job, context), [])
        return statistics.median(rates) if rates else None
    def ratio(a, b):
        return "-" if a is None or b is None else f"{a / b:.2f}"
    jobs = [("prefill", n) for n in PREFILL] + [("decode", n) for n in DECODE] + [("gemm", 2048)]
    for job, context in jobs:
        cells = [value(engine, job, context) for engine in engines]
        by = dict(zip(engines, cells))
        unit = "GFLOP/s" if job == "gemm" else "tok/s"
        lines.append(f"| {job} {context}, {unit} | "
                     + " | ".join("-" if c is None else f"{c:.1f}" for c in cells) + " | "
                     + " | ".join([ratio(by["oscar fp32"], by["torch fp32"]),
                                   ratio(by["oscar bf16"], by["torch bf16"]),
                                   ratio(by["oscar fp32"], by["llama.cpp"])]) + " |")
    gflop = oscar_rows[0]["gflop_per_token"]
    for compute in ("fp32", "bf16"):
        peak = value(f"oscar {compute}", "gemm", 2048)
        shares = ", ".join(f"{value(f'oscar {compute}', 'prefill', n) * gflop / peak:.0%} at {n}"
                           for n in PREFILL)
        lines += ["", f"oscar {compute}: matrix products alone reach {peak:.0f} GFLOP/s, {gflop:.4f} GFLOP a "
                  f"token; prefill runs at {shares} of that rate (attention and the rest take the remainder)."]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--oscar", default=os.path.join(ROOT, "build", "tools", "oscar"))
    parser.add_argument("--model", default=os.path.join(ROOT, ".cache", "smollm2-135m-instruct-q4_1.gguf"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread")
    parser.add_argument("--venv", default=os.path.join(ROOT, ".cache", "bench-venv"))
    parser.add_argument("--out", default=os.path.join(ROOT, "results", "cpu_speed.md"))
    parser.add_argument("--worker", choices=["float32", "bfloat16", "llama"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "llama":
        return worker_llama(args)
    if args.worker:
        return worker_torch(args, args.worker)
    if args.cpu_time:
        args.threads = 1
    python = prepare(args.venv)
    runs = {"oscar fp32": lambda: run_oscar(args, "fp32"),
            "torch fp32": lambda: run_worker(args, "float32", python),
            "llama.cpp": lambda: run_worker(args, "llama", python),
            "oscar bf16": lambda: run_oscar(args, "bf16"),
            "torch bf16": lambda: run_worker(args, "bfloat16", python)}
    results = {engine: {} for engine in runs}
    oscar_rows = []
    load = [os.getloadavg()[0]]
    for round_index in range(args.rounds):
        for engine, run in runs.items():
            rows = run()
            if engine == "oscar fp32":
                oscar_rows = rows
            for row in rows:
                results[engine].setdefault((row["job"], row["context"]), []).append(row["rate"])
            print(f"round {round_index + 1}/{args.rounds}: {engine} done", file=sys.stderr)
        load.append(os.getloadavg()[0])
    clock_name = "processor time of one thread" if args.cpu_time else f"wall time, {args.threads} threads"
    versions = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], check=True,
                              capture_output=True, text=True).stdout.split()
    used = [v for v in versions if v.split("==")[0] in ("torch", "transformers", "llama_cpp_python")]
    text = (f"# Speed on the CPU\n\n{os.path.basename(args.model)}; {clock_name}; medians of {args.rounds} rounds in "
            f"turns; load average {min(load):.1f} to {max(load):.1f}"
            f"{' (above the core count: the machine was shared, only ratios count)' if max(load) > os.cpu_count() else ''}.\n"
            f"{processor()}; Linux {platform.release()}; "
            f"{datetime.date.today().isoformat()}; oscar {oscar_rows[0]['tool']} "
            f"({oscar_rows[0]['backend']}); {', '.join(used)}.\n"
            f"Command: `python3 scripts/bench_cpu.py{' --cpu-time' if args.cpu_time else ''} --rounds {args.rounds}`. "
            f"Torch and llama.cpp read the same GGUF file; torch expands it to its own type, llama.cpp also rounds "
            f"activations to 8 bits.\n\n{table(results, args, oscar_rows)}\n")
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    with open(args.out + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(args.out + ".part", args.out)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
