"""What recipe_study.py compares, and its tables: arms by step, ratios of mean KL paired over windows, Markdown."""
import json
import math
import os
import re
import sys

RECIPES = ["official", "centered", "light", "lean", "best"]
FP16_BEST = "oscar-best:meta=fp16@best"

MAIN_ARMS = ["hadamard", "oscar@official", "oscar-centered@centered", "oscar-light@light", "oscar-lean@lean", "oscar-best@best",
             FP16_BEST, "oscar-best:k.position@best", "int4:k.centered@best", "int8:k.centered@best", "int8"]

# Each rung adds one step to the one before it: (what is added, arm).
LADDER = [
    ("plain INT2 with windows", "naive-windows"),
    ("+ rotation, clip (published recipe)", "oscar@official"),
    ("+ keys centered", "oscar-centered@centered"),
    ("+ row search over five multipliers in M_A / M_V", "oscar-lean:no-feedback:no-gain:no-v-centering@lean"),
    ("+ error feedback", "oscar-lean:no-gain:no-v-centering@lean"),
    ("+ unbiased gain in the metric", "oscar-lean:no-v-centering@lean"),
    ("+ values centered where held-out data say so (lean)", "oscar-lean@lean"),
    ("+ M_O in place of M_A", "oscar-lean@best"),
    ("+ grid start, four multipliers", "oscar-lean:grid-start:multipliers=0.9/1/1.1/1.22@best"),
    ("+ two sweeps", "oscar-lean:grid-start:multipliers=0.9/1/1.1/1.22:sweeps=2@best"),
    ("+ one refit (best, fp16 metadata)", FP16_BEST),
    ("+ log-8 metadata (best)", "oscar-best@best"),
    ("+ keys centered by position (experimental)", "oscar-best:k.position@best"),
]

# One change each to `best` with fp16 metadata.
KNOCK_OUTS = [
    ("keys not centered", "oscar-best:meta=fp16:k.no-centering@best"),
    ("one multiplier", "oscar-best:meta=fp16:multipliers=1@best"),
    ("three multipliers", "oscar-best:meta=fp16:multipliers=0.92/1.03/1.15@best"),
    ("no error feedback, search and sweeps stay", "oscar-best:meta=fp16:no-feedback@best"),
    ("no gain", "oscar-best:meta=fp16:no-gain@best"),
    ("no gain for keys", "oscar-best:meta=fp16:k.no-gain@best"),
    ("no gain for values", "oscar-best:meta=fp16:v.no-gain@best"),
    ("plain-product gain", "oscar-best:meta=fp16:plain-gain@best"),
    ("clip start in place of the grid", "oscar-best:meta=fp16:clip-start:multipliers=5@best"),
    ("grid chosen in the metric", "oscar-best:meta=fp16:metric-grid-start@best"),
    ("no sweeps", "oscar-best:meta=fp16:sweeps=0@best"),
    ("no refit", "oscar-best:meta=fp16:refits=0@best"),
    ("metric M_A for keys", "oscar-best:meta=fp16@metric-logit"),
    ("metric C_Q for keys", "oscar-best:meta=fp16@metric-queries"),
    ("identity metric for keys", "oscar-best:meta=fp16:k.identity-metric@best"),
    ("identity metric for values", "oscar-best:meta=fp16:v.identity-metric@best"),
    ("damping 0.001", "oscar-best:meta=fp16:damping=0.001@best"),
    ("damping 0.1", "oscar-best:meta=fp16:damping=0.1@best"),
    ("values never centered", "oscar-best:meta=fp16@values-never"),
    ("values always centered", "oscar-best:meta=fp16@values-always"),
    ("rotation H alone", "oscar-best:meta=fp16:h-only@best"),
    ("no rotation", "oscar-best:meta=fp16:no-rotation@best"),
    ("rotation U H P, shared by all heads", "oscar-best:meta=fp16@shared"),
    ("rotation U H P, one a head", "oscar-best:meta=fp16@per-head"),
    ("log-8 metadata", "oscar-best@best"),
    ("keys centered by position", "oscar-best:meta=fp16:k.position@best"),
]

