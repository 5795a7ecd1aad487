#!/usr/bin/env python3
"""Measures what every step of the recipes is worth on a model: the evidence behind results/recipe_study_*.md.

  recipe_study.py texts    --out OUT --humaneval HumanEval.jsonl.gz --gsm8k gsm8k_test.jsonl.xz
  recipe_study.py main     --out OUT --model MODEL --austen FOLDER [--length 2048 --windows 10]
  recipe_study.py ablation --out OUT --model MODEL --austen FOLDER [--windows 3]
  recipe_study.py domain   --out OUT --model MODEL --austen FOLDER [--windows 8]
  recipe_study.py report   --out OUT --name smollm2 [--results results]

texts     writes the calibration and evaluation halves of the problem collections as plain text (OUT/texts).
main      calibrates official, centered, light, lean and best at the length and evaluates them with Hadamard, the controls and the
          position-aware arm.
ablation  every step of the recipe put in and taken out alone; rotations, metrics and value centering forced; trellis levels.
domain    calibrates on novels, code, word problems and mixtures and evaluates each on all three.
report    tables with ratios and errors from the rows of all parts found in OUT.

Only python3's standard library and the executable `oscar` (--oscar PATH, default: the one on PATH) are needed; the folder of an
installed bundle serves. A part that was stopped continues where it was: bundles that exist are kept when the same command made
them, `oscar eval` resumes finished windows. --windows counts windows of each text (main, ablation: four novels). --arms replaces the arms of a part,
--dry-run prints the commands and the number of arm tokens. Calibration novels: Emma, Sense and Sensibility; evaluation: the other four.
"""
import argparse
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
import time

from recipe_study_report import (DOMAIN_ARMS, DOMAIN_CALIBRATIONS, DOMAINS, KNOCK_OUTS, LADDER, MAIN_ARMS, RECIPES, TRELLIS, VARIANTS,
                                 report, say, write_file)

CALIBRATION_NOVELS = ["emma", "sense_and_sensibility"]
EVALUATION_NOVELS = ["pride_and_prejudice", "persuasion", "northanger_abbey", "mansfield_park"]
# ---- texts -----------------------------------------------------------------------------------------------------------------

def code_text(problem):
    return f"{problem['prompt']}{problem['canonical_solution']}\n\n{problem['test'].strip()}\n\n\n"


def problem_text(item):
    answer = re.sub(r"<<.*?>>", "", item["answer"])  # calculator annotations are no text
    return f"User: {item['question']}\nAssistant: {answer}\n\n"


def read_lines(path):
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], open)
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def make_texts(options):
    """Even items calibrate, odd ones are scored: both halves are alike and share no item."""
    folder = os.path.join(options.out, "texts")
    os.makedirs(folder, exist_ok=True)
    for name, path, render in (("code", options.humaneval, code_text), ("problems", options.gsm8k, problem_text)):
        if not path:
            sys.exit(f"texts: --{'humaneval' if name == 'code' else 'gsm8k'} FILE is missing")
        items = read_lines(path)
        for half, first in (("calibrate", 0), ("evaluate", 1)):
            target = os.path.join(folder, f"{name}_{half}.txt")
            write_file(target, "".join(render(item) for item in items[first::2]))
            say(f"{target}: {len(items[first::2])} items, {os.path.getsize(target)} bytes")


# ---- running oscar ---------------------------------------------------------------------------------------------------------

