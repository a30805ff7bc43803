"""Finished runs in pandas: accuracy against bytes, and how evenly methods select clients.

uv run python examples/finished_runs.py outputs/default
uv run python examples/finished_runs.py runs.parquet    # written by `fedsim report --archive`
"""

import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

import fedsim

report = fedsim.load_report(sys.argv[1] if len(sys.argv) > 1 else "outputs/default")
# Interrupted and diverged runs are there, too. If you have swept over other keys, group by them.
runs = report.runs[report.runs["status"] == "done"]
done = report.rounds[report.rounds["status"] == "done"]
print(runs.groupby(["dataset", "partition", "selector"])["final_accuracy"].agg(["mean", "count"]))

# each row has the ids that its round selected; the share of rounds in which a client was selected
selections = done[["selector", "run", "selected"]].explode("selected").dropna()
times = selections.groupby(["selector", "run", "selected"]).size()
shares = times.div(done.groupby("run")["round"].max(), level="run")
print("\nmost selected client, share of rounds")
print(shares.groupby(["selector", "run"]).max().groupby("selector").mean().round(3).to_string())

figure, axes = plt.subplots()
for selector, rows in done.groupby("selector"):
    mean = rows.groupby("round")[["bytes_total", "test_accuracy"]].mean()
    axes.plot(mean["bytes_total"] / 1e6, mean["test_accuracy"], label=selector)
axes.set(xlabel="MB sent, both ways", ylabel="test accuracy, mean over runs")
axes.legend()
figure.savefig("finished_runs.png")
print("\nfinished_runs.png")