# Trellis levels take the place of the grid start and the sweeps, so they stand beside `lean`.
TRELLIS = [
    ("lean", "oscar-lean@best"),
    ("lean, trellis levels for keys", "oscar-lean:k.trellis@best"),
    ("lean, trellis levels for keys and values", "oscar-lean:trellis@best"),
]

# Bundles beside those of the recipes: name -> further options of `calibrate --recipe best`.
VARIANTS = {
    "metric-logit": ["--metric-k", "logit"],
    "metric-queries": ["--metric-k", "queries"],
    "values-never": ["--center-v", "never"],
    "values-always": ["--center-v", "always"],
    "shared": ["--keep-rotation"],
    "per-head": ["--keep-rotation", "--per-head"],
}

DOMAINS = ["novels", "code", "problems"]
DOMAIN_CALIBRATIONS = {"novels": ["novels"], "code": ["code"], "problems": ["problems"], "half": ["novels", "code"],
                       "thirds": ["novels", "code", "problems"]}
DOMAIN_ARMS = ["oscar-light", "oscar-best"]


def say(text):
    print(f"== {text}", file=sys.stderr, flush=True)


def write_file(path, text):
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".part", path)


def read_rows(path):
    """Rows of whole cells by (arm, metric)."""
    rows = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            row["command"] = re.sub(r"(^|(?<=[\s@]))[^\s,@=]*/", "", row["command"])  # folders of a machine say nothing
            if "@" not in row["cell"]:
                rows[(row["arm"], row["metric"])] = row
    return rows


def window_means(row):
    return [float(value) for value in row["kl_by_window"].split()]


def ratio(test, base):
    """Ratio of mean KL on the same windows and its standard error (linearized, over windows); None with fewer than two."""
    a, b = window_means(test), window_means(base)
    value = sum(a) / sum(b) if sum(b) > 0 else math.nan
    count = len(a)
    if count < 2:
        return value, None
    spread = sum((x - value * y) ** 2 for x, y in zip(a, b))
    return value, math.sqrt(count / (count - 1) * spread) / sum(b)


def number(value, error=None):
    if value is None or math.isnan(value):
        return "n/a"
    if error is None or error <= 0:
        return f"{value:.3g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def table(header, lines):
    text = "| " + " | ".join(header) + " |\n|---" + "|---:" * (len(header) - 1) + "|\n"
    return text + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def kl_cells(rows, arm):
    row = rows[(arm, "kl")]
    return [f"{row['bpe_nominal']:.3f}", number(row["value"], row["se"])]


def ratio_cell(rows, arm, base):
    if (base, "kl") not in rows or arm == base:
        return "1" if arm == base else "n/a"
    return number(*ratio(rows[(arm, "kl")], rows[(base, "kl")]))


def origin(rows):
    row = next(row for (_, metric), row in rows.items() if metric == "kl")
    return (f"{row['model']} ({row['weights']} weights, {row['compute']} compute), {int(row['num_windows'])} windows, {int(row['n'])} predictions, "
            f"rows {row['rows']}, windows {row['windows'] or '64/256'} in BF16, mode {row['mode']}; oscar {row['tool']} on {row['device']}.\n")


def main_table(rows):
    base = "oscar-centered@centered"
    lines = []
    for (arm, metric), row in rows.items():
        if metric != "kl":
            continue
        delta, top1 = rows.get((arm, "ln_ppl_ratio")), rows.get((arm, "top1"))
        lines.append([arm, *kl_cells(rows, arm), ratio_cell(rows, arm, base), number(delta["value"], delta["se"]) if delta else "n/a",
                      number(100 * top1["value"], 100 * top1["se"]) if top1 else "n/a"])
    return table(["arm", "bits of an INT2 row", "KL, nats a token", "ratio to centered", "Δ ln PPL", "top-1 %"], lines)


