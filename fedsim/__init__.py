"""fedsim: fair, priced comparisons of client selection in federated learning."""

__version__ = "0.1.0"
