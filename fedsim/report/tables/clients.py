"""The table of accuracies client by client, of runs that measured them (`client_accuracy`)."""

from collections.abc import Sequence

import numpy as np

from fedsim.client_accuracy import AGGREGATES, KEY
from fedsim.report.groups import Group
from fedsim.report.measures import client_accuracy
from fedsim.report.tables.formatting import show_accuracy, show_seeds
from fedsim.report.tables.table import Table
from fedsim.tracking.final_accuracy import FINAL_WINDOW


def clients(groups: Sequence[Group]) -> Table:
    """Mean, spread and ends of the distribution over clients, as means over seeds."""
    header = ["run", "seeds", "measured on", *(name.replace("_", " ") for name in AGGREGATES), "clients never selected"]
    rows = [
        [
            group.name,
            show_seeds(group),
            str(group.runs[0].config[KEY]),
            *(show_accuracy(group, client_accuracy(name)) for name in AGGREGATES),
            f"{np.mean([(run.selections == 0).sum() for run in group.complete]):.3g}",
        ]
        for group in groups
        if group.complete and group.runs[0].config.get(KEY)
    ]
    note = (
        f"Accuracy of the global model on each client, the mean of the last {FINAL_WINDOW} rounds of a run, with its"
        " 95 % interval over seeds; every client counts once. std: standard deviation over clients. worst and best"
        " tenth: mean of the tenth of the clients with the lowest and the highest accuracy. never selected: mean of the"
        " clients that had not been selected by then, in runs that had any. measured on: labels: test accuracy of each"
        " class, weighted by the client's labels; test: the client's own test samples; holdout, train: its own samples"
        " of that kind."
    )
    return Table("clients", "Accuracy by client", header, rows, note)