def step_table(rows, steps, base=None):
    """With a base: ratios to it. Without: each to the step before."""
    lines, previous = [], None
    for what, arm in steps:
        if (arm, "kl") not in rows:
            continue
        against = base or previous
        lines.append([what, f"`{arm}`", *kl_cells(rows, arm), ratio_cell(rows, arm, against) if against else ""])
        previous = arm
    return table(["step", "arm", "bits", "KL", f"ratio to {base}" if base else "ratio to the row above"], lines)


def domain_tables(parts):
    text = ""
    for arm in DOMAIN_ARMS:
        recipe = arm.split("-")[1]
        lines = []
        for name in DOMAIN_CALIBRATIONS:
            cells = [name]
            for domain in DOMAINS:
                rows, matched, this = parts[domain], f"{arm}@{domain}-{recipe}", f"{arm}@{name}-{recipe}"
                row = rows.get((this, "kl"))
                cells.append(f"{number(row['value'], row['se'])} ({ratio_cell(rows, this, matched)})" if row else "n/a")
            lines.append(cells)
        text += f"`{arm}`: KL, and in brackets the ratio to calibration on the matching text\n\n"
        text += table(["calibrated on"] + [f"scored on {domain}" for domain in DOMAINS], lines) + "\n"
    return text


def report(options):
    parts = {}
    order = {kind: place for place, kind in enumerate(["main", "ablation", "domain"])}
    folders = [name for name in os.listdir(options.out) if name.rsplit("-", 1)[0] in order and os.path.isdir(os.path.join(options.out, name))]
    for folder in sorted(folders, key=lambda name: (order[name.rsplit("-", 1)[0]], int(name.rsplit("-", 1)[1]))):
        for file in sorted(os.listdir(os.path.join(options.out, folder))):
            if file.endswith(".rows.jsonl"):
                parts.setdefault(folder, {})[file[:-len(".rows.jsonl")]] = read_rows(os.path.join(options.out, folder, file))
    if not parts:
        sys.exit(f"{options.out}: no rows of any part")
    text = f"# Recipe study: {options.name}\n\nMade by `scripts/recipe_study.py report` from its rows; the text around the tables is the script's. ± is one standard error over windows; ratios are paired on the same windows.\n"
    kept, commands = [], []
    for folder, runs in parts.items():
        kind, length = folder.rsplit("-", 1)
        for name, rows in runs.items():
            commands.append(next(iter(rows.values()))["command"])
            for row in rows.values():
                if row["metric"] in (("kl", "ln_ppl_ratio", "top1", "ppl") if kind == "main" else ("kl",)):
                    kept.append({**{key: value for key, value in row.items() if key != "command"}, "run": f"{folder}/{name}"})
        if kind == "main":
            text += f"\n## Recipes and controls, {length} tokens\n\n{origin(runs['main'])}\n{main_table(runs['main'])}"
        elif kind == "ablation":
            if "ablation" in runs:
                text += f"\n## Steps, {length} tokens\n\n{origin(runs['ablation'])}\nStep by step:\n\n{step_table(runs['ablation'], LADDER)}"
                text += f"\nOne change each to `best` with fp16 metadata:\n\n{step_table(runs['ablation'], [('best, fp16 metadata', FP16_BEST)] + KNOCK_OUTS, FP16_BEST)}"
            if "trellis" in runs:
                text += f"\nTrellis levels. {origin(runs['trellis'])}\n{step_table(runs['trellis'], TRELLIS, TRELLIS[0][1])}"
        elif kind == "domain":
            done = {name: rows for name, rows in runs.items()}
            for domain in DOMAINS:
                done.setdefault(domain, {})
            text += f"\n## Calibration text, {length} tokens\n\n{origin(next(iter(runs.values())))}\n{domain_tables(done)}"
    text += "\n## Commands of the evaluations\n\n```\n" + "\n".join(commands) + "\n```\n"
    os.makedirs(os.path.join(options.results, "rows"), exist_ok=True)
    target = os.path.join(options.results, f"recipe_study_{options.name}.md")
    write_file(target, text)
    rows_target = os.path.join(options.results, "rows", f"recipe_study_{options.name}.jsonl")
    write_file(rows_target, "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in kept))
    say(f"{target}, {rows_target}: {len(kept)} rows")