class Study:
    def __init__(self, options):
        self.options = options
        self.arm_tokens = 0
        self.folder = os.path.join(options.out, f"{options.part}-{options.length}")
        os.makedirs(self.folder, exist_ok=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def step(self, name, outputs, command):
        """Runs a command unless its outputs exist and the same command made them."""
        stamp = self.path(f".{name}.stamp")
        if all(os.path.exists(path) for path in outputs) and os.path.exists(stamp):
            with open(stamp, encoding="utf-8") as file:
                if file.read() == " ".join(command):
                    say(f"{name}: done before")
                    return
        say(f"{name}: {' '.join(command)}")
        if self.options.dry_run:
            return
        begin = time.time()
        with open(self.path(f"{name}.txt"), "w", encoding="utf-8") as log:
            result = subprocess.run(command, stdout=log, check=False)
        if result.returncode != 0:
            sys.exit(f"{name}: exit code {result.returncode}, see {self.path(name)}.txt")
        say(f"{name}: {time.time() - begin:.1f} s")
        write_file(stamp, " ".join(command))

    def common(self):
        options = self.options
        command = ["--model", options.model, "--compute", options.compute, "--quiet"]
        return command + (["--threads", str(options.threads)] if options.threads else [])

    def calibrate(self, name, texts, recipes, file, extra=()):
        """One pass, a bundle a recipe; file: name of the bundles, in which {recipe} is replaced."""
        out = self.path(f"{file}.h5")
        outputs = [out.replace("{recipe}", recipe) for recipe in recipes]
        command = [self.options.oscar, "calibrate"] + self.common() + ["--recipe", ",".join(recipes)]
        for text in texts:
            command += ["--text", text]
        command += ["--tokens", str(self.options.tokens), "--seq-len", str(self.options.length), "--out", out, *extra]
        self.step(f"calibrate-{name}", outputs, command)

    def evaluate(self, name, texts, arms, windows):
        """arms: NAME[@BUNDLE NAME]; rows go to <name>.rows.jsonl."""
        files = [f"{arm.split('@')[0]}@{self.path(arm.split('@')[1])}.h5" if "@" in arm else arm for arm in arms]
        out = self.path(f"{name}.rows.jsonl")
        command = [self.options.oscar, "eval"] + self.common() + ["--length", str(self.options.length), "--windows", str(windows)]
        for text in texts:
            command += ["--text", text]
        command += ["--rows", self.options.rows, "--arm", ",".join(files), "--out", out]
        if self.options.no_null:
            command.append("--no-null")
        tokens = (len(arms) + (1 if self.options.no_null else 2)) * len(texts) * windows * self.options.length
        self.arm_tokens += tokens
        say(f"{name}: {len(arms)} arms, {len(texts) * windows} windows of {self.options.length}: {tokens} arm tokens at most")
        self.step(name, [out], command)

    def novels(self, names):
        if not self.options.austen:
            sys.exit(f"{self.options.part}: --austen FOLDER is missing")
        return [os.path.join(self.options.austen, f"{name}.txt") for name in names]

    def chosen(self, arms):
        return self.options.arms.split(",") if self.options.arms else arms


def bundles_of(arms):
    return {arm.split("@")[1] for arm in arms if "@" in arm}


def calibrate_for(study, arms):
    texts = study.novels(CALIBRATION_NOVELS)
    needed = bundles_of(arms)
    recipes = [recipe for recipe in RECIPES if recipe in needed]
    if recipes:
        study.calibrate("recipes", texts, recipes, "{recipe}")
    for name in VARIANTS:
        if name in needed:
            study.calibrate(name, texts, ["best"], name, VARIANTS[name])


def run_main(study):
    arms = study.chosen(MAIN_ARMS)
    calibrate_for(study, arms)
    study.evaluate("main", study.novels(EVALUATION_NOVELS), arms, study.options.windows)


def run_ablation(study):
    arms = study.chosen(list(dict.fromkeys(arm for _, arm in LADDER + KNOCK_OUTS)))
    calibrate_for(study, arms + ([] if study.options.arms else [arm for _, arm in TRELLIS]))
    study.evaluate("ablation", study.novels(EVALUATION_NOVELS), arms, study.options.windows)
    if not study.options.arms and study.options.trellis_windows > 0:
        study.evaluate("trellis", study.novels(EVALUATION_NOVELS), [arm for _, arm in TRELLIS], study.options.trellis_windows)


def run_domain(study):
    def halves(domain, half):
        if domain == "novels":
            return study.novels(CALIBRATION_NOVELS[:1] if half == "calibrate" else EVALUATION_NOVELS[:1])
        path = os.path.join(study.options.out, "texts", f"{domain}_{half}.txt")
        if not os.path.exists(path):
            sys.exit(f"{path}: missing, run the part `texts` first")
        return [path]

    for name, domains in DOMAIN_CALIBRATIONS.items():
        texts = [text for domain in domains for text in halves(domain, "calibrate")]
        study.calibrate(name, texts, ["light", "best"], name + "-{recipe}")
    arms = [f"{arm}@{name}-{arm.split('-')[1]}" for name in DOMAIN_CALIBRATIONS for arm in DOMAIN_ARMS]
    for domain in DOMAINS:
        study.evaluate(domain, halves(domain, "evaluate"), study.chosen(arms), study.options.windows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["texts", "main", "ablation", "domain", "report"])
    parser.add_argument("--out", required=True, help="working folder: bundles, rows, logs")
    parser.add_argument("--oscar", default="oscar", help="the executable")
    parser.add_argument("--model", help="GGUF file or Hugging Face folder")
    parser.add_argument("--austen", help="folder with the novels as text files")
    parser.add_argument("--humaneval", help="HumanEval.jsonl.gz")
    parser.add_argument("--gsm8k", help="gsm8k_test.jsonl.xz")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window, in calibration and evaluation")
    parser.add_argument("--windows", type=int, default=10, help="windows of each text")
    parser.add_argument("--trellis-windows", type=int, default=1, help="ablation: windows of each text for the slow trellis arms, 0 = none")
    parser.add_argument("--tokens", type=int, default=0, help="calibration tokens (default: 20480, or three windows if more)")
    parser.add_argument("--rows", default="from:385", help="scored predictions")
    parser.add_argument("--compute", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--arms", help="arms in place of the part's own, NAME[:SUFFIX...][@BUNDLE] with the part's bundle names")
    parser.add_argument("--no-null", action="store_true", help="leave out the noise-floor run")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--name", default="model", help="report: name in the files")
    parser.add_argument("--results", default="results", help="report: where tables go")
    options = parser.parse_args()
    options.tokens = options.tokens or max(20480, 3 * options.length)
    if options.part == "report":
        report(options)
        return
    if options.part == "texts":
        make_texts(options)
        return
    if not options.model:
        sys.exit(f"{options.part}: --model is missing")
    study = Study(options)
    {"main": run_main, "ablation": run_ablation, "domain": run_domain}[options.part](study)
    say(f"{options.part}: {study.arm_tokens} arm tokens at most")


if __name__ == "__main__":
    main()
