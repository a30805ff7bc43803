"""A sweep from Python: three selectors at three seeds in lanes, a table of means, and a figure.

    uv run python examples/compare_selectors.py
    uv run python examples/compare_selectors.py num_rounds=100 optimizer.lr=0.05

The arguments are overrides of the command line. The same overrides on the command line make the
same runs in the same folders, and finished runs are skipped.
"""

import sys

import matplotlib

import fedsim

matplotlib.use("Agg")

WORDS = [
    "selector=random,power_of_choice,oort",
    "seed=0,1,2",
    "num_rounds=30",
    "tracker=files_only",
]

sweep = fedsim.run_sweep([*WORDS, *sys.argv[1:]], lanes=9)
for result in sweep:
    print(result)

final = sweep.runs.groupby("selector")["final_accuracy"]
print((100 * final.agg(["mean", "std"])).round(2))

axes = sweep.report.plot()
axes.figure.savefig("compare_selectors.png")
print("compare_selectors.png")
