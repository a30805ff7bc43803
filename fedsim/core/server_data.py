"""The samples that a selector needs at the server, and what the server must see of single clients.

Both follow from the signals that the selector declares in `needs`.
"""

from collections.abc import Collection

SERVER_DATA = {
    "validation": "labelled samples",
    "public": "unlabelled samples",
    "test": "the test set",
}
"""Samples of the server by the signal (`fedsim.clients.context.Signal`) that a selector declares
for them."""
SEEN = {
    "updates": "updates",
    "gradients": "gradients",
    "losses": "losses",
    "training_loss": "losses",
    "squared_loss": "losses",
    "accuracies": "accuracies",
    "public": "predictions",
    "label_counts": "label counts",
    "resources": "times",
    "response_times": "times",
}
"""The table says what the server sees of single clients, by the signal that a selector declares."""


def server_data(signals: Collection[str]) -> str:
    """Return what `signals` need at the server, in words: "labelled samples", or "nothing"."""
    words = [samples for signal, samples in SERVER_DATA.items() if signal in signals]
    return ", ".join(words) or "nothing"


def server_sees(signals: Collection[str]) -> str:
    """Return what the server must see of single clients for `signals`, in words: "updates, losses".

    "only sums" if sums over the participants suffice, as under secure aggregation.
    """
    words = [thing for signal, thing in SEEN.items() if signal in signals]
    return ", ".join(dict.fromkeys(words)) or "only sums"
